"""`add_lora` on Hopper GPUs: the delta from the kernel, added to y by XLA in one pass."""

from jaxtyping import Array, Float

from lorajax.kernels_pallas.add_lora.xla import add_delta
from lorajax.kernels_pallas.checks import Layer
from lorajax.kernels_pallas.gpu.launch import current_device, launch, why_not
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
    """The kernel's delta, added to y."""
    return add_delta(y, launch(x, None, weights, routing, layer=layer), routing)


def unsupported(
    y: Float[Array, "T d_out"],
    x: Float[Array, "T d_in"],
    weights: LoraWeights,
    routing: Routing,
) -> str | None:
    """Why the kernel cannot run these arguments, or None if it can."""
    del y
    return why_not(x, weights, routing, has_base=False, device=current_device())
