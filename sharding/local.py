"""The ops on one device's share of features and slots, for use inside `shard_map`.

They are those of `lorajax` itself, which need no collective, unless the slots are fully sharded.
Then a device has shares of both A and B, and the small h between the two products is exchanged:

    column    A of some ranks     all-gather of h over the ranks     B of the device's own columns
    row       A of some d_in      all-reduce of h                    B of some columns

A row target's columns are put in their place of the partial sum, which the base's all-reduce adds,
so there is no second large collective (S-LoRA, arXiv 2311.03285, section 6).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lorajax import apply
from lorajax.kernels_pallas import ImplementationError, Routing
from lorajax.kernels_pallas.add_lora.xla import add_delta
from lorajax.kernels_pallas.checks import check_delta, take_layer
from lorajax.kernels_pallas.lora_delta.xla import at_layer, expand, shrink
from lorajax.sharding.shard import Shard
from lorajax.state import TargetSlots

Layer = int | jax.Array


def lora_delta(
    x: Float[Array, "T d_in"],
    slots: TargetSlots,
    routing: Routing,
    *,
    layer: Layer,
    shard: Shard,
    implementation: str | None = None,
) -> Float[Array, "T d_out"]:
    """As `lorajax.lora_delta`: the device's columns (column target), or a partial sum (row target).

    Args:
        x: `[T, d_in]`, the device's features.
        slots: The device's share of the target's slots.
        routing: Of the device's tokens.
        layer: Layer of the model; may be traced if the spec stacks layers.
        shard: The device's place on the mesh.
        implementation: Name of a kernel, or None for the best one here.

    Raises:
        ValueError: Shapes do not fit, or (`ImplementationError`) `implementation` cannot run this.
    """
    if not slots.fully_sharded:
        return apply.lora_delta(x, slots, routing, layer=layer, implementation=implementation)
    _check_implementation(implementation, slots)
    weights, index = slots.at(layer)
    check_delta(x, weights, routing)
    A, B, scale = at_layer(weights, index, x.dtype)
    h = shrink(x, A, scale, routing.weights)
    if slots.target.parallel == "row":
        return shard.placed(expand(shard.sum(h).astype(x.dtype), B, weights.slices))
    return expand(shard.gather_ranks(h.astype(x.dtype)), B, weights.slices)


def add_lora(
    y: Float[Array, "T d_out"],
    x: Float[Array, "T d_in"],
    slots: TargetSlots,
    routing: Routing,
    *,
    layer: Layer,
    shard: Shard,
    implementation: str | None = None,
) -> Float[Array, "T d_out"]:
    """As `lorajax.add_lora`; y is the base's partial sum in a row target. See `lora_delta`."""
    if not slots.fully_sharded:
        return apply.add_lora(y, x, slots, routing, layer=layer, implementation=implementation)
    delta = lora_delta(x, slots, routing, layer=layer, shard=shard, implementation=implementation)
    return add_delta(y, delta, routing)


def lora_linear(
    x: Float[Array, "T d_in"],
    w: Float[Array, "*L d_in d_out"],
    slots: TargetSlots,
    routing: Routing,
    *,
    layer: Layer,
    shard: Shard,
    implementation: str | None = None,
) -> Float[Array, "T d_out"]:
    """As `lorajax.lora_linear`; gives a partial sum in a row target. See `lora_delta`."""
    if not slots.fully_sharded:
        return apply.lora_linear(x, w, slots, routing, layer=layer, implementation=implementation)
    y = jnp.dot(x, w if w.ndim == 2 else take_layer(w, layer))
    return add_lora(y, x, slots, routing, layer=layer, shard=shard, implementation=implementation)


def _check_implementation(implementation: str | None, slots: TargetSlots) -> None:
    if implementation not in (None, "xla"):
        raise ImplementationError(
            "the implementation of fully sharded slots must be 'xla', since a kernel cannot hold "
            f"the collective between their two products; got {implementation!r} for "
            f"{slots.name!r}; leave the name out, or use fully_sharded=False"
        )
