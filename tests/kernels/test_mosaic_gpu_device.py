"""The Hopper kernels on a Hopper GPU, against float64; skipped on any other machine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorajax.kernels_pallas import LoraWeights, add_lora, lora_delta, lora_linear, make_routing
from lorajax.kernels_pallas.gpu.launch import current_device

REASON = current_device()
pytestmark = pytest.mark.skipif(isinstance(REASON, str), reason=str(REASON))
BF16 = jnp.bfloat16

CASES = {
    # tokens, slots, rank, d_in, slices, active
    "tiny": (16, 4, 16, 256, (128,), 2),
    "one token": (1, 64, 16, 4096, (14336, 14336), 1),
    "decode": (64, 64, 16, 4096, (4096, 1024, 1024), 8),
    "all active": (64, 64, 16, 4096, (4096,), 64),
    "joined slices": (64, 64, 16, 4096, (4096, 1024, 1024), 2),
    "rank 8": (72, 8, 8, 4096, (4096, 1024, 1024), 3),
    "rank 64": (256, 64, 64, 14336, (4096,), 8),
    "rank 128": (20, 8, 128, 4096, (4096,), 5),
    "four parts": (40, 8, 16, 4096, (3072,), 4),
    "shrink on all SMs": (64, 64, 64, 4096, (4096,), 64),
    "wide tiles": (100, 16, 16, 1024, (14336, 14336), 4),
    "wide tiles after shrink": (128, 64, 64, 1024, (14336, 14336), 64),
    "128 tokens": (128, 64, 16, 4096, (4096, 1024, 1024), 8),
    "two blocks": (512, 16, 16, 4096, (4096,), 4),
    "prefill": (2048, 16, 16, 4096, (4096, 1024, 1024), 8),
    "prefill of one": (1000, 16, 16, 1024, (1024, 256, 256), 1),
}


def make(case, seed):
    tokens, slots, rank, d_in, slices, active = case
    rng = np.random.default_rng(seed)

    def normal(*shape, deviation=0.02):
        return jnp.asarray(deviation * rng.standard_normal(shape, np.float32), BF16)

    rows = np.zeros((tokens, slots), np.float32)
    chosen = rng.permutation(slots)[:active]
    for t in np.flatnonzero(rng.random(tokens) < 0.7):
        rows[t, chosen[t % active]] = rng.uniform(0.5, 1.5)
    weights = LoraWeights(
        normal(2, slots, len(slices), rank, d_in),
        normal(2, slots, rank, sum(slices)),
        jnp.asarray(rng.uniform(0.5, 2, (2, slots, len(slices), rank)), jnp.float32),
        slices,
    )
    return normal(tokens, d_in, deviation=1), normal(2, d_in, sum(slices)), weights, rows


def exact_delta(x, weights, rows):
    """The delta of layer 1 in float64."""
    x, A, B, scale = (
        np.asarray(a).astype(np.float64) for a in (x, weights.A, weights.B, weights.scale)
    )
    out, start = [], 0
    for g, width in enumerate(weights.slices):
        h = x @ A[1, :, g].reshape(-1, x.shape[1]).T
        h *= scale[1, :, g].reshape(-1) * np.repeat(rows, A.shape[3], axis=1)
        out.append(h @ B[1].reshape(h.shape[1], -1)[:, start : start + width])
        start += width
    return np.concatenate(out, axis=1)


def error(found, exact):
    return np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact)


def run(op, *arrays, weights, rows, implementation="mosaic_gpu"):
    routing = make_routing(jnp.asarray(rows), jnp.arange(rows.shape[0]))
    call = jax.jit(functools.partial(op, layer=1, implementation=implementation))
    return call(*arrays, weights, routing)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lora_linear(case):
    x, w, weights, rows = make(case, seed=1)
    exact = np.asarray(x, np.float64) @ np.asarray(w[1], np.float64) + exact_delta(x, weights, rows)
    y = run(lora_linear, x, w, weights=weights, rows=rows)
    plain = run(lora_linear, x, w, weights=weights, rows=rows, implementation="xla")
    assert error(y, exact) <= 2 * error(plain, exact)
    again = run(lora_linear, x, w, weights=weights, rows=rows)
    assert (np.asarray(y) == np.asarray(again)).all()
    nothing = run(lora_linear, x, w, weights=weights, rows=rows * 0)
    base = ~(rows != 0).any(axis=1)
    assert (np.asarray(y)[base] == np.asarray(nothing)[base]).all()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lora_delta_and_add_lora(case):
    x, _, weights, rows = make(case, seed=2)
    exact = exact_delta(x, weights, rows)
    delta = run(lora_delta, x, weights=weights, rows=rows)
    assert error(delta, exact) < 0.01
    base = ~(rows != 0).any(axis=1)
    assert not np.asarray(delta)[base].any()
    y = jnp.ones(exact.shape, BF16)
    added = run(add_lora, y, x, weights=weights, rows=rows)
    assert error(added, exact + 1) < 0.01
    assert (np.asarray(added)[base] == 1).all()


def test_nan_stays_with_its_adapter_and_its_row():
    x, w, weights, rows = make(CASES["decode"], seed=3)
    clean = np.asarray(run(lora_linear, x, w, weights=weights, rows=rows))
    used = np.flatnonzero((rows != 0).any(axis=0))[0]
    broken = LoraWeights(
        weights.A.at[1, used].set(jnp.nan), weights.B, weights.scale, weights.slices
    )
    bad_row = int(np.flatnonzero(rows[:, used] == 0)[0])
    x = x.at[bad_row].set(jnp.nan)
    y = np.asarray(run(lora_linear, x, w, weights=broken, rows=rows))
    hurt = rows[:, used] != 0
    hurt[bad_row] = True
    assert np.isnan(y[hurt].astype(np.float32)).all(axis=1).all()
    assert (y[~hurt] == clean[~hurt]).all()


def test_products_that_do_not_depend_on_each_other_in_one_program():
    """Launches that overlap would share counters: the kernel stops with an error if they do."""
    x, w, weights, rows = make((16, 8, 16, 1024, (1024,), 3), seed=5)
    routing = make_routing(jnp.asarray(rows), jnp.arange(rows.shape[0]))

    @jax.jit
    def several(x, w, weights, routing):
        call = functools.partial(lora_linear, x, w, routing=routing, implementation="mosaic_gpu")
        return [call(weights, layer=i % 2, base_layer=i % 2) for i in range(8)]

    for _ in range(50):
        found = several(x, w, weights, routing)
    for i, y in enumerate(found):
        alone = lora_linear(
            x, w, weights, routing, layer=i % 2, base_layer=i % 2, implementation="mosaic_gpu"
        )
        assert (np.asarray(y) == np.asarray(alone)).all()


def test_multiplications_do_not_wait_for_each_other(monkeypatch, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    x, w, weights, rows = make((40, 8, 16, 1024, (1024,), 3), seed=4)  # compiled by no other test
    run(lora_linear, x, w, weights=weights, rows=rows)
    notes = "".join(path.read_text() for path in tmp_path.glob("*.ptxas"))
    assert "registers" in notes
    assert "serialized" not in notes
