"""The ops on a state: they find a layer's arrays and call the kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lorajax import kernels_pallas as kernels
from lorajax.errors import SpecError
from lorajax.kernels_pallas import LoraWeights, Routing
from lorajax.state import TargetSlots

Layer = int | jax.Array


def lora_delta(
    x: Float[Array, "T d_in"],
    slots: TargetSlots,
    routing: Routing,
    *,
    layer: Layer,
    implementation: str | None = None,
) -> Float[Array, "T d_out"]:
    """The adapters' part alone: `((x Aᵀ) ⊙ W) B`.

    Args:
        x: `[T, d_in]`, the input of the target.
        slots: The target's slots, `state["self_attn.o_proj"]`.
        routing: From `make_routing`, once a step.
        layer: Layer of the model; may be traced if the spec stacks layers.
        implementation: Name of a kernel, or None for the best one here.

    Returns:
        `f32[T, d_out]`; exact zeros in the rows of base tokens.

    Raises:
        ValueError: Shapes do not fit, or (`ImplementationError`) `implementation` cannot run this.
    """
    weights, index = _at(slots, layer)
    return kernels.lora_delta(x, weights, routing, layer=index, implementation=implementation)


def add_lora(
    y: Float[Array, "T d_out"],
    x: Float[Array, "T d_in"],
    slots: TargetSlots,
    routing: Routing,
    *,
    layer: Layer,
    implementation: str | None = None,
) -> Float[Array, "T d_out"]:
    """Adds the adapters' part to a base product y that somebody else computed from x.

    Args:
        y: `[T, d_out]`, any float dtype.
        x: `[T, d_in]`, the input of the target.
        slots: The target's slots, `state["self_attn.o_proj"]`.
        routing: From `make_routing`, once a step.
        layer: Layer of the model; may be traced if the spec stacks layers.
        implementation: Name of a kernel, or None for the best one here.

    Returns:
        `[T, d_out]` in y's dtype; rows of base tokens are bit-equal to y.

    Raises:
        ValueError: Shapes do not fit, or (`ImplementationError`) `implementation` cannot run this.
    """
    weights, index = _at(slots, layer)
    return kernels.add_lora(y, x, weights, routing, layer=index, implementation=implementation)


def lora_linear(
    x: Float[Array, "T d_in"],
    w: Float[Array, "*L d_in d_out"],
    slots: TargetSlots,
    routing: Routing,
    *,
    layer: Layer,
    implementation: str | None = None,
) -> Float[Array, "T d_out"]:
    """The base product and the adapters' part: `x w + ((x Aᵀ) ⊙ W) B`.

    Args:
        x: `[T, d_in]`, the input of the target.
        w: `[d_in, d_out]`, the base weight of this layer, or `[L, d_in, d_out]` with all of them.
        slots: The target's slots, `state["self_attn.o_proj"]`.
        routing: From `make_routing`, once a step.
        layer: Layer of the model; may be traced if the spec stacks layers.
        implementation: Name of a kernel, or None for the best one here.

    Returns:
        `[T, d_out]` in the dtype of `x @ w`. With `xla`, rows of base tokens are bit-equal to it.

    Raises:
        ValueError: Shapes do not fit, or (`ImplementationError`) `implementation` cannot run this.
    """
    weights, index = _at(slots, layer)
    return kernels.lora_linear(
        x, w, weights, routing, layer=index, base_layer=layer, implementation=implementation
    )


def lora_embed(
    ids: Int[Array, "T"],
    embed: Float[Array, "V D"],
    slots: TargetSlots,
    routing: Routing,
    *,
    first: int | Int[Array, ""] = 0,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """The embedding's rows and the adapters' part: `embed[ids] + ((onehot(ids) Aᵀ) ⊙ W) B`.

    On a shard of the vocabulary it is a partial sum, for the base's all-reduce: an id that another
    shard has adds zeros.

    Args:
        ids: `i32[T]`, token ids. One outside the whole vocabulary gives NaN.
        embed: `[V, D]`, the base's embedding, or one shard's rows of it.
        slots: The embedding's slots, `state["model.embed_tokens"]`.
        routing: From `make_routing`, once a step.
        first: The id of `embed`'s first row.
        implementation: Name of a kernel, or None for the best one here.

    Returns:
        `[T, D]` in `embed`'s dtype. Rows of base tokens are bit-equal to the base's.

    Raises:
        ValueError: Shapes do not fit, or (`ImplementationError`) `implementation` is unknown.
    """
    weights, _ = slots.at(0)
    rows = kernels.lora_embed(ids - first, embed, weights, routing, implementation=implementation)
    inside = (ids >= 0) & (ids < slots.target.d_in)
    return jnp.where(inside[:, None], rows, jnp.nan)


def _at(slots: TargetSlots, layer: Layer) -> tuple[LoraWeights, Layer]:
    if slots.fully_sharded:
        raise SpecError(
            "fully sharded slots need a collective between their two products; got those of "
            f"{slots.name!r} on {slots.shards} devices in an op of one device; use the ops of "
            "lorajax.sharding.sharded(mesh), or inside shard_map those of lorajax.sharding.local"
        )
    return slots.at(layer)
