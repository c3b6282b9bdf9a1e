"""The slot arrays of all targets, and the compiled functions that write one slot."""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from lorajax.adapter import Adapter, PackedWeights
from lorajax.columns import Columns
from lorajax.errors import SpecError
from lorajax.kernels_pallas import LoraWeights
from lorajax.spec import LoraSpec
from lorajax.target import Target


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TargetSlots:
    """Slots of one target in all layers.

    Attributes:
        parts: One `LoraWeights` with all layers, or one with L = 1 for each layer. Their `slices`
            are those of one shard.
        target: What they are slots of.
        shards: Devices that tensor parallelism cuts the features over.
        fully_sharded: Whether the ranks of a column target's A, or d_out of a row target's B, are
            cut over them too: products then need a collective (`lorajax.sharding.local`).
    """

    parts: tuple[LoraWeights, ...]
    target: Target = field(metadata={"static": True})
    shards: int = field(default=1, metadata={"static": True})
    fully_sharded: bool = field(default=False, metadata={"static": True})

    @property
    def name(self) -> str:
        """The target's name."""
        return self.target.name

    @property
    def columns(self) -> Columns:
        """The order of B's columns."""
        return columns_of(self.target, self.shards, self.fully_sharded)

    def at(self, layer: int | jax.Array) -> tuple[LoraWeights, int | jax.Array]:
        """The arrays that hold a layer, and the layer's index in them.

        Raises:
            SpecError: `layer` is traced, and each layer has its own arrays; or columns are laid out
                for a mesh, and this is not one device's share.
            IndexError: There is no such layer.
        """
        part = self.parts[0]
        if part.B.shape[-1] != sum(part.slices):
            raise SpecError(
                f"slots laid out for {self.shards} devices must be used on one device's share; got "
                f"all {part.B.shape[-1]} columns of {self.name!r}; use the ops of "
                "lorajax.sharding.sharded(mesh), or call this inside shard_map"
            )
        if len(self.parts) == 1:
            return self.parts[0], layer
        if isinstance(layer, Tracer):
            raise SpecError(
                f"a traced layer index needs stacked layers; {self.name!r} has an array a layer; "
                "build the spec with stack_layers=True, or unroll the loop"
            )
        index = int(layer)
        if not 0 <= index < len(self.parts):
            raise IndexError(
                f"layer must be in [0, {len(self.parts)}); got {index} for {self.name!r}; "
                "count layers from 0"
            )
        return self.parts[index], 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoraState:
    """All slots: a pytree to pass to a jitted step. `state["self_attn.o_proj"]` is one target's.

    `write_slots` and `clear_slots` donate their input: a state that was passed to them is dead.
    """

    targets: dict[str, TargetSlots]

    def __getitem__(self, name: str) -> TargetSlots:
        try:
            return self.targets[name]
        except KeyError:
            raise SpecError(
                f"a target must be one of {list(self.targets)}; got {name!r}; "
                "use a name of the spec the state was made from"
            ) from None

    @property
    def num_slots(self) -> int:
        """S."""
        return next(iter(self.targets.values())).parts[0].num_slots


def columns_of(target: Target, shards: int, fully_sharded: bool) -> Columns:
    """The order of B's columns on some shards.

    That of a row target is cut only if fully sharded, that of the embedding never.

    Raises:
        SpecError: The columns do not divide over the shards.
    """
    aligned = target.parallel in ("column", "head")
    return Columns(
        target.slices,
        target.heads if aligned else (),
        shards if aligned or fully_sharded else 1,
    )


