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
    """Y plus the delta, summed in float32. Base rows keep y's very bits: y + 0.0 loses -0.0."""
    delta = lora_delta(x, weights, routing, layer=layer)
    adapted = (routing.weights != 0).any(axis=0)[:, None]
    return jnp.where(adapted, (y.astype(jnp.float32) + delta).astype(y.dtype), y)
