"""`lora_delta` on TPU: the delta alone (`tpu/kernel.py`)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lorajax.kernels_pallas.checks import Layer
from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.tpu.launch import current_chip, launch, why_not
from lorajax.kernels_pallas.tpu.problem import describe
from lorajax.kernels_pallas.weights import LoraWeights

_OUT = np.dtype(jnp.float32)


def lora_delta(
    x: Float[Array, "T d_in"], weights: LoraWeights, routing: Routing, *, layer: Layer
) -> Float[Array, "T d_out"]:
    """`((x Aᵀ) ⊙ W) B` in float32."""
    return launch(x, None, weights, routing, kind="none", out_dtype=_OUT, layer=layer)


def unsupported(x: Float[Array, "T d_in"], weights: LoraWeights, routing: Routing) -> str | None:
    """Why the kernel cannot run these arguments, or None if it can."""
    problem = describe(x, weights, routing, base="none", out_dtype=_OUT)
    return why_not(problem, current_chip())
