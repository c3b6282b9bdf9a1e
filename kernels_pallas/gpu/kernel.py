"""The kernel body: one producer warpgroup feeds two consumers through a ring of stages.

Everything is computed transposed, yᵀ = wᵀ xᵀ + Bᵀ hᵀ with hᵀ = mask(A xᵀ): weights are the M side
of wgmma and the tokens its N, so 8 tokens cost N = 8 and not 64 rows, and x is read once for each
tile in its true size. Shrink (A xᵀ), base (wᵀ xᵀ) and expand (Bᵀ hᵀ) are the same loop over stages
of the ring; they differ in what the producer copies. Expand adds to the base product's accumulator,
so the delta costs no pass over y.
"""

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lorajax.kernels_pallas.gpu.consumer import consume
from lorajax.kernels_pallas.gpu.plan import Plan
from lorajax.kernels_pallas.gpu.producer import produce
from lorajax.kernels_pallas.gpu.refs import Refs, enter

PRODUCER = 2  #: The third warpgroup.


def body(plan: Plan, r: Refs) -> None:
    """One SM's work, in each of its three warpgroups."""
    sm = lax.axis_index("cluster") * plan.split + lax.axis_index("part")
    wg = lax.axis_index("wg")

    @pl.when(wg == PRODUCER)
    def _():
        plgpu.set_max_registers(plan.registers[0], action="decrease")
        produce(plan, r, sm)

    @pl.when(wg < PRODUCER)
    def _():
        plgpu.set_max_registers(plan.registers[1], action="increase")
        pl.when(wg == 0)(lambda: enter(plan, r))
        consume(plan, r, sm, wg)
