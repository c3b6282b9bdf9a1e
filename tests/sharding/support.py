"""Meshes, and tiny decoders whose heads divide over eight devices."""

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType

import lorajax as lj
from lorajax import models
from lorajax.sharding import Partition, abstract_slots
from tests import hf

COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def mesh_of(axis_type=AxisType.Auto, devices=None, **axes):
    devices = jax.devices() if devices is None else devices
    shape = tuple(axes.values())
    chosen = np.array(devices[: math.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(chosen, tuple(axes), axis_types=(axis_type,) * len(axes))


def config_of(family, kv_heads, **fields):
    """`config.json` of a family's tiny base, with eight query heads."""
    return {
        **hf.BASES[family],
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        **fields,
    }


def collectives(text: str) -> Counter[str]:
    """How often each collective occurs in a compiled program."""
    return Counter(re.findall(rf" ({COLLECTIVES})(?:-start)?\(", text))


def collective_bytes(text: str) -> Counter[tuple[str, int]]:
    """How often each collective occurs that gives so many bytes to a device (float32 only)."""
    found = re.findall(rf"= f32\[([\d,]*)\]\S* ({COLLECTIVES})\(", text)
    assert len(found) == collectives(text).total(), "a collective of another form"
    return Counter((kind, 4 * math.prod(map(int, shape.split(",")))) for shape, kind in found)


def compiled_decode(
    config: Mapping,
    partition: Partition,
    *,
    lora: bool,
    fully=False,
    implementation=None,
    rows=8,
    slots=4,
    targets=None,
):
    """The decode step of a model on a mesh, compiled from shapes alone."""
    spec = lj.LoraSpec.from_hf_config(config, num_slots=slots, slot_rank=16, targets=targets)
    sizes = models.ModelConfig.from_hf(config)
    model = models.abstract_model(sizes, partition, implementation=implementation)
    graphdef, params = nnx.split(model)

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=partition.sharding("rows"))

    step = models.on_devices(functools.partial(models.decode, graphdef), params, partition)
    return (
        jax.jit(step, donate_argnums=2)
        .lower(
            params,
            abstract_slots(spec, partition, fully_sharded=fully) if lora else None,
            models.abstract_cache(sizes, partition, rows, 32),
            struct((rows,), np.int32),
            struct((rows,), np.int32),
            struct((rows, slots), np.float32) if lora else None,
        )
        .compile()
    )
