"""Shardings of a state, from the table of docs/sharding.md."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lorajax.errors import SpecError
from lorajax.kernels_pallas import LoraWeights
from lorajax.sharding.partition import Partition
from lorajax.sharding.rules import WHOLE, AxisRules
from lorajax.sharding.shard import Shard
from lorajax.spec import LoraSpec
from lorajax.state import LoraState, TargetSlots, abstract_state
from lorajax.target import Target

# Logical axis of d_in in A and of d_out in B; layers, slots and ranks are never cut. A row target
# and the embedding keep B whole: their delta joins the partial sum before the base's all-reduce.
_FEATURES = {
    "column": (WHOLE, "tensor"),
    "row": ("tensor", WHOLE),
    "embedding": ("tensor", WHOLE),
    "head": (WHOLE, "tensor"),
}


def features(slots: TargetSlots) -> tuple[str | None, str | None]:
    """The logical axes of d_in and d_out; None for a vocabulary that is whole on each device."""
    if not slots.target.layered and slots.shards == 1:
        return WHOLE, WHOLE
    return _FEATURES[slots.target.parallel]


def state_shardings(spec: LoraSpec, mesh: Mesh, rules: AxisRules | None = None) -> LoraState:
    """The sharding of every array of `init_state(spec)`, and the order of merged columns.

    | parallel | A `[L, S, G, R, d_in]` | B `[L, S, R, d_out]` |
    |---|---|---|
    | column | replicated | d_out over `tensor`, each shard a share of every slice |
    | row | d_in over `tensor` | replicated |
    | embedding | vocabulary over `tensor` | replicated |
    | head | replicated | vocabulary over `tensor` |

    A vocabulary that does not divide is whole on each device, as in `lorajax.models`.

    Args:
        spec: The slots.
        mesh: The devices.
        rules: The mesh axis of each logical axis; by default that of its name.

    Returns:
        A `LoraState` of `NamedSharding`, for `init_state` and `AdapterManager`.

    Raises:
        SpecError: The mesh lacks an axis, or the features of a target do not divide over it.
    """
    partition = Partition.of(mesh, rules)
    return jax.tree.map(lambda s: s.sharding, abstract_slots(spec, partition))


def abstract_slots(spec: LoraSpec, partition: Partition) -> LoraState:
    """The state on a mesh as `jax.ShapeDtypeStruct`: to compile for devices that are not there.

    Raises:
        SpecError: The features of a target do not divide over the mesh.
    """
    for target in spec.targets:
        _check_row(target, partition.shard.tensor_shards)
    counts = {t.name: _shards(t, partition.shard) for t in spec.targets}
    shapes = abstract_state(spec, counts)
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(partition.mesh, s)
        ),
        shapes,
        state_specs(shapes, partition.rules),
    )


def state_specs(state: LoraState, rules: AxisRules) -> LoraState:
    """The `PartitionSpec` of every array of a state, which may be traced."""
    return LoraState({name: slots_specs(t, rules) for name, t in state.targets.items()})


def slots_specs(slots: TargetSlots, rules: AxisRules) -> TargetSlots:
    """The `PartitionSpec` of every array of one target."""
    d_in, d_out = features(slots)

    def specs(part: LoraWeights) -> LoraWeights:
        return LoraWeights(
            A=rules.spec(WHOLE, WHOLE, WHOLE, WHOLE, d_in),
            B=rules.spec(WHOLE, WHOLE, WHOLE, d_out),
            scale=PartitionSpec(),
            slices=part.slices,
        )

    return TargetSlots(tuple(specs(p) for p in slots.parts), slots.target, slots.shards)


def _shards(target: Target, shard: Shard) -> int:
    vocabulary = {"embedding": target.d_in, "head": target.slices[0]}.get(target.parallel)
    whole = vocabulary is not None and not shard.cuts_vocabulary(vocabulary)
    return 1 if whole else shard.tensor_shards


def _check_row(target: Target, shards: int) -> None:
    if target.parallel != "row":
        return
    units = target.heads[0] if target.heads else target.d_in
    if units % shards:
        what = "heads" if target.heads else "features"
        raise SpecError(
            f"the {what} of d_in of a row target must divide over the tensor axis of {shards} "
            f"devices; got {units} for {target.name!r}; use a smaller tensor axis"
        )
