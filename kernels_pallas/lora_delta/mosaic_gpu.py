"""`lora_delta` on Hopper GPUs: the delta alone (`gpu/kernel.py`)."""

from jaxtyping import Array, Float

from lorajax.kernels_pallas.checks import Layer
from lorajax.kernels_pallas.gpu.launch import current_device, launch, why_not
from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.weights import LoraWeights


def lora_delta(
    x: Float[Array, "T d_in"], weights: LoraWeights, routing: Routing, *, layer: Layer
) -> Float[Array, "T d_out"]:
    """The delta in float32; exact zeros in base rows."""
    return launch(x, None, weights, routing, layer=layer)


def unsupported(x: Float[Array, "T d_in"], weights: LoraWeights, routing: Routing) -> str | None:
    """Why the kernel cannot run these arguments, or None if it can."""
    return why_not(x, weights, routing, has_base=False, device=current_device())
