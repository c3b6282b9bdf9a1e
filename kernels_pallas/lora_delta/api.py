"""`lora_delta`: the sum of a token's adapters, without the base product."""

from jaxtyping import Array, Float

from lorajax.kernels_pallas.checks import (
    Implementation,
    Layer,
    always,
    check_delta,
    check_layer,
    choose,
)
from lorajax.kernels_pallas.lora_delta import mosaic_gpu, mosaic_tpu, xla
from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.weights import LoraWeights

IMPLEMENTATIONS = {
    "mosaic_tpu": Implementation(mosaic_tpu.lora_delta, "tpu", mosaic_tpu.unsupported),
    "mosaic_gpu": Implementation(
        mosaic_gpu.lora_delta, "gpu", mosaic_gpu.unsupported, default=False
    ),
    "xla": Implementation(xla.lora_delta, None, always),
}


def lora_delta(
    x: Float[Array, "T d_in"],
    weights: LoraWeights,
    routing: Routing,
    *,
    layer: Layer = 0,
    implementation: str | None = None,
) -> Float[Array, "T d_out"]:
    """Computes `((x Aᵀ) ⊙ W) B` for one target and layer.

    Args:
        x: `[T, d_in]`, the input of the target.
        weights: Slots of the target.
        routing: Routing of the step.
        layer: Index into the layer axis of `weights`; may be traced.
        implementation: Name of a kernel, or None for the best one here.

    Returns:
        `f32[T, d_out]`; exact zeros in the rows of base tokens.

    Raises:
        ValueError: Shapes do not fit, or (`ImplementationError`) `implementation` cannot run this.
    """
    check_delta(x, weights, routing)
    check_layer(layer, weights.A.shape[0])
    kernel = choose(IMPLEMENTATIONS, implementation, x, weights, routing)
    return kernel(x, weights, routing, layer=layer)
