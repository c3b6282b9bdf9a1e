"""`lora_linear`: base product and delta, in one kernel where there is one."""

from jaxtyping import Array, Float

from lorajax.kernels_pallas.checks import (
    Implementation,
    Layer,
    always,
    check_base,
    check_delta,
    check_layer,
    choose,
)
from lorajax.kernels_pallas.lora_linear import mosaic_gpu, mosaic_tpu, xla
from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.weights import LoraWeights

IMPLEMENTATIONS = {
    "mosaic_tpu": Implementation(mosaic_tpu.lora_linear, "tpu", mosaic_tpu.unsupported),
    "mosaic_gpu": Implementation(mosaic_gpu.lora_linear, "gpu", mosaic_gpu.unsupported),
    "xla": Implementation(xla.lora_linear, None, always),
}


def lora_linear(
    x: Float[Array, "T d_in"],
    w: Float[Array, "*L d_in d_out"],
    weights: LoraWeights,
    routing: Routing,
    *,
    layer: Layer = 0,
    base_layer: Layer | None = None,
    implementation: str | None = None,
) -> Float[Array, "T d_out"]:
    """Computes `x w + ((x Aᵀ) ⊙ W) B` for one target and layer.

    Args:
        x: `[T, d_in]`, the input of the target.
        w: The base weight, `[d_in, d_out]`, or `[L, d_in, d_out]` with all layers.
        weights: Slots of the target.
        routing: Routing of the step.
        layer: Index into the layer axis of `weights`; may be traced.
        base_layer: Index into the layer axis of w, `layer` if left out.
        implementation: Name of a kernel, or None for the best one here.

    Returns:
        `[T, d_out]` in the dtype of `x @ w`. With `xla`, rows of base tokens are bit-equal to it.

    Raises:
        ValueError: Shapes do not fit, or (`ImplementationError`) `implementation` cannot run this.
    """
    check_delta(x, weights, routing)
    check_base(w, weights)
    check_layer(layer, weights.A.shape[0])
    base_layer = layer if base_layer is None else base_layer
    if w.ndim == 3:
        check_layer(base_layer, w.shape[0])
    kernel = choose(IMPLEMENTATIONS, implementation, x, w, weights, routing)
    return kernel(x, w, weights, routing, layer=layer, base_layer=base_layer)
