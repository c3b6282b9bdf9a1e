"""A step with adapters has the base step's collectives, and no others: counted in the program.

Fully sharded slots have small ones of their own: which, how often and how large is counted too.
"""

from collections import Counter

import jax
import pytest
from jax.sharding import AxisType

import lorajax as lj
from lorajax.sharding import Partition, abstract_slots, sharded
from tests.kernels.test_tpu_compile import kernels_in
from tests.kernels.tpu_topology import needs_libtpu, tpu_devices
from tests.sharding.support import (
    collective_bytes,
    collectives,
    compiled_decode,
    config_of,
    mesh_of,
)

LAYERS = 1
#: Axes of a mesh, and what the base needs: an all-reduce for each row product and the embedding, an
#: all-gather for the scores and one for the rows of the result, one for each weight over fsdp.
CASES = [
    ({"tensor": 8}, AxisType.Auto, {"all-reduce": 2 * LAYERS + 1, "all-gather": 1}),
    ({"data": 2, "tensor": 4}, AxisType.Auto, {"all-reduce": 2 * LAYERS + 1, "all-gather": 2}),
    ({"data": 2, "tensor": 4}, AxisType.Explicit, {"all-reduce": 2 * LAYERS + 1, "all-gather": 2}),
    ({"data": 8}, AxisType.Auto, {"all-gather": 1}),
    (
        {"fsdp": 2, "tensor": 4},
        AxisType.Auto,
        {"all-reduce": 2 * LAYERS + 1, "all-gather": 2 + 4 * LAYERS + 2},
    ),
]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(("axes", "axis_type", "base"), CASES)
def test_on_cpu(axes, axis_type, base):
    config, partition = (
        config_of("qwen2", 2, num_hidden_layers=LAYERS),
        Partition.of(mesh_of(axis_type, **axes)),
    )
    config["tie_word_embeddings"] = False
    counted = [
        collectives(compiled_decode(config, partition, lora=lora).as_text())
        for lora in (False, True)
    ]
    assert counted[0] == base
    assert counted[1] == base


@pytest.mark.usefixtures("quick_compiles")
def test_what_fully_sharded_slots_cost():
    """In each layer all-gathers of h for q|k|v and gate|up, all-reduces of h for o and down."""
    config = config_of("llama2", 2, num_hidden_layers=2)
    partition, slots, rows, rank = Partition.of(mesh_of(data=2, tensor=4)), 4, 8, 16
    base, full = (
        collective_bytes(compiled_decode(config, partition, lora=lora, fully=True).as_text())
        for lora in (False, True)
    )
    h = 4 * slots * rank * (rows // 2)  # float32, of one slice and the rows of one device
    extra = {("all-gather", 3 * h): 2, ("all-gather", 2 * h): 2, ("all-reduce", h): 2 * 2}
    assert full == base + Counter(extra)


def tpu_partition(pod):
    return Partition.of(mesh_of(devices=tpu_devices(pod), data=2, tensor=4))


@needs_libtpu
def test_in_the_program_of_the_tpu_compiler():
    partition = tpu_partition("v5e:2x4")
    config = config_of(
        "llama2", 2, hidden_size=256, head_dim=128, intermediate_size=1024, vocab_size=512
    )
    layers = config["num_hidden_layers"]
    base = Counter({"all-reduce": 2 * layers + 1, "all-gather": 2})
    extra = Counter({"all-reduce": 2 * layers, "all-gather": 2 * layers})
    for options, want, kernels in (
        ({"lora": False}, base, 0),
        ({"lora": True, "implementation": "xla"}, base, 0),
        ({"lora": True, "implementation": "mosaic_tpu"}, base, 4 * layers),
        ({"lora": True, "fully": True}, base + extra, 0),
    ):
        compiled = compiled_decode(config, partition, **options)
        assert collectives(compiled.as_text()) == want, options
        assert kernels_in(compiled) == ["lora_linear_tpu"] * kernels, options


@needs_libtpu
@pytest.mark.parametrize(("name", "sums"), [("qkv", {}), ("down", {"all-reduce": 1})])
def test_a_kernel_on_a_mesh(name, sums):
    """The fused TPU kernel runs on each device's share, with the base's collectives."""
    partition = tpu_partition("v6e:2x4")
    ops, put = sharded(partition.mesh), partition.sharding
    targets = (
        lj.Target("qkv", 1024, (1024, 512, 512), ("q", "k", "v"), heads=(8, 4, 4)),
        lj.Target("down", 4096, 1024, parallel="row"),
    )
    spec = lj.LoraSpec(targets, num_layers=2, num_slots=16)
    state, target = abstract_slots(spec, partition), spec.target(name)
    cut = ("tensor", None) if target.parallel == "row" else (None, "tensor")

    def linear(x, w, state, row_weights, token_row):
        route = ops.make_routing(row_weights, token_row)
        return ops.lora_linear(x, w, state[name], route, layer=0, implementation="mosaic_tpu")

    def struct(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=put(*axes))

    program = jax.jit(linear).lower(
        struct((64, target.d_in), "bfloat16", "rows", cut[0]),
        struct((target.d_in, state[name].columns.width), "bfloat16", *cut),
        state,
        struct((8, 16), "float32", None, None),
        struct((64,), "int32", "rows"),
    )
    text = program.compile().as_text()
    assert "tpu_custom_call" in text
    assert collectives(text) == sums
