"""`lora_linear` in plain XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from lorajax.kernels_pallas.add_lora.xla import add_lora
from lorajax.kernels_pallas.checks import Layer, take_layer
from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.weights import LoraWeights


def lora_linear(
    x: Float[Array, "T d_in"],
    w: Float[Array, "*L d_in d_out"],
    weights: LoraWeights,
    routing: Routing,
    *,
    layer: Layer,
    base_layer: Layer,
) -> Float[Array, "T d_out"]:
    """The plain product, then `add_lora`: base rows are bit-equal to `x @ w`."""
    w = w if w.ndim == 2 else take_layer(w, base_layer)
    return add_lora(jnp.dot(x, w), x, weights, routing, layer=layer)
