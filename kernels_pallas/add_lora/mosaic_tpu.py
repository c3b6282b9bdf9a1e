"""`add_lora` on TPU: the delta is added to y in place (`tpu/kernel.py`)."""

from jaxtyping import Array, Float

from lorajax.kernels_pallas.checks import Layer
from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.tpu.launch import current_chip, launch, why_not
from lorajax.kernels_pallas.tpu.problem import describe
from lorajax.kernels_pallas.weights import LoraWeights


def add_lora(
    y: Float[Array, "T d_out"],
    x: Float[Array, "T d_in"],
    weights: LoraWeights,
    routing: Routing,
    *,
    layer: Layer,
) -> Float[Array, "T d_out"]:
    """Y plus the delta, in y's memory where XLA can give it up; base rows keep y's very bits."""
    return launch(x, y, weights, routing, kind="given", out_dtype=y.dtype, layer=layer)


def unsupported(
    y: Float[Array, "T d_out"],
    x: Float[Array, "T d_in"],
    weights: LoraWeights,
    routing: Routing,
) -> str | None:
    """Why the kernel cannot run these arguments, or None if it can."""
    problem = describe(x, weights, routing, base="given", out_dtype=y.dtype)
    return why_not(problem, current_chip())
