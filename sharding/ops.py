"""The ops on arrays that are sharded over a mesh, for loops of your own."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from lorajax import apply
from lorajax.kernels_pallas import Routing, make_routing
from lorajax.kernels_pallas.add_lora.xla import add_delta
from lorajax.kernels_pallas.routing import MAX_BLOCK
from lorajax.sharding import local
from lorajax.sharding.partition import Partition
from lorajax.sharding.rules import AxisRules
from lorajax.sharding.state import features, slots_specs
from lorajax.state import TargetSlots

Layer = int | jax.Array


def sharded(mesh: Mesh, rules: AxisRules | None = None) -> "ShardedOps":
    """The ops under their own names, on sharded arrays.

    Args:
        mesh: The devices.
        rules: The mesh axis of each logical axis; by default that of its name.

    Raises:
        SpecError: The mesh lacks an axis.
    """
    return ShardedOps(Partition.of(mesh, rules))


@dataclass(frozen=True)
class ShardedOps:
    """Each op inside `jax.shard_map`, so that kernels run too, with the table's shardings.

    Tokens are cut over the axes of rows. A column target takes whole features and gives cut ones,
    a row target takes cut features and gives whole ones. States must come from
    `init_state(spec, state_shardings(spec, mesh, rules))`, fully sharded or not.

    Attributes:
        partition: The mesh and its rules.
    """

    partition: Partition

    def make_routing(self, row_weights: Float[Array, "N S"], token_row: Int[Array, "T"]) -> Routing:
        """As `lorajax.make_routing`; each shard has the blocks of its own tokens.

        Args:
            row_weights: `f32[N, S]`, on every device.
            token_row: `i32[T]`, cut over the rows.
        """
        rules, shards = self.partition.rules, self.partition.shard.row_shards
        block = min(MAX_BLOCK, token_row.shape[0] // shards)
        in_specs = (PartitionSpec(), rules.spec("rows"))
        make = functools.partial(make_routing, block=block)
        return self.partition.per_device(make, in_specs, self._routing_specs(block))(
            row_weights, token_row
        )

    def lora_delta(
        self,
        x: Float[Array, "T d_in"],
        slots: TargetSlots,
        routing: Routing,
        *,
        layer: Layer,
        implementation: str | None = None,
    ) -> Float[Array, "T d_out"]:
        """As `lorajax.lora_delta`; a row target's is summed over the shards on its own."""
        return self._run(local.lora_delta, {"x": x}, slots, routing, layer, implementation)

    def add_lora(
        self,
        y: Float[Array, "T d_out"],
        x: Float[Array, "T d_in"],
        slots: TargetSlots,
        routing: Routing,
        *,
        layer: Layer,
        implementation: str | None = None,
    ) -> Float[Array, "T d_out"]:
        """As `lorajax.add_lora`, y being whole sums.

        A row target's delta is then summed on its own, one all-reduce more than `lora_linear`. To
        have none, call that of `lorajax.sharding.local` on the partial sums in a `shard_map` of
        your own.
        """
        if features(slots)[0] is not None:
            delta = self.lora_delta(x, slots, routing, layer=layer, implementation=implementation)
            return add_delta(y, delta, routing)
        return self._run(local.add_lora, {"y": y, "x": x}, slots, routing, layer, implementation)

    def lora_linear(
        self,
        x: Float[Array, "T d_in"],
        w: Float[Array, "*L d_in d_out"],
        slots: TargetSlots,
        routing: Routing,
        *,
        layer: Layer,
        implementation: str | None = None,
    ) -> Float[Array, "T d_out"]:
        """As `lorajax.lora_linear`; a row target has the base's all-reduce and no other.

        Args:
            x: `[T, d_in]`, the input of the target.
            w: Base weight, cut as B is (column) or as A is (row); the columns of a merged target in
                the order of `slots.columns`.
            slots: The target's slots.
            routing: From this object's `make_routing`.
            layer: Layer of the model.
            implementation: Name of a kernel, or None for the best one here.
        """
        arrays = {"x": x, "w" if w.ndim == 2 else "stacked w": w}
        return self._run(local.lora_linear, arrays, slots, routing, layer, implementation)

    def lora_embed(
        self,
        ids: Int[Array, "T"],
        embed: Float[Array, "V D"],
        slots: TargetSlots,
        routing: Routing,
        *,
        implementation: str | None = None,
    ) -> Float[Array, "T D"]:
        """As `lorajax.lora_embed`, with the base's all-reduce over the vocabulary and no other.

        Args:
            ids: `[T]`, cut over the rows.
            embed: `[V, D]`, its rows cut as A's columns are.
            slots: The embedding's slots.
            routing: From this object's `make_routing`.
            implementation: Name of a kernel, or None for the best one here.
        """
        rules, shard, (vocabulary, _) = self.partition.rules, self.partition.shard, features(slots)

        def on_device(ids: Any, embed: Any, slots: TargetSlots, routing: Routing) -> jax.Array:
            first = shard.tensor_index() * embed.shape[0] if vocabulary else 0
            rows = apply.lora_embed(
                ids, embed, slots, routing, first=first, implementation=implementation
            )
            return shard.sum(rows) if vocabulary else rows

        in_specs = (
            rules.spec("rows"),
            rules.spec(vocabulary, None),
            slots_specs(slots, rules),
            self._routing_specs(routing.block),
        )
        return self.partition.per_device(on_device, in_specs, rules.spec("rows", None))(
            ids, embed, slots, routing
        )

    def split(self, y: Float[Array, "T d_out"], slots: TargetSlots) -> tuple[jax.Array, ...]:
        """The slices of a merged column target's product, each cut over the shards.

        A slice with fewer heads than shards comes with its copies, one for each shard.
        """
        widths = slots.columns.local
        cuts = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
        spec = self.partition.rules.spec("rows", "tensor")
        return self.partition.per_device(
            lambda y: tuple(jnp.split(y, cuts, axis=-1)), spec, (spec,) * len(widths)
        )(y)

    def _run(
        self,
        op: Callable[..., jax.Array],
        arrays: dict[str, jax.Array],
        slots: TargetSlots,
        routing: Routing,
        layer: Layer,
        implementation: str | None,
    ) -> jax.Array:
        """One op; `arrays` are its first arguments, by their names in the table."""
        rules, (d_in, d_out) = self.partition.rules, features(slots)
        table = {
            "x": rules.spec("rows", d_in),
            "y": rules.spec("rows", d_out),
            "w": rules.spec(d_in, d_out),
            "stacked w": rules.spec(None, d_in, d_out),
        }
        shard = self.partition.shard
        # An int stays one: it chooses among the arrays of layers that are not stacked.
        traced = (layer,) if isinstance(layer, jax.Array) else ()

        op = functools.partial(op, shard=shard, implementation=implementation)

        def on_device(arrays: Any, slots: TargetSlots, routing: Routing, traced: Any) -> jax.Array:
            y = op(*arrays, slots, routing, layer=traced[0] if traced else layer)
            return shard.sum(y) if d_in else y

        in_specs = (
            tuple(table[name] for name in arrays),
            slots_specs(slots, rules),
            self._routing_specs(routing.block),
            (PartitionSpec(),) * len(traced),
        )
        return self.partition.per_device(on_device, in_specs, table["y"])(
            tuple(arrays.values()), slots, routing, traced
        )

    def _routing_specs(self, block: int) -> Routing:
        spec = self.partition.rules.spec
        return Routing(
            weights=spec(None, "rows"), active=spec("rows"), count=spec("rows"), block=block
        )
