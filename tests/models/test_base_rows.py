"""Base rows keep the very bits of the plain model, whatever their neighbours do."""

import dataclasses

import jax
import numpy as np
import pytest

from lorajax import Adapter
from tests import hf
from tests.goldens.rows import LENGTHS, TOKENS
from tests.models import support

ROWS = 6
TOK, LEN = TOKENS[:ROWS], LENGTHS[:ROWS]
BASE = [0, 3, 5]
MIXES = [{}, {"rslora": 300.0}, {"rslora": -50.0, "qv": 2.0}, {}, {"qv": 1e4}, {}]


def poisoned(adapter: Adapter, part: str) -> Adapter:
    """The adapter with a NaN in one A or B of its first target."""
    name, packed = next(iter(adapter.arrays.items()))
    array = getattr(packed, part).copy()
    array[..., 0] = np.nan
    arrays = {**adapter.arrays, name: dataclasses.replace(packed, **{part: array})}
    return dataclasses.replace(adapter, arrays=arrays)


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=support.together(family, dtype))
        for family in ("llama3", "qwen2", "qwen3")
        for dtype in ("float32", "bfloat16")
    ],
)
def test_base_rows_are_bit_equal(family, dtype):
    model = support.decoder(family, dtype)
    spec = support.spec_for(family, dtype=dtype)
    forms = {f: support.adapter(f, family, spec) for f in ("rslora", "qv", "plain")}
    plain = support.run(model, None, None, TOK, LEN)
    assert np.isfinite(plain).all()

    state, slots = support.resident(spec, forms)
    weights = support.weights_of(MIXES, slots, spec.num_slots)
    got = support.run(model, state, weights, TOK, LEN)
    np.testing.assert_array_equal(bits(got[BASE]), bits(plain[BASE]))
    assert np.isfinite(got).all()
    assert all((got[i] != plain[i]).any() for i in set(range(ROWS)) - set(BASE))

    for part in ("A", "B"):
        state, slots = support.resident(spec, {**forms, "rslora": poisoned(forms["rslora"], part)})
        got = support.run(model, state, weights, TOK, LEN)
        assert np.isnan(got[1]).all()
        assert np.isnan(got[2]).all()
        np.testing.assert_array_equal(bits(got[BASE]), bits(plain[BASE]))
        assert np.isfinite(got[4]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wide_prefill_is_bit_equal(dtype):
    """Larger products take other paths in XLA: 512 tokens, more than one block of routing."""
    family, N, Q = "mistral", 8, 64
    model = support.decoder(family, dtype)
    spec = support.spec_for(family, num_slots=2, dtype=dtype)
    state, slots = support.resident(spec, {"rslora": support.adapter("rslora", family, spec)})
    weights = support.weights_of([{}, {"rslora": 1.0}] * (N // 2), slots, spec.num_slots)
    tokens = (hf.uniform("wide", (N, Q), 1.0) * 20 + 48).astype(np.int32)
    lengths = np.full(N, Q, np.int32)
    rows = np.arange(N, dtype=np.int32)

    def logits(lora, row_weights):
        graphdef, params = support.split(model)
        cache = support.models.init_cache(model.config, N, Q, dtype)
        out, cache = support.prefill(
            graphdef, params, lora, cache, tokens, lengths, rows, row_weights
        )
        return np.asarray(out), jax.tree.map(lambda x: np.asarray(x).astype(np.float32), cache)

    want, want_cache = logits(None, None)
    got, got_cache = logits(state, weights)
    np.testing.assert_array_equal(bits(got[::2]), bits(want[::2]))
    assert (got[1::2] != want[1::2]).any(axis=1).all()
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(bits(a[::2]), bits(b[::2])),
        got_cache,
        want_cache,
    )
