"""Whole steps of a 32-layer model of Llama-3.1-8B's shape compile for every TPU generation.

The layers are a loop over stacked weights: each kernel is compiled once and takes the layer's
index, so nothing is sliced and nothing copied.
"""

import jax
import jax.numpy as jnp
import pytest

from lorajax import kernels_pallas as kernels
from lorajax.kernels_pallas import make_routing
from tests.kernels.test_tpu_compile import kernels_in, struct, weights_of
from tests.kernels.tpu_topology import TOPOLOGIES, needs_libtpu, tpu_compile

pytestmark = needs_libtpu

LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD = 32, 4096, 14336, 32, 8, 128
SLOTS, RANK = 8, 16
TARGETS = {
    "qkv": (HIDDEN, (HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD)),
    "o": (HEADS * HEAD, (HIDDEN,)),
    "gate_up": (HIDDEN, (MLP, MLP)),
    "down": (MLP, (HIDDEN,)),
}


def rms_norm(x: jax.Array) -> jax.Array:
    """x over its root mean square, in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-5)
    return (x32 * scale).astype(x.dtype)


def attend(qkv: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Attention of `[B, T, ..]` new tokens to a cache `[B, C, KV_HEADS, HEAD]`."""
    B, T = qkv.shape[:2]
    q = qkv[..., : HEADS * HEAD].reshape(B, T, KV_HEADS, HEADS // KV_HEADS, HEAD)
    logits = jnp.einsum("btkgd,bckd->bkgtc", q, keys, preferred_element_type=jnp.float32)
    shares = jax.nn.softmax(logits * HEAD**-0.5, axis=-1).astype(qkv.dtype)
    return jnp.einsum("bkgtc,bckd->btkgd", shares, values).reshape(B * T, HEADS * HEAD)


def make_step(batch: int, length: int):
    """One step of `batch` requests with `length` new tokens each."""

    def step(x, base, slots, keys, values, row_weights, token_row):
        routing = make_routing(row_weights, token_row)

        def linear(x, target, layer):
            return kernels.lora_linear(
                x, base[target], slots[target], routing, layer=layer, implementation="mosaic_tpu"
            )

        def layer_step(layer, carry):
            x, keys, values = carry
            qkv = linear(rms_norm(x), "qkv", layer).reshape(batch, length, -1)
            k, v = jnp.split(qkv[..., HEADS * HEAD :], 2, axis=-1)
            shape = (1, batch, length, KV_HEADS, HEAD)
            keys = jax.lax.dynamic_update_slice(keys, k.reshape(shape), (layer, 0, 0, 0, 0))
            values = jax.lax.dynamic_update_slice(values, v.reshape(shape), (layer, 0, 0, 0, 0))
            x = x + linear(attend(qkv, keys[layer], values[layer]), "o", layer)
            gate, up = jnp.split(linear(rms_norm(x), "gate_up", layer), 2, axis=-1)
            return x + linear(jax.nn.silu(gate) * up, "down", layer), keys, values

        return jax.lax.fori_loop(0, LAYERS, layer_step, (x, keys, values))

    return step


@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize(("batch", "length"), [(64, 1), (2, 512)], ids=["decode", "prefill"])
def test_step_compiles(generation, batch, length):
    tokens, bf16 = batch * length, jnp.bfloat16
    cache = struct((LAYERS, batch, max(length, 64), KV_HEADS, HEAD), bf16)
    compiled = tpu_compile(
        generation,
        make_step(batch, length),
        struct((tokens, HIDDEN), bf16),
        {name: struct((LAYERS, d, sum(s)), bf16) for name, (d, s) in TARGETS.items()},
        {name: weights_of(LAYERS, SLOTS, RANK, d, s) for name, (d, s) in TARGETS.items()},
        cache,
        cache,
        struct((batch, SLOTS), jnp.float32),
        struct((tokens,), jnp.int32),
    )
    assert kernels_in(compiled) == ["lora_linear_tpu"] * len(TARGETS)
    layer_bytes = sum(d * sum(s) * 2 for d, s in TARGETS.values())
    cache_bytes = 2 * 2 * cache.size
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 0.25 * layer_bytes + cache_bytes + 24 * tokens * MLP, "weights are copied"
