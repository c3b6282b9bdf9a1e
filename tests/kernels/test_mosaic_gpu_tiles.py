"""Measured tiles of Hopper GPUs: how they are found, what is refused, and that all of them run."""

import json
from importlib import resources

import jax.numpy as jnp
import pytest

from lorajax.kernels_pallas import make_routing
from lorajax.kernels_pallas.gpu import launch, tiles
from lorajax.kernels_pallas.gpu.plan import MAX_BLOCK, Device, Plan, unsupported
from lorajax.kernels_pallas.weights import LoraWeights

H200 = Device(132, 227 * 1024, "NVIDIA H200")
ENTRY = {"d_in": 4096, "d_out": 4096, "tokens": 64, "split": 2, "depth": 64, "stages": 5}
FILES = sorted(
    f.name
    for f in resources.files("lorajax.kernels_pallas.gpu").joinpath("tiles").iterdir()
    if f.name.endswith(".json")
)


def plan(key, tile):
    d_in, d_out, tokens = key
    return Plan(
        device=H200,
        tokens=tokens,
        block=min(tokens, MAX_BLOCK),
        d_in=d_in,
        d_out=d_out,
        slots=64,
        rank=16,
        slices=(d_out,),
        has_base=True,
        tile=tile,
    )


def make(tokens, *, slots=8, block=None, has_base=True):
    """The plan that a launch of 4096x4096 gets."""
    zeros = lambda *shape: jnp.zeros(shape, jnp.bfloat16)
    weights = LoraWeights(
        zeros(1, slots, 1, 16, 4096),
        zeros(1, slots, 16, 4096),
        jnp.zeros((1, slots, 1, 16)),
        (4096,),
    )
    routing = make_routing(jnp.zeros((tokens, slots)), jnp.arange(tokens), block=block)
    return launch.make_plan(zeros(tokens, 4096), weights, routing, H200, has_base)


@pytest.fixture
def one_entry(monkeypatch):
    """A table with one entry for 33 to 64 tokens."""
    parsed = tiles.parse(json.dumps([ENTRY]), "test.json")
    monkeypatch.setattr(tiles, "table", lambda kind: parsed if kind == H200.kind else {})


def test_an_entry_serves_its_bucket_of_tokens(one_entry):
    for tokens in (33, 64):
        found = make(tokens)
        assert (found.split, found.depth, found.stages) == (2, 64, 5)
        assert unsupported(found) is None


@pytest.mark.parametrize(
    "arguments", [{"tokens": 32}, {"tokens": 65}, {"tokens": 64, "has_base": False}]
)
def test_the_rule_serves_everything_else(one_entry, arguments):
    assert make(**arguments).tile is None


def test_an_entry_does_not_serve_other_blocks(one_entry):
    assert make(64, block=32).tile is None


def test_an_entry_knows_nothing_of_slots(one_entry):
    assert make(64, slots=8).tile == make(64, slots=64).tile is not None


def test_a_gpu_without_a_file_has_no_entries():
    assert tiles.table("NVIDIA H100 80GB HBM3") == {}
    assert tiles.file_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3.json"


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(1, 8), (8, 8), (9, 16), (64, 64), (65, 128), (257, 512)]
)
def test_buckets(tokens, bucket):
    assert tiles.bucket(tokens) == bucket


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"split": 0}, "exactly the positive integers"),
        ({"split": 1.5}, "exactly the positive integers"),
        ({"split": True}, "exactly the positive integers"),
        ({"active": 8}, "exactly the positive integers"),
        ({"tokens": 48}, "a power of two of at least 8"),
    ],
)
def test_malformed_entries_are_refused_by_file(change, said):
    with pytest.raises(ValueError, match=rf"{said}(.|\n)* in test.json"):
        tiles.parse(json.dumps([ENTRY | change]), "test.json")


def test_a_product_is_named_once():
    with pytest.raises(ValueError, match="a product must be named once; got 64 for 4096x4096"):
        tiles.parse(json.dumps([ENTRY, ENTRY | {"split": 1}]), "test.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"depth": 96}, "64 or 128 elements of K; got 96"),
        ({"depth": 32}, "64 or 128 elements of K; got 32"),
        ({"stages": 1}, "got 1 of at most"),
        ({"stages": 40}, "got 40 of at most"),
        ({"split": 5}, "32 tiles of 5 parts"),
    ],
)
def test_a_tile_that_cannot_run_is_refused(change, said):
    ((key, tile),) = tiles.parse(json.dumps([ENTRY | change]), "test.json").items()
    assert said in unsupported(plan(key, tile))


@pytest.mark.parametrize("name", FILES)
def test_every_packaged_entry_runs_and_leaves_sms_for_the_shrink(name):
    text = resources.files("lorajax.kernels_pallas.gpu").joinpath("tiles", name).read_text()
    for key, tile in tiles.parse(text, name).items():
        found = plan(key, tile)
        assert unsupported(found) is None, (key, tile)
        assert found.blocks > 1 or found.split == 1 or found.free_sms > 0, (key, tile)


def test_the_h200_has_a_file():
    assert tiles.file_name(H200.kind) in FILES
