"""Other ways to compute a LoRA delta, as the libraries around us do it: one adapter a token.

Each has the signature of `lorajax.kernels_pallas.lora_delta.xla.lora_delta`, so that the very same
model runs on it. They know one slot a token, which is all that the benchmark gives them.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax

from lorajax.kernels_pallas import LoraWeights, Routing


def _slot(routing: Routing) -> tuple[jax.Array, jax.Array]:
    """The slot of each token and its weight, 0 for a base token."""
    slot = jnp.argmax(routing.weights != 0, axis=0)
    return slot, jnp.take_along_axis(routing.weights, slot[None], axis=0)[0]


def _columns(weights: LoraWeights) -> Iterator[tuple[int, int, int]]:
    start = 0
    for g, width in enumerate(weights.slices):
        yield g, start, start + width
        start += width


def gather(x, weights: LoraWeights, routing: Routing, *, layer: int):
    """`A[slot]` and `B[slot]` for each token, then batched products (BGMV in plain XLA)."""
    A, B, scale = weights.A[layer], weights.B[layer], weights.scale[layer]
    slot, weight = _slot(routing)
    h = jnp.einsum("td,tgrd->tgr", x, A[slot]) * scale[slot] * weight[:, None, None]
    B_t = B[slot]
    parts = [
        jnp.einsum("tr,trn->tn", h[:, g], B_t[:, :, start:end])
        for g, start, end in _columns(weights)
    ]
    return jnp.concatenate(parts, axis=1)


def one_hot(x, weights: LoraWeights, routing: Routing, *, layer: int):
    """Three-operand einsums over all slots, one for each slice."""
    A, B, scale = weights.A[layer], weights.B[layer], weights.scale[layer]
    hot = (routing.weights.T != 0).astype(x.dtype)
    parts = []
    for g, start, end in _columns(weights):
        h = jnp.einsum("td,ts,srd->tr", x, hot, A[:, g])
        h = h * jnp.einsum("ts,sr->tr", routing.weights.T, scale[:, g])
        parts.append(jnp.einsum("tr,ts,srn->tn", h, hot, B[:, :, start:end]))
    return jnp.concatenate(parts, axis=1)


def ragged_dot(x, weights: LoraWeights, routing: Routing, *, layer: int):
    """Tokens sorted by slot, two grouped products, and the sort undone."""
    A, B, scale = weights.A[layer], weights.B[layer], weights.scale[layer]
    slot, weight = _slot(routing)
    order = jnp.argsort(slot)
    sizes = jnp.bincount(slot, length=A.shape[0]).astype(jnp.int32)
    x, parts = x[order], []
    for g, start, end in _columns(weights):
        h = lax.ragged_dot(x, A[:, g].swapaxes(1, 2), sizes)
        h = h * scale[slot[order], g] * weight[order][:, None]
        parts.append(lax.ragged_dot(h, B[:, :, start:end], sizes))
    y = jnp.concatenate(parts, axis=1)
    return jnp.zeros_like(y).at[order].set(y)


def linear(delta: Callable) -> Callable:
    """`lora_linear` with another delta."""

    def lora_linear(x, w, weights, routing, *, layer, base_layer):
        return jnp.dot(x, w) + delta(x, weights, routing, layer=layer)

    return lora_linear


FORMS = {"per-token gather": gather, "one-hot einsum": one_hot, "ragged_dot": ragged_dot}
