"""Bytes that the TPU kernel moves between HBM and VMEM, counted from its plan of copies.

A compiler's cost analysis cannot see into a kernel; this counts what `kernel.py` and `stages.py`
copy, from the same tiles. The floor is every operand once: x, w, the slots that some token uses, y.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lorajax.kernels_pallas.tpu.problem import Problem
from lorajax.kernels_pallas.tpu.tiles import Tiles


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call, by operand. `routing` is W, scale and the lists of active slots."""

    x: int
    base: int
    slots: int
    routing: int
    out: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.x + self.base + self.slots + self.routing + self.out


def slot_bytes(problem: Problem) -> int:
    """Bytes of one slot's A and B in one layer."""
    p = problem
    return p.rank * (len(p.slices) * p.d_in + p.d_out) * p.slot_dtype.itemsize


def traffic(problem: Problem, tiles: Tiles, counts: Sequence[int]) -> Traffic:
    """Bytes that the kernel moves.

    Args:
        problem: Shapes and dtypes.
        tiles: Sizes.
        counts: Active slots of each of the P routing blocks.
    """
    p, sub_blocks = problem, tiles.sub_blocks(problem)
    token_tiles, column_tiles, depth_tiles = tiles.grid(p)
    tokens, slots, live = 0, 0, 0
    for tile in range(token_tiles):
        first = tile * tiles.tokens // p.block
        here = sum(counts[first : first + sub_blocks])
        if p.base == "given" and here == 0:
            continue
        live += 1
        tokens += min(tiles.tokens, p.tokens - tile * tiles.tokens)
        slots += here * slot_bytes(p)
    weight = p.d_in * p.d_out * p.dtype.itemsize
    out = tokens * p.d_out * p.out_dtype.itemsize
    once = column_tiles * depth_tiles == 1
    return Traffic(
        x=tokens * p.d_in * p.dtype.itemsize,
        base={"product": weight * (1 if once else live), "given": out, "none": 0}[p.base],
        slots=slots,
        routing=4 * (tokens * p.slots + len(p.slices) * p.rank * p.slots)
        + 4 * (p.blocks * (p.slots + 1)),
        out=out,
    )


def floor(problem: Problem, active: int, adapted_tokens: int | None = None) -> int:
    """Fewest bytes for a call in which `active` slots are used: every operand once.

    Args:
        problem: Shapes and dtypes.
        active: Distinct slots that some token uses.
        adapted_tokens: Tokens that `add_lora` must touch, T if left out.
    """
    p = problem
    tokens = p.tokens if adapted_tokens is None else adapted_tokens
    out = tokens * p.d_out * p.out_dtype.itemsize
    weight = p.d_in * p.d_out * p.dtype.itemsize
    base = {"product": weight, "given": out, "none": 0}[p.base]
    return tokens * p.d_in * p.dtype.itemsize + base + active * slot_bytes(p) + out
