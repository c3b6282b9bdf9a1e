"""What the kernel body works on: references, counters, and what both kinds of warpgroup derive."""

from dataclasses import dataclass, fields

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lorajax.kernels_pallas.gpu import schedule, sync
from lorajax.kernels_pallas.gpu.plan import HALF, TILE, Plan
from lorajax.kernels_pallas.gpu.schedule import Ref, Scalar

CONSUMERS = 2
WGMMA = plgpu.Layout.WGMMA


@dataclass(frozen=True)
class Refs:
    """References of one launch; shapes are those of `launch.py`."""

    layer: Ref  # i32[1], of the slots
    base_layer: Ref  # i32[1], of w
    counters: Ref  # i32, zeros between launches; see `Counters`
    count: Ref  # i32[P]
    active: Ref  # i32[P, S]
    mask: Ref  # f32[S, T rounded up]
    scale: Ref  # f32[L S G R]
    x: Ref  # [T, d_in]
    w: Ref  # [L d_in, d_out]
    A: Ref  # [L S G R, d_in]
    B: Ref  # [L S R, d_out]
    y: Ref  # [T, d_out]
    h: Ref  # [P G columns, packed rank rows]
    h_part: Ref  # f32[SMs, 2, 64, columns], sums of parts of shrink tiles
    ring: Ref  # [0]: stages of a tile of w or B [depth, 128]; [1]: of A [128, depth]
    tokens: Ref  # [0]: stages of [columns, depth]; [1], after them: the inbox of other parts' sums
    inbox_full: Ref  # i32[2, 2], a barrier for the inbox of each consumer
    out: Ref  # [2, tokens, 64], one staging tile for each consumer; [0]: of y, [1]: of h
    scales: Ref  # f32, the scale of the packed rows, see `scale_offset`
    full: tuple[Ref, ...]  # barriers of base, shrink and expand stages
    empty: Ref
    scales_full: Ref
    scales_empty: Ref


BASE, SHRINK, EXPAND = range(3)

#: The fields of `Refs` that are operands and outputs, in order.
ARRAYS = tuple(field.name for field in fields(Refs))[:14]


def scale_stride(plan: Plan) -> int:
    """Floats that one copy of scales brings: at least 128 bytes, the least that TMA is given."""
    return max(plan.piece, 32)


def scale_floats(plan: Plan) -> int:
    """Size of the buffer of scales: a row of 64 may be read from any piece, shifted back by it."""
    return (TILE // plan.piece) * scale_stride(plan) + 2 * HALF


def arrivals(plan: Plan) -> tuple[int, int, int]:
    """Copies of one stage of base, shrink and expand."""
    return 2, 1 + TILE // plan.piece, 1 + plan.depth // plan.piece


def counter_sizes(plan: Plan) -> tuple[int, ...]:
    """Counters: warpgroups that left and blocks that entered, finished parts of h, finished h."""
    shrink_tiles = plan.num_slices * plan.max_packs if plan.parts is None else 0
    return 2, CONSUMERS * shrink_tiles, plan.blocks * plan.num_slices


def h_parts(plan: Plan, r: Refs, tile: Scalar, wg: Scalar) -> Ref:
    """Parts of this half of a shrink tile that are in `h_part`."""
    return r.counters.at[2 + tile * CONSUMERS + wg]


def h_done(plan: Plan, r: Refs, block: Scalar, g: Scalar) -> Ref:
    """Contributions to h of one block and slice that are done."""
    sizes = counter_sizes(plan)
    return r.counters.at[sizes[0] + sizes[1] + block * plan.num_slices + g]


def enter(plan: Plan, r: Refs) -> None:
    """Says that this block has begun."""
    sync.enter(r.counters.at[1], plan.sms)


def leave(plan: Plan, r: Refs) -> None:
    """Says that this warpgroup will not wait for h again."""
    sync.leave(r.counters.at[0], 3 * plan.sms, sum(counter_sizes(plan)) - 1)


def rank_rows(plan: Plan, r: Refs, block: Scalar, first: Scalar, pieces: int):
    """(slot, row in the slot) of consecutive pieces of packed rank rows."""
    active = r.count[block]
    found = []
    for j in range(pieces):
        index, row = schedule.piece_slot(plan, first + j * plan.piece, active)
        found.append((r.active[block, index], row))
    return found


def expand_steps(plan, r, block, part):
    """Stages of the expand: all on one part of a tile, none for a block of base rows."""
    return jnp.where(part == 0, schedule.packs_of(plan, r.count[block], plan.depth), 0)
