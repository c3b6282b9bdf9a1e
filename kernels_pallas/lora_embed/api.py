"""`lora_embed`: rows of an embedding, with each token's adapters in them."""

from jaxtyping import Array, Float, Int

from lorajax.kernels_pallas.checks import Implementation, always, check_embed, choose
from lorajax.kernels_pallas.lora_embed import xla
from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.weights import LoraWeights

IMPLEMENTATIONS = {"xla": Implementation(xla.lora_embed, None, always)}


def lora_embed(
    ids: Int[Array, "T"],
    embed: Float[Array, "V D"],
    weights: LoraWeights,
    routing: Routing,
    *,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """Computes `embed[ids] + ((onehot(ids) Aᵀ) ⊙ W) B`.

    Args:
        ids: `i32[T]`, rows of `embed`. An id outside of [0, V) gives zeros: on a shard of the
            vocabulary another shard has it, and the sum over the shards is the whole.
        embed: `[V, D]`, the base's embedding.
        weights: Slots of the embedding, A `[1, S, 1, R, V]` and B `[1, S, R, D]`.
        routing: Routing of the step.
        implementation: Name of a kernel, or None for the best one here.

    Returns:
        `[T, D]` in `embed`'s dtype. Rows of base tokens are bit-equal to the base's.

    Raises:
        ValueError: Shapes do not fit, or (`ImplementationError`) `implementation` is unknown.
    """
    check_embed(ids, embed, weights, routing)
    kernel = choose(IMPLEMENTATIONS, implementation, ids, embed, weights, routing)
    return kernel(ids, embed, weights, routing)
