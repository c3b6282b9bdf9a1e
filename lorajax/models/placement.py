"""Where a decoder's arrays lie on a mesh, and steps that run on its devices."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lorajax.columns import Columns
from lorajax.models.cache import KVCache
from lorajax.models.config import ModelConfig
from lorajax.models.decoder import Decoder, Leaf
from lorajax.sharding import Partition
from lorajax.sharding.state import state_specs
from lorajax.state import LoraState

#: Logical axes of a layer's keys and values `[N, C, Hkv, D]`.
CACHE_AXES = ("rows", None, "tensor", None)

Step = Callable[..., tuple[Any, Any]]


def columns_of(leaf: Leaf, shards: int) -> Columns:
    """The order of a leaf's last axis.

    Raises:
        SpecError: It does not divide over the shards.
    """
    cut = leaf.cut == "columns"
    return Columns(leaf.widths, leaf.heads if cut else (), shards if cut else 1)


def logical_axes(leaf: Leaf) -> tuple[str | None, ...]:
    """The logical axes of a leaf: `tensor` cuts one axis of a matrix, `fsdp` the other."""
    if leaf.rows is None:
        return ("tensor" if leaf.cut == "columns" else None,)
    tensor = leaf.cut and "tensor"
    # A head is gathered by its rows, also where its vocabulary is whole.
    by_rows = leaf.cut == "columns" or (leaf.cut is None and leaf.transposed)
    return ("fsdp", tensor) if by_rows else (tensor, "fsdp")


def abstract_model(
    config: ModelConfig,
    partition: Partition,
    *,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Decoder:
    """A decoder of `jax.ShapeDtypeStruct` on a mesh, to compile for devices that are not there.

    Args:
        config: Sizes and layout.
        partition: The mesh.
        dtype: Element type of the parameters; by default `config.dtype`.
        implementation: See `Decoder`; name it where the devices are of another platform.

    Raises:
        ModelError: The model does not divide over the mesh.
    """
    shard, element = partition.shard, np.dtype(config.dtype if dtype is None else dtype)

    def make(leaf: Leaf) -> Any:
        width = columns_of(leaf, shard.tensor_shards).width
        shape = (width,) if leaf.rows is None else (leaf.rows, width)
        sharding = partition.sharding(*logical_axes(leaf))
        return jax.ShapeDtypeStruct(shape, element, sharding=sharding)

    return Decoder(config, make, shard, implementation=implementation)


def abstract_cache(
    config: ModelConfig,
    partition: Partition,
    rows: int,
    length: int,
    *,
    dtype: DTypeLike | None = None,
) -> KVCache:
    """A cache on a mesh as `jax.ShapeDtypeStruct`; arguments as for `abstract_model`, N and C."""
    shards = partition.shard.tensor_shards
    heads = shards * config.local(shards).num_kv_heads
    layer = jax.ShapeDtypeStruct(
        (rows, length, heads, config.head_dim),
        np.dtype(config.dtype if dtype is None else dtype),
        sharding=partition.sharding(*CACHE_AXES),
    )
    return KVCache((layer,) * config.num_layers, (layer,) * config.num_layers)


def param_shardings(config: ModelConfig, partition: Partition) -> Any:
    """The `NamedSharding` of every parameter of a decoder, as a tree like `nnx.split` gives."""
    _, params = nnx.split(abstract_model(config, partition))
    return jax.tree.map(lambda p: p.sharding, params)


def place(leaf: Leaf, array: np.ndarray, partition: Partition) -> jax.Array:
    """A leaf on a mesh, its columns laid out for the shards; a process makes only its own.

    Args:
        leaf: Which.
        array: In the order of the checkpoint.
        partition: The mesh.

    Raises:
        SpecError: It does not divide over the mesh.
    """
    columns = columns_of(leaf, partition.shard.tensor_shards)
    return partition.put(columns.take(array), *logical_axes(leaf))


def on_devices(step: Step, params: Any, partition: Partition) -> Step:
    """A step that each device runs on its own share; all end with the choices of all rows.

    Args:
        step: `(params, lora, cache, *inputs) -> (results, cache)`; each input and result has rows
            first. Its model must have been made for the mesh.
        params: Of the model, placed or abstract.
        partition: The mesh.

    Returns:
        The same function of whole arrays.
    """
    rules, shard = partition.rules, partition.shard
    params_specs = jax.tree.map(lambda p: p.sharding.spec, params)

    def local(params: Any, lora: Any, cache: Any, *inputs: Any) -> tuple[Any, Any]:
        results, cache = step(params, lora, cache, *inputs)
        return jax.tree.map(shard.gather_rows, results), cache

    def run(params: Any, lora: LoraState | None, cache: KVCache, *inputs: Any) -> tuple[Any, Any]:
        slots = None if lora is None else state_specs(lora, rules)
        cached = jax.tree.map(lambda _: rules.spec(*CACHE_AXES), cache)
        rows = jax.tree.map(lambda _: rules.spec("rows"), inputs)
        mapped = partition.per_device(
            local, (params_specs, slots, cached, *rows), (rules.spec(), cached)
        )
        return mapped(params, lora, cache, *inputs)

    return run
