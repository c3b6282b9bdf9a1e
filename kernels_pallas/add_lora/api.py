"""`add_lora`: adds the delta to a base product that somebody else computed."""

from jaxtyping import Array, Float

from lorajax.kernels_pallas.add_lora import mosaic_gpu, mosaic_tpu, xla
from lorajax.kernels_pallas.checks import (
    Implementation,
    Layer,
    always,
    check_delta,
    check_layer,
    choose,
)
from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.weights import LoraWeights

IMPLEMENTATIONS = {
    "mosaic_tpu": Implementation(mosaic_tpu.add_lora, "tpu", mosaic_tpu.unsupported),
    "mosaic_gpu": Implementation(mosaic_gpu.add_lora, "gpu", mosaic_gpu.unsupported, default=False),
    "xla": Implementation(xla.add_lora, None, always),
}


def add_lora(
    y: Float[Array, "T d_out"],
    x: Float[Array, "T d_in"],
    weights: LoraWeights,
    routing: Routing,
    *,
    layer: Layer = 0,
    implementation: str | None = None,
) -> Float[Array, "T d_out"]:
    """Adds `lora_delta(x, ...)` to y: for a quantised, sharded or otherwise foreign base product.

    Args:
        y: `[T, d_out]`, the base product of x.
        x: `[T, d_in]`, the input of the target.
        weights: Slots of the target.
        routing: Routing of the step.
        layer: Index into the layer axis of `weights`; may be traced.
        implementation: Name of a kernel, or None for the best one here.

    Returns:
        `[T, d_out]` in y's dtype. Rows of base tokens are bit-equal to y.

    Raises:
        ValueError: Shapes do not fit, or (`ImplementationError`) `implementation` cannot run this.
    """
    check_delta(x, weights, routing)
    check_layer(layer, weights.A.shape[0])
    want = (x.shape[0], weights.B.shape[-1])
    if y.shape != want:
        raise ValueError(
            f"y must be [T, d_out] = {list(want)}; got {y.shape}; pass the product of x"
        )
    kernel = choose(IMPLEMENTATIONS, implementation, y, x, weights, routing)
    return kernel(y, x, weights, routing, layer=layer)
