"""`add_lora` in plain XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from lorajax.kernels_pallas.checks import Layer
from lorajax.kernels_pallas.lora_delta.xla import lora_delta
from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.weights import LoraWeights


def add_lora(
    y: Float[Array, "T d_out"],
    x: Float[Array, "T d_in"],
    weights: LoraWeights,
    routing: Routing,
    *,
    layer: Layer,
) -> Float[Array, "T d_out"]:
    """The delta of the plain form, added to y."""
    return add_delta(y, lora_delta(x, weights, routing, layer=layer), routing)


def add_delta(
    y: Float[Array, "T d_out"], delta: Float[Array, "T d_out"], routing: Routing
) -> Float[Array, "T d_out"]:
    """Adds in float32, and rounds once. Base rows keep y's very bits: y + 0.0 loses -0.0."""
    adapted = (routing.weights != 0).any(axis=0)[:, None]
    return jnp.where(adapted, (y.astype(jnp.float32) + delta).astype(y.dtype), y)
