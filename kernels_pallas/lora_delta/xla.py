"""`lora_delta` as two dense products: the reference that every kernel must equal."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from lorajax.kernels_pallas.checks import Layer, take_layer
from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.weights import LoraWeights


def lora_delta(
    x: Float[Array, "T d_in"], weights: LoraWeights, routing: Routing, *, layer: Layer
) -> Float[Array, "T d_out"]:
    """`((x Aᵀ) ⊙ W) B` in float32, over all slots.

    The mask selects and never multiplies: 0 times NaN is NaN, and a broken adapter or row must stay
    alone. B needs no mask, since `write_slots` keeps it finite.
    """
    A, B, scale = (take_layer(a, layer) for a in (weights.A, weights.B, weights.scale))
    S, G, R, d_in = A.shape
    T = x.shape[0]
    h = lax.dot_general(
        x,
        A.reshape(S * G * R, d_in).astype(x.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    ).reshape(T, S, G, R)
    w = routing.weights.T[:, :, None, None]
    h = jnp.where(w != 0, h * (scale[None] * w), 0.0).astype(x.dtype)

    B = B.reshape(S * R, -1).astype(x.dtype)
    parts, start = [], 0
    for g, width in enumerate(weights.slices):
        h_g = h[:, :, g].reshape(T, S * R)
        columns = lax.slice_in_dim(B, start, start + width, axis=1)
        parts.append(jnp.dot(h_g, columns, preferred_element_type=jnp.float32))
        start += width
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