def abstract_state(
    spec: LoraSpec,
    shards: Mapping[str, int] | None = None,
    *,
    fully_sharded: Collection[str] = (),
) -> LoraState:
    """The state as `jax.ShapeDtypeStruct` leaves: shapes, shardings and checkpoints start here.

    Args:
        spec: The slots.
        shards: For each target, devices that its features are cut over; 1 for those left out.
        fully_sharded: Targets that are cut fully (see `TargetSlots`).

    Raises:
        SpecError: The columns of a target do not divide over its shards.
    """
    shards = {} if shards is None else shards

    def slots(target: Target) -> TargetSlots:
        S, R, G, depth = spec.num_slots, spec.slot_rank, len(target.slices), spec.depth(target)
        count, L = (1, depth) if spec.stack_layers else (depth, 1)
        dtype, n = np.dtype(spec.dtype), shards.get(target.name, 1)
        full = target.name in fully_sharded
        columns = columns_of(target, n, full)
        weights = LoraWeights(
            A=_struct((L, S, G, R, target.d_in), dtype),
            B=_struct((L, S, R, columns.width), dtype),
            scale=_struct((L, S, G, R), np.dtype(np.float32)),
            slices=columns.local,
        )
        return TargetSlots((weights,) * count, target, n, full)

    return LoraState({t.name: slots(t) for t in spec.targets})


