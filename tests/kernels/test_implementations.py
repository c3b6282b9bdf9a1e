"""One test body for every implementation of the three ops, against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorajax import kernels_pallas as kernels
from lorajax.kernels_pallas import LoraWeights, make_routing
from tests.kernels.implementations import RUNNERS
from tests.kernels.oracle import (
    Shape,
    assert_close,
    expected_delta,
    make_arrays,
    make_weights,
    token_weights,
)

LAYER = 1
SHAPES = {
    "one pack": Shape(8, 128, (128,), S=4, R=16),
    "two packs, bf16, merged": Shape(16, 256, (256, 128), S=9, R=16, dtype="bfloat16"),
    "odd sizes, straddled slices": Shape(5, 100, (72, 48, 40), S=5, R=32),
    "blocks": Shape(64, 128, (128, 128), S=6, R=16, block=16),
    "ragged blocks": Shape(40, 128, (256,), S=9, R=16, block=16),
    "one token, slots beyond 128": Shape(1, 128, (128,), S=130, R=16),
    "full rank": Shape(4, 128, (128,), S=3, R=128, dtype="bfloat16"),
    "part of a pack is never used": Shape(4, 128, (128,), S=5, R=48),
    "int8 slots": Shape(8, 128, (256,), S=5, R=32, dtype="bfloat16", slot_dtype="int8"),
    "fp8 slots": Shape(8, 128, (256,), S=5, R=32, dtype="float32", slot_dtype="float8_e4m3fn"),
}
OPS = ("lora_linear", "add_lora", "lora_delta")
#: JAX's interpreter of TPU kernels loses the true shape of an aliased output with a ragged block,
#: so add_lora meets whole blocks there, and lora_linear the ragged ones.
LEFT_OUT = {("mosaic_tpu", "add_lora", "ragged blocks"), ("mosaic_tpu", "lora_linear", "blocks")}

CASES = [
    pytest.param(runner, op, shape, id=f"{runner.name}-{op}-{name}")
    for runner in RUNNERS
    for op in OPS
    for name, shape in SHAPES.items()
    # The other ops share lora_linear's code but for the base: two shapes show that.
    if op == "lora_linear" or name in ("blocks", "two packs, bf16, merged")
    if (runner.name, op, name) not in LEFT_OUT
]


@functools.cache
def compiled(name: str, op: str, shape: Shape):
    """The op of a shape, jitted; the contents are arguments, so examples share one compile."""

    def run(x, w, y, weights: LoraWeights, row_weights, token_row, layer):
        routing = make_routing(row_weights, token_row, block=shape.block)
        call = functools.partial(
            getattr(kernels, op), weights=weights, routing=routing, layer=layer, implementation=name
        )
        return {
            "lora_linear": lambda: call(x=x, w=w),
            "add_lora": lambda: call(y=y, x=x),
            "lora_delta": lambda: call(x=x),
        }[op]()

    return jax.jit(run)


@st.composite
def requests(draw, shape: Shape):
    """Row weights `[N, S]`, rows of tokens `[T]`, and where to put a NaN."""
    S, T = shape.S, shape.T
    active = draw(st.sets(st.integers(0, S - 1)) | st.just(set(range(S))), label="active")
    weight = st.sampled_from([1.0, 1.0, 0.7, 0.3, -0.5, 0.0])
    rows = []
    for _ in range(4):
        row = [0.0] * S
        if active:
            chosen = draw(st.lists(st.sampled_from(sorted(active)), max_size=3))
            for slot in chosen:
                row[slot] = draw(weight)
        rows.append(row)
    everything = [1.0 if s in active else 0.0 for s in range(S)]
    row_weights = np.array([*rows, everything], np.float32)
    entries = st.integers(-1, len(row_weights) - 1) | st.sampled_from([-1, -2, len(row_weights)])
    token_row = np.array(draw(st.lists(entries, min_size=T, max_size=T)), np.int32)
    fault = draw(st.sampled_from(["none", "none", "x", "A", "scale"]), label="fault")
    return row_weights, token_row, fault, draw(st.integers(0, T - 1)), draw(st.integers(0, S - 1))


def plant(fault: str, x, weights: LoraWeights, token: int, slot: int):
    """x and slots with a NaN in one token, or in one slot's A or scale."""
    nan = jnp.nan
    A, scale = weights.A, weights.scale
    if fault == "x":
        x = x.at[token, 3].set(nan)
    if fault == "A" and jnp.issubdtype(A.dtype, jnp.floating):
        A = A.at[LAYER, slot, 0, 0, 0].set(nan)
    if fault == "scale":
        scale = scale.at[LAYER, slot, -1, 0].set(nan)
    return x, LoraWeights(A=A, B=weights.B, scale=scale, slices=weights.slices)


