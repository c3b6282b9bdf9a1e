"""`lora_linear` on Hopper GPUs: the base product and the delta in one kernel (`gpu/kernel.py`)."""

from jaxtyping import Array, Float

from lorajax.kernels_pallas.checks import Layer
from lorajax.kernels_pallas.gpu.launch import current_device, launch, why_not
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
    """`x w` plus the delta. Base rows are bit-equal to the same call with nothing resident."""
    if w.ndim == 2:
        w, base_layer = w[None], 0
    return launch(x, w, weights, routing, layer=layer, base_layer=base_layer)


def unsupported(
    x: Float[Array, "T d_in"],
    w: Float[Array, "*L d_in d_out"],
    weights: LoraWeights,
    routing: Routing,
) -> str | None:
    """Why the kernel cannot run these arguments, or None if it can."""
    if w.dtype != x.dtype:
        return f"w must have x's dtype; got {w.dtype} and {x.dtype}"
    return why_not(x, weights, routing, has_base=True, device=current_device())
