"""`lora_embed` in plain XLA: rows of the embedding and columns of A, both gathered."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lorajax.kernels_pallas.add_lora.xla import add_delta
from lorajax.kernels_pallas.lora_delta.xla import at_layer, expand, select, unless_base
from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.weights import LoraWeights


def embedded(ids: Int[Array, "T"], embed: Float[Array, "V D"]) -> Float[Array, "T D"]:
    """`embed[ids]`, zeros for an id outside of [0, V): another shard of the vocabulary has it."""
    here = _inside(ids, embed.shape[0])
    return jnp.where(here[:, None], embed[jnp.where(here, ids, 0)], 0)


def lora_embed(
    ids: Int[Array, "T"], embed: Float[Array, "V D"], weights: LoraWeights, routing: Routing
) -> Float[Array, "T D"]:
    """The look-up, and `((onehot(ids) Aᵀ) ⊙ W) B`, whose first product is a gather."""
    A, B, scale = at_layer(weights, 0, embed.dtype)
    here = _inside(ids, embed.shape[0])

    def delta() -> Float[Array, "T D"]:
        h = A[..., jnp.where(here, ids, 0)].astype(jnp.float32)
        w = jnp.where(here[None, :], routing.weights, 0.0)
        h = select(h, scale, w).astype(embed.dtype)
        return expand(h, B, weights.slices)

    added = unless_base(routing, embed.shape[1], delta, on_cpu=delta)
    return add_delta(embedded(ids, embed), added, routing)


def _inside(ids: Int[Array, "T"], size: int) -> Array:
    return (ids >= 0) & (ids < size)