def _struct(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def init_state(spec: LoraSpec, shardings: Any = None) -> LoraState:
    """Makes a state with every slot zero.

    Args:
        spec: The slots.
        shardings: A `LoraState` of shardings (`lorajax.sharding.state_shardings`), which also says
            how columns are laid out, or None for the default device.
    """
    targets = {} if shardings is None else shardings.targets
    shapes = abstract_state(
        spec,
        {name: target.shards for name, target in targets.items()},
        fully_sharded=[name for name, target in targets.items() if target.fully_sharded],
    )

    def zeros() -> LoraState:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    return jax.jit(zeros, out_shardings=shardings)()


def write_slots(state: LoraState, slots: Sequence[SupportsIndex], adapter: Adapter) -> LoraState:
    """Writes an adapter into its slots: whole slots, all targets, zeros where it has nothing.

    One asynchronous dispatch a slot, of one compiled function: neither rank, targets nor slot
    compile anew. Where B is not finite, its row is stored as zeros and the row's scale as NaN, so
    that 0 * NaN cannot reach another adapter's tokens.

    Args:
        state: Donated; use the returned one.
        slots: One distinct slot for each of `adapter.num_slots`.
        adapter: From `load_adapter`, packed for the state's spec.

    Returns:
        The new state.

    Raises:
        SpecError: The slots or the adapter's shapes do not fit; the state was not touched.
    """
    _check_slots(state, slots)
    if len(slots) != adapter.num_slots:
        raise SpecError(
            f"an adapter must get exactly its slots; got {len(slots)} for {adapter.num_slots} "
            f"(rank {adapter.rank}); pass that many"
        )
    updates = [_slot_update(state, adapter, i) for i in range(len(slots))]
    for slot, update in zip(slots, updates, strict=True):
        state = _write(state, np.int32(operator.index(slot)), update)
    return state


def clear_slots(state: LoraState, slots: Sequence[SupportsIndex]) -> LoraState:
    """Zeroes slots.

    Args:
        state: Donated; use the returned one.
        slots: Distinct slots.

    Raises:
        SpecError: A slot is out of range or named twice; the state was not touched.
    """
    _check_slots(state, slots)
    for slot in slots:
        state = _clear(state, np.int32(operator.index(slot)))
    return state


def _check_slots(state: LoraState, slots: Sequence[SupportsIndex]) -> None:
    S = state.num_slots
    if len(set(slots)) != len(slots) or any(not 0 <= operator.index(s) < S for s in slots):
        raise SpecError(
            f"slots must be distinct and in [0, {S}); got {list(slots)}; take free ones of the pool"
        )


def _slot_update(state: LoraState, adapter: Adapter, index: int) -> Mapping[str, Any]:
    """One slot's data for every target: tuples of parts, `A [L, 1, G, R, d_in]` and so on."""
    unknown = set(adapter.arrays) - set(state.targets)
    if unknown:
        raise SpecError(
            f"an adapter must be packed for the state's targets; got {sorted(unknown)} besides "
            f"{list(state.targets)}; load it with the spec of the state"
        )
    return {name: _target_update(t, adapter, index) for name, t in state.targets.items()}


def _target_update(target: TargetSlots, adapter: Adapter, index: int) -> tuple[Any, ...]:
    packed = adapter.arrays.get(target.name)
    if packed is not None:
        _check_packed(target, packed)
    layer, parts = 0, []
    for part in target.parts:
        layers = part.A.shape[0]
        update = {}
        for key in ("A", "B", "scale"):
            leaf = getattr(part, key)
            host = (
                np.broadcast_to(np.zeros((), leaf.dtype), (layers, *leaf.shape[2:]))
                if packed is None
                else getattr(packed, key)[index, layer : layer + layers]
            )
            columns = target.columns if key == "B" and packed is not None else None
            update[key] = _placed(host[:, None], leaf, columns)
        parts.append(update)
        layer += layers
    return tuple(parts)


def _check_packed(target: TargetSlots, packed: PackedWeights) -> None:
    parts, widths = target.parts, target.target.slices
    layers = sum(part.A.shape[0] for part in parts)
    for key in ("A", "B", "scale"):
        leaf, array = getattr(parts[0], key), getattr(packed, key)
        tail = (*leaf.shape[2:-1], sum(widths)) if key == "B" else leaf.shape[2:]
        if array.shape[1:] != (layers, *tail) or array.dtype != leaf.dtype:
            raise SpecError(
                f"an adapter must be packed for the state; got {key} {array.dtype}"
                f"{list(array.shape[1:])} for {leaf.dtype}{[layers, *tail]} of {target.name!r}; "
                "load it with the spec of the state"
            )


def _placed(host: np.ndarray, leaf: jax.Array, columns: Columns | None) -> np.ndarray | jax.Array:
    """One slot's data, `[L, 1, ...]`, placed as the slots are: each process makes only its own."""
    if leaf.sharding.num_devices == 1:
        return host if columns is None else columns.take(host)

    def take(index: Any) -> np.ndarray:
        return host[index] if columns is None else columns.take(host[index[:-1]], index[-1])

    shape = (leaf.shape[0], 1, *leaf.shape[2:])
    return jax.make_array_from_callback(shape, leaf.sharding, take)


def _set(leaf: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
    sharding = jax.typeof(leaf).sharding
    if not sharding.mesh.empty:  # on a mesh of explicit axes both must be sharded alike
        value = jax.sharding.reshard(value, sharding)
    return jax.lax.dynamic_update_slice_in_dim(leaf, value, slot, axis=1)


def _write_part(part: LoraWeights, slot: jax.Array, update: dict[str, jax.Array]) -> LoraWeights:
    B = update["B"]
    finite = jnp.isfinite(B).all(axis=-1)  # [L, 1, R]
    scale = jnp.where(finite[:, :, None, :], update["scale"], jnp.nan)
    return LoraWeights(
        A=_set(part.A, slot, update["A"]),
        B=_set(part.B, slot, jnp.where(finite[..., None], B, 0)),
        scale=_set(part.scale, slot, scale),
        slices=part.slices,
    )


@jax.jit(donate_argnums=0)
def _write(state: LoraState, slot: jax.Array, update: Mapping[str, Any]) -> LoraState:
    return LoraState(
        {
            name: replace(
                target,
                parts=tuple(
                    _write_part(part, slot, new)
                    for part, new in zip(target.parts, update[name], strict=True)
                ),
            )
            for name, target in state.targets.items()
        }
    )


@jax.jit(donate_argnums=0)
def _clear(state: LoraState, slot: jax.Array) -> LoraState:
    return jax.tree.map(
        lambda leaf: _set(leaf, slot, jnp.zeros((leaf.shape[0], 1, *leaf.shape[2:]), leaf.dtype)),
        state,
    )
