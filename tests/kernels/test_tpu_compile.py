"""Compiles the TPU kernels with the real compiler, for every generation, without a TPU."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from lorajax import kernels_pallas as kernels
from lorajax.kernels_pallas import LoraWeights, Routing
from tests.kernels.tpu_topology import TOPOLOGIES, needs_libtpu, tpu_compile, tpu_device

pytestmark = needs_libtpu
struct = jax.ShapeDtypeStruct


def weights_of(L, S, R, d_in, slices, dtype=jnp.bfloat16):
    G, d_out = len(slices), sum(slices)
    return LoraWeights(
        A=struct((L, S, G, R, d_in), dtype),
        B=struct((L, S, R, d_out), dtype),
        scale=struct((L, S, G, R), jnp.float32),
        slices=slices,
    )


def routing_of(T, S, block=None):
    block = min(T, 256) if block is None else block
    P = -(-T // block)
    return Routing(
        weights=struct((S, T), jnp.float32),
        active=struct((P, S), jnp.int32),
        count=struct((P,), jnp.int32),
        block=block,
    )


def kernels_in(compiled) -> list[str]:
    """Names of the kernels in a compiled program."""
    lines = compiled.as_text().splitlines()
    calls = [line for line in lines if 'custom_call_target="tpu_custom_call"' in line]
    return sorted(line.split(" = ")[0].split("%")[-1].split(".")[0] for line in calls)


def linear(x, w, weights, routing, layer):
    return kernels.lora_linear(x, w, weights, routing, layer=layer, implementation="mosaic_tpu")


def linear_case(generation, T, d_in, slices, *, S=64, R=16, dtype=jnp.bfloat16, slots=None, L=2):
    weights = weights_of(L, S, R, d_in, slices, slots or dtype)
    base = struct((L, d_in, sum(slices)), dtype)
    x, layer = struct((T, d_in), dtype), struct((), jnp.int32)
    return tpu_compile(generation, linear, x, base, weights, routing_of(T, S), layer)


CASES = {
    "o, decode": (64, 4096, (4096,), {}),
    "down, decode": (64, 14336, (4096,), {}),
    "gate_up, decode": (64, 4096, (14336, 14336), {}),
    "qkv, longest prefill": (16384, 4096, (4096, 1024, 1024), {}),
    "70B down, prefill": (512, 28672, (8192,), {}),
    "one token, 256 slots": (1, 4096, (4096,), {"S": 256}),
    "256 slots of rank 128": (256, 4096, (4096,), {"S": 256, "R": 128}),
    "ragged": (1000, 896, (896, 128, 128), {"S": 3, "R": 64}),
    "one slot": (100, 4096, (4096,), {"S": 1}),
    "odd widths": (64, 1000, (300, 300), {"S": 8}),
    "float32": (64, 1024, (1024,), {"dtype": jnp.float32}),
    "int8 slots": (64, 4096, (4096,), {"R": 32, "slots": jnp.int8}),
    "fp8 slots": (64, 4096, (4096,), {"R": 32, "slots": jnp.float8_e4m3fn}),
    "fp8 e5m2 slots": (64, 4096, (4096,), {"R": 32, "slots": jnp.float8_e5m2}),
}


@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("name", CASES)
def test_lora_linear_compiles(generation, name):
    T, d_in, slices, options = CASES[name]
    compiled = linear_case(generation, T, d_in, slices, **options)
    assert kernels_in(compiled) == ["lora_linear_tpu"]
    if d_in % 128 == 0:  # for an odd d_in XLA may prefer a layout of its own for w, and copy
        assert_slots_are_not_copied(compiled, T)


def assert_slots_are_not_copied(compiled, T):
    """A copy of whole slot arrays, or of a layer of w, would cost more than the kernel saves."""
    allowed = 2 * T * 256 * 4 + 2**17  # routing, transposed, and what the compiler adds
    assert compiled.memory_analysis().temp_size_in_bytes <= allowed


@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_add_lora_compiles_in_place(generation):
    T, S, d_in, d_out = 512, 64, 4096, 4096

    def step(x, weights, routing):
        y = jnp.tanh(x)
        return kernels.add_lora(y, x, weights, routing, layer=1, implementation="mosaic_tpu")

    weights = weights_of(2, S, 16, d_in, (d_out,))
    x = struct((T, d_in), jnp.bfloat16)
    compiled = tpu_compile(generation, step, x, weights, routing_of(T, S))
    assert kernels_in(compiled) == ["add_lora_tpu"]
    assert "output_to_operand_aliasing" in compiled.as_text()
    assert_slots_are_not_copied(compiled, T)


@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_lora_delta_compiles(generation):
    delta = functools.partial(kernels.lora_delta, layer=1, implementation="mosaic_tpu")
    x = struct((64, 4096), jnp.bfloat16)
    weights = weights_of(2, 64, 16, 4096, (4096, 1024, 1024))
    compiled = tpu_compile(generation, delta, x, weights, routing_of(64, 64))
    assert kernels_in(compiled) == ["lora_delta_tpu"]


def test_compiles_where_no_chip_is_named():
    """A lowering on another machine gets tiles that every generation can run."""
    for generation in TOPOLOGIES:
        place = SingleDeviceSharding(tpu_device(generation))
        args = (
            struct((64, 4096), jnp.bfloat16),
            struct((2, 4096, 4096), jnp.bfloat16),
            weights_of(2, 64, 16, 4096, (4096,)),
            routing_of(64, 64),
            struct((), jnp.int32),
        )
        args = jax.tree.map(lambda s, p=place: struct(s.shape, s.dtype, sharding=p), args)
        assert kernels_in(jax.jit(linear).lower(*args).compile()) == ["lora_linear_tpu"]


def test_scores_of_a_head_compile():
    """Float32 scores of bfloat16 hidden states, over a whole vocabulary."""
    T, S, D, V = 64, 64, 4096, 128256

    def scores(hidden, head, weights, routing):
        y = jnp.dot(hidden, head, preferred_element_type=jnp.float32)
        return kernels.add_lora(y, hidden, weights, routing, implementation="mosaic_tpu")

    hidden, head = struct((T, D), jnp.bfloat16), struct((D, V), jnp.bfloat16)
    weights = weights_of(1, S, 16, D, (V,))
    compiled = tpu_compile("v6e", scores, hidden, head, weights, routing_of(T, S))
    assert kernels_in(compiled) == ["add_lora_tpu"]
    assert_slots_are_not_copied(compiled, T)
