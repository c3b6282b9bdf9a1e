"""Tiles of the TPU kernel: what is chosen, that it fits, and that no choice changes the result."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from lorajax.kernels_pallas import Routing, make_routing
from lorajax.kernels_pallas.tpu.kernel import run_kernel
from lorajax.kernels_pallas.tpu.problem import Problem, describe, unsupported
from lorajax.kernels_pallas.tpu.tiles import (
    CHIPS,
    MIB,
    PORTABLE,
    Chip,
    Tiles,
    choose_tiles,
    vmem_bytes,
)
from lorajax.kernels_pallas.tpu.traffic import floor, slot_bytes, traffic
from tests.kernels.implementations import tpu_simulation
from tests.kernels.oracle import Shape, assert_close, expected_delta, make_arrays, make_weights

BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


def problem_of(T, d_in, slices, *, S=64, R=16, block=None, base="product", dtype=BF16) -> Problem:
    return Problem(
        tokens=T,
        d_in=d_in,
        d_out=sum(slices),
        slots=S,
        rank=R,
        slices=slices,
        block=min(T, 256) if block is None else block,
        dtype=dtype,
        slot_dtype=dtype,
        out_dtype=dtype,
        base=base,
    )


#: Modules of Llama-3.1-8B and 70B.
MODULES = {
    "8B qkv": (4096, (4096, 1024, 1024)),
    "8B o": (4096, (4096,)),
    "8B gate_up": (4096, (14336, 14336)),
    "8B down": (14336, (4096,)),
    "70B qkv": (8192, (8192, 1024, 1024)),
    "70B o": (8192, (8192,)),
    "70B gate_up": (8192, (28672, 28672)),
    "70B down": (28672, (8192,)),
}

SMALL = Shape(32, 256, (192, 64, 256), S=9, R=16, block=16)
TILES = {
    "all at once": Tiles(32, 512, 256, 256, 2, 2),
    "one block a tile": Tiles(16, 512, 256, 256, 2, 3),
    "columns across slices": Tiles(32, 128, 256, 256, 3, 2),
    "depth and shrink in steps": Tiles(32, 256, 128, 128, 2, 2),
    "part of a block": Tiles(8, 256, 128, 128, 3, 3),
}


def run_small(tiles: Tiles, routing: Routing, base: str = "product"):
    rng = np.random.default_rng(0)
    x, w, y = make_arrays(SMALL, rng)
    weights = make_weights(SMALL, rng)
    problem = describe(x, weights, routing, base=base, out_dtype=F32)
    one = jnp.ones(1, jnp.int32)
    with tpu_simulation():
        got = run_kernel(
            problem,
            tiles,
            x,
            {"product": w, "given": y, "none": None}[base],
            weights,
            routing,
            layer=one,
            base_layer=one,
            vmem_limit=MIB,
        )
        got.block_until_ready()
    x64 = np.asarray(x, np.float64)
    start = {
        "product": x64 @ np.asarray(w[1], np.float64),
        "given": np.asarray(y, np.float64),
        "none": 0.0,
    }[base]
    want = start + expected_delta(x, weights, np.asarray(routing.weights, np.float64).T, 1)
    assert_close(got, want, "float32")


def small_weights(first_block_only: bool = False) -> np.ndarray:
    """W `[T, S]`: every slot in the first block, two in the second."""
    W = np.zeros((32, 9), np.float32)
    W[np.arange(16), np.arange(16) % 9] = 0.5
    W[3] = 0
    if not first_block_only:
        W[20, 2] = W[21, 7] = W[21, 2] = 1.0
    return W


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
def test_tiles_do_not_change_the_result(tiles):
    routing = make_routing(jnp.asarray(small_weights()), jnp.arange(32), block=16)
    run_small(tiles, routing)


def test_add_lora_skips_tiles_without_active_slots():
    routing = make_routing(jnp.asarray(small_weights(True)), jnp.arange(32), block=16)
    run_small(TILES["one block a tile"], routing, base="given")


def test_slots_that_are_not_active_are_never_read():
    """Entries past the count name a slot that does not exist: a copy of one would raise."""
    routing = make_routing(jnp.asarray(small_weights()), jnp.arange(32), block=16)
    beyond = jnp.arange(9)[None] >= routing.count[:, None]
    active = jnp.where(beyond, 10**6, routing.active)
    run_small(TILES["one block a tile"], dataclasses.replace(routing, active=active))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("active", [0, 1, 8, 64])
def test_decode_moves_only_active_slots(module, active):
    problem = problem_of(64, *MODULES[module])
    for chip in CHIPS.values():
        moved = traffic(problem, choose_tiles(problem, chip), [active])
        assert moved.slots == active * slot_bytes(problem)
        assert moved.total <= 1.05 * floor(problem, active)


@pytest.mark.parametrize("module", ["8B qkv", "8B down", "70B gate_up"])
def test_prefill_moves_each_blocks_own_slots(module):
    """One active slot in each of 8 blocks: never all 64, and never a block's slots twice."""
    problem = problem_of(2048, *MODULES[module])
    for chip in CHIPS.values():
        tiles = choose_tiles(problem, chip)
        moved = traffic(problem, tiles, [1] * 8)
        parts = max(1, 256 // tiles.tokens)
        assert moved.slots == 8 * parts * slot_bytes(problem)
        assert moved.slots < 64 * slot_bytes(problem) or chip.vmem < 16 * MIB


def test_add_lora_moves_only_adapted_tiles():
    problem = problem_of(2048, 4096, (4096,), base="given")
    tiles = choose_tiles(problem, CHIPS["TPU v6e"])
    assert traffic(problem, tiles, [0] * 8).total < 2**20
    moved = traffic(problem, tiles, [1] * 4 + [0] * 4)
    assert moved.total <= 1.05 * floor(problem, 4, adapted_tokens=1024)


@pytest.mark.parametrize("T", [1, 64, 256, 2048, 16384])
@pytest.mark.parametrize("module", MODULES)
def test_chosen_tiles_fit(module, T):
    d_in, slices = MODULES[module]
    for chip in (*CHIPS.values(), PORTABLE):
        for S, R in ((1, 16), (64, 16), (256, 16), (64, 128)):
            problem = problem_of(T, d_in, slices, S=S, R=R)
            tiles = choose_tiles(problem, chip)
            assert tiles is not None
            assert vmem_bytes(problem, tiles) <= chip.vmem
            assert problem.d_in % tiles.depth == 0 == problem.d_in % tiles.shrink
            assert problem.d_out % tiles.columns == 0


def test_smaller_memory_gives_smaller_tiles():
    problem = problem_of(2048, 14336, (4096,))
    sizes = [
        vmem_bytes(problem, choose_tiles(problem, Chip("some", vmem * MIB)))
        for vmem in (120, 30, 8)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]
    assert choose_tiles(problem, Chip("none", 2**16)) is None


def test_overrides_are_taken_where_they_match():
    problem = problem_of(64, 4096, (4096,))
    entry = {"match": {"chip": "v6e", "d_in": 4096, "slices": [4096]}, "tiles": {"columns": 256}}
    chosen = choose_tiles(problem, CHIPS["TPU v6e"], [entry])
    assert chosen == dataclasses.replace(choose_tiles(problem, CHIPS["TPU v6e"]), columns=256)
    assert choose_tiles(problem, CHIPS["TPU v5e"], [entry]).columns != 256


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"rank": 24}, "slot_rank must be a multiple of 16"),
        ({"rank": 256}, "up to 128"),
        ({"slot_dtype": np.dtype(np.int8)}, "slot_rank must be a multiple of 32"),
        ({"slot_dtype": np.dtype(np.int16)}, "slots must be"),
        ({"dtype": np.dtype(np.float16)}, "x must be bfloat16 or float32"),
        ({"block": 24}, "multiple of 16 tokens"),
    ],
)
def test_reasons(changes, rule):
    problem = dataclasses.replace(problem_of(64, 4096, (4096,)), **changes)
    assert rule in unsupported(problem)


def test_supported_has_no_reason():
    assert unsupported(problem_of(64, 4096, (4096,))) is None
