"""What a call of the TPU kernel is about, as static facts, and whether the kernel can run it."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.weights import LoraWeights

#: Lanes of a vector register, and the width of a pack of slots.
LANES = 128

_FLOATS = (jnp.bfloat16, jnp.float32)
_SLOTS = (*_FLOATS, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)


@dataclass(frozen=True)
class Problem:
    """Shapes and dtypes of one call (symbols of section 2 of docs/design.md).

    Attributes:
        tokens: T.
        d_in: Features of x.
        d_out: Features of the output.
        slots: S.
        rank: R.
        slices: Widths of the G slices of d_out.
        block: Tokens of a routing block.
        dtype: Of x (and of w).
        slot_dtype: Of A and B.
        out_dtype: Of the output.
        base: "product" (`lora_linear`), "given" (`add_lora`) or "none" (`lora_delta`).
    """

    tokens: int
    d_in: int
    d_out: int
    slots: int
    rank: int
    slices: tuple[int, ...]
    block: int
    dtype: np.dtype
    slot_dtype: np.dtype
    out_dtype: np.dtype
    base: str

    @property
    def blocks(self) -> int:
        """P, routing blocks."""
        return -(-self.tokens // self.block)

    @property
    def per_pack(self) -> int:
        """Slots side by side in one pack of 128 lanes."""
        return LANES // self.rank

    @property
    def max_packs(self) -> int:
        """Packs of a block in which every slot is active."""
        return -(-self.slots // self.per_pack)


def describe(
    x, weights: LoraWeights, routing: Routing, *, base: str, out_dtype: np.dtype
) -> Problem:
    """The problem of a call; its arrays may be traced."""
    _, S, _, R, d_in = weights.A.shape
    return Problem(
        tokens=x.shape[0],
        d_in=d_in,
        d_out=weights.B.shape[-1],
        slots=S,
        rank=R,
        slices=weights.slices,
        block=routing.block,
        dtype=np.dtype(x.dtype),
        slot_dtype=np.dtype(weights.A.dtype),
        out_dtype=np.dtype(out_dtype),
        base=base,
    )


def tile_height(dtype: np.dtype) -> int:
    """Rows of a packed VMEM tile: 8 for 32 bits, 16 for 16 bits, 32 for 8 bits."""
    return 32 // np.dtype(dtype).itemsize


def unsupported(problem: Problem) -> str | None:
    """Why the kernel cannot run a problem whatever its tiles, or None if it can."""
    p = problem
    height = tile_height(p.slot_dtype)
    if p.dtype not in _FLOATS:
        return f"x must be bfloat16 or float32; got {p.dtype}"
    if p.slot_dtype not in _SLOTS:
        return f"slots must be bfloat16, float32, int8 or float8; got {p.slot_dtype}"
    if p.rank > LANES or p.rank % height:
        return (
            f"slot_rank must be a multiple of {height} (the tile height of {p.slot_dtype}) up to "
            f"{LANES}; got {p.rank}"
        )
    if p.blocks > 1 and p.block % tile_height(p.dtype):
        return (
            f"routing blocks must be a multiple of {tile_height(p.dtype)} tokens for {p.dtype}; "
            f"got {p.block}"
        )
    return None
