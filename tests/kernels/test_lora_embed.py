"""`lora_embed` against the one-hot product of section 1 of docs/design.md in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorajax import kernels_pallas as kernels
from lorajax.kernels_pallas import LoraWeights, make_routing
from tests.kernels.oracle import Shape, assert_close, expected_delta, make_weights, token_weights

V, D = 24, 32
IDS = np.array([3, 23, 0, 3, 7, 23, 11, 3, 0], np.int32)
TOKEN_ROW = np.array([0, 0, 1, 2, -1, 1, 3, 4, 9], np.int32)  # row 2 is the base, row 9 is none
ROW_WEIGHTS = np.array(
    [[0, 1, 0, 1], [0.7, 0, 0.3, 0], [0, 0, 0, 0], [-0.5, 0, 0, 0], [0, 0, 1, 0]], np.float32
)
BASE, OUTSIDE = [3, 4], [8]

lora_embed = jax.jit(kernels.lora_embed)


def case(dtype="float32", block=None):
    rng = np.random.default_rng(0)
    shape = Shape(len(IDS), V, (D,), S=4, R=8, dtype=dtype, L=1)
    embed = jnp.asarray(rng.normal(size=(V, D)), jnp.float32).astype(dtype).at[:, 0].set(-0.0)
    routing = make_routing(jnp.asarray(ROW_WEIGHTS), jnp.asarray(TOKEN_ROW), block=block)
    return embed, make_weights(shape, rng), routing


def expected(embed, weights):
    onehot = jnp.asarray(np.eye(V, dtype=np.float32)[IDS])
    delta = expected_delta(onehot, weights, token_weights(ROW_WEIGHTS, TOKEN_ROW), 0)
    return np.asarray(embed.astype(jnp.float32), np.float64)[IDS] + delta


def bits(array):
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_float64(dtype, block):
    embed, weights, routing = case(dtype, block)
    got = lora_embed(IDS, embed, weights, routing)
    assert got.dtype == embed.dtype
    assert_close(got, expected(embed, weights), dtype)
    np.testing.assert_array_equal(bits(got)[BASE], bits(embed[IDS])[BASE])
    assert (bits(got) != bits(embed[IDS])).any(axis=1).sum() == len(IDS) - len(BASE)


def test_a_batch_of_base_rows_is_the_lookup():
    embed, weights, _ = case()
    routing = make_routing(jnp.zeros((1, 4)), jnp.zeros(len(IDS), jnp.int32))
    got = lora_embed(IDS, embed, weights, routing)
    np.testing.assert_array_equal(bits(got), bits(embed[IDS]))


@pytest.mark.parametrize("shards", [2, 8])
def test_shards_of_the_vocabulary_sum_to_the_whole(shards):
    embed, weights, routing = case()
    whole, size = np.asarray(lora_embed(IDS, embed, weights, routing)), V // shards
    parts = []
    for first in range(0, V, size):
        rows = slice(first, first + size)
        part = LoraWeights(weights.A[..., rows], weights.B, weights.scale, weights.slices)
        parts.append(np.asarray(lora_embed(IDS - first, embed[rows], part, routing)))
        elsewhere = (first > IDS) | (first + size <= IDS)
        elsewhere[OUTSIDE] = False  # its weights are NaN on every shard
        assert not parts[-1][elsewhere].any()
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, rtol=1e-6)


def test_a_fault_in_an_adapter_reaches_its_own_tokens_alone():
    embed, weights, routing = case()
    A = weights.A.at[0, 2, 0, 1, 3].set(jnp.nan).at[0, 2, 0, 1, 0].set(jnp.inf)  # of slot 2
    broken = LoraWeights(A, weights.B, weights.scale, weights.slices)
    want = np.asarray(lora_embed(IDS, embed, weights, routing))
    got = np.asarray(lora_embed(IDS, embed, broken, routing))
    hit = np.isin(TOKEN_ROW, [1, 4]) & np.isin(IDS, [0, 3])
    assert hit.sum() == 2
    assert not np.isfinite(got[hit]).any()
    keep = ~hit & (TOKEN_ROW < 5)
    np.testing.assert_array_equal(got[keep], want[keep])
    # Ids that this shard has not stand at its row 0 meanwhile, and must not see its fault.
    away = np.asarray(lora_embed(IDS + V, embed, broken, routing))
    assert not away[TOKEN_ROW < 5].any()


def test_misfits_are_named(no_shape_hook):
    embed, weights, routing = case()
    for args, words in [
        ((IDS[:, None], embed), "ids must be"),
        ((IDS[:3], embed), "T = 3"),
        ((IDS, embed.T), r"\[V, D\] = \[24, 32\]"),
    ]:
        with pytest.raises(ValueError, match=words):
            kernels.lora_embed(*args, weights, routing)
    with pytest.raises(ValueError, match="implementation"):
        kernels.lora_embed(IDS, embed, weights, routing, implementation="triton")
