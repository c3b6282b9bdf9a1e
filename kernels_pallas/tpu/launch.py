"""From an op's arguments to a run of the TPU kernel, or to the reason why it cannot run."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import get_abstract_mesh
from jaxtyping import Array, Float

from lorajax.kernels_pallas.checks import Layer
from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.tpu.kernel import run_kernel
from lorajax.kernels_pallas.tpu.problem import Problem, describe, unsupported
from lorajax.kernels_pallas.tpu.tiles import CHIPS, PORTABLE, Chip, choose_tiles
from lorajax.kernels_pallas.weights import LoraWeights


def current_chip() -> Chip:
    """The TPU that is being traced for: that of the mesh in force, else of the default device.

    On a machine without a TPU (a lowering ahead of time) it is `PORTABLE`, unless
    `jax.sharding.use_abstract_mesh` names a device.
    """
    device = get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    return CHIPS.get(kind, PORTABLE)


def why_not(problem: Problem, chip: Chip) -> str | None:
    """Why the kernel cannot run a problem on a chip, or None if it can."""
    reason = unsupported(problem)
    if reason is None and choose_tiles(problem, chip) is None:
        reason = (
            f"the smallest tiles must fit in {chip.vmem} bytes of {chip.name} VMEM; got d_in = "
            f"{problem.d_in}, d_out = {problem.d_out} (multiples of 128 can be cut)"
        )
    return reason


def launch(
    x: Float[Array, "T d_in"],
    base: Float[Array, "..."] | None,
    weights: LoraWeights,
    routing: Routing,
    *,
    kind: str,
    out_dtype: np.dtype,
    layer: Layer,
    base_layer: Layer = 0,
) -> Float[Array, "T d_out"]:
    """Runs the kernel with the tiles of the chip that is being traced for.

    Args:
        x: `[T, d_in]`.
        base: w `[L, d_in, d_out]`, y `[T, d_out]` or None.
        weights: Slots.
        routing: Routing of the step.
        kind: What base is: "product", "given" or "none".
        out_dtype: Of the output.
        layer: Index into the layer axis of `weights`; may be traced.
        base_layer: Index into the layer axis of w.

    Raises:
        ValueError: The kernel cannot run this case.
    """
    problem = describe(x, weights, routing, base=kind, out_dtype=out_dtype)
    chip = current_chip()
    reason = why_not(problem, chip)
    tiles = choose_tiles(problem, chip)
    if reason is not None or tiles is None:
        raise ValueError(f"{reason}; use implementation='xla'")
    return run_kernel(
        problem,
        tiles,
        x,
        base,
        weights,
        routing,
        layer=jnp.asarray(layer, jnp.int32).reshape(1),
        base_layer=jnp.asarray(base_layer, jnp.int32).reshape(1),
        vmem_limit=chip.vmem,
    )