def bits(array: jax.Array) -> np.ndarray:
    """The bits of an array's entries, so that -0.0 differs from 0.0."""
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


@pytest.mark.parametrize(("runner", "op", "shape"), CASES)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_equals_float64(runner, op, shape, data):
    row_weights, token_row, fault, token, slot = data.draw(requests(shape))
    rng = np.random.default_rng(0)
    clean, (x, w, y) = make_weights(shape, rng), make_arrays(shape, rng)
    x, weights = plant(fault, x, clean, token, slot)
    run, layer = compiled(runner.name, op, shape), jnp.int32(LAYER)
    with runner.simulate():
        got = run(x, w, y, weights, jnp.asarray(row_weights), jnp.asarray(token_row), layer)

    W = token_weights(row_weights, token_row)
    base = {
        "lora_linear": lambda: np.asarray(x, np.float64) @ np.asarray(w[LAYER], np.float64),
        "add_lora": lambda: np.asarray(y, np.float64),
        "lora_delta": lambda: np.zeros((shape.T, shape.d_out)),
    }[op]()
    want = base + expected_delta(x, weights, W, LAYER)
    assert_close(got, want, shape.dtype)

    plain = (W == 0).all(axis=1)
    nothing = jax.tree.map(jnp.zeros_like, weights)
    with runner.simulate():
        bare = run(x, w, y, nothing, jnp.zeros_like(row_weights), jnp.asarray(token_row), layer)
    np.testing.assert_array_equal(bits(got)[plain], bits(bare)[plain])
    if op == "add_lora":
        np.testing.assert_array_equal(bits(got)[plain], bits(y)[plain])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("runner", RUNNERS, ids=lambda r: r.name)
def test_the_lowered_program_has_the_kernel(runner, op):
    """A silent fall-back would pass every numeric test."""
    shape = SHAPES["two packs, bf16, merged"]
    rng = np.random.default_rng(0)
    arrays = make_arrays(shape, rng)
    row_weights, token_row = jnp.zeros((2, shape.S)), jnp.zeros(shape.T, jnp.int32)
    traced = compiled(runner.name, op, shape).trace(
        *arrays, make_weights(shape, rng), row_weights, token_row, jnp.int32(0)
    )
    text = traced.lower(lowering_platforms=(runner.platform,)).as_text()
    mark = runner.mark(op)
    if mark is None:
        assert "custom_call" not in text
    else:
        assert text.count("stablehlo.custom_call") == 1
        assert mark in text


def test_default_is_xla_on_a_machine_without_accelerator():
    shape = SHAPES["one pack"]
    rng = np.random.default_rng(0)
    x, w, _ = make_arrays(shape, rng)
    weights = make_weights(shape, rng)
    routing = make_routing(jnp.ones((1, shape.S)), jnp.zeros(shape.T, jnp.int32))
    default = jax.jit(lambda: kernels.lora_linear(x, w, weights, routing)).lower().as_text()
    named = jax.jit(lambda: kernels.lora_linear(x, w, weights, routing, implementation="xla"))
    assert default == named.lower().as_text()
