"""What the kernel body works on: references, counters, and what both kinds of warpgroup derive."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lorajax.kernels_pallas.gpu import packing, schedule, sync
from lorajax.kernels_pallas.gpu.packing import Packing
from lorajax.kernels_pallas.gpu.plan import TILE, Plan
from lorajax.kernels_pallas.gpu.schedule import Ref, Scalar

CONSUMERS = 2
WGMMA = plgpu.Layout.WGMMA


@dataclass(frozen=True)
class Refs:
    """References of one launch; shapes are those of `launch.py`."""

    layer: Ref  # i32[1], of the slots
    base_layer: Ref  # i32[1], of w
    counters: Ref  # i32, zeros between launches; see `counter_sizes`
    most: Ref  # i32[1], the largest of `count`
    count: Ref  # i32[P]
    active: Ref  # i32[P, S]
    mask: Ref  # f32[S, T rounded up]
    scale: Ref  # f32[L S G R]
    x: Ref  # [T, d_in]
    w: Ref  # [L d_in, d_out]
    A: Ref  # [L S G R, d_in]
    B: Ref  # [L S R, d_out]
    y: Ref  # [T, d_out]
    h: Ref  # [P G columns, packed rank rows], see `h_row`
    h_part: Ref  # f32[jobs, 2, 64, columns], sums of parts of shrink tiles
    ring: Ref  # [0]: stages of a tile of w or B [depth, width]; [1]: of A, its first 128 rows
    tokens: Ref  # [0]: stages of [columns, depth]; [1], after them: the inbox of other parts' sums
    inbox_full: Ref  # i32[2, 2], a barrier for the inbox of each consumer
    out: Ref  # [2, buffers, tokens, 64], staging tiles of each consumer; [0]: of y, [1]: of h
    full: tuple[Ref, ...]  # barriers of base, shrink and expand stages
    empty: Ref


BASE, SHRINK, EXPAND = range(3)

#: The fields of `Refs` that are operands and outputs, in order.
ARRAYS = tuple(field.name for field in fields(Refs))[:15]


def arrivals(plan: Plan) -> tuple[int, int, int]:
    """Copies of one stage of base, shrink and expand."""
    return 2, 1 + TILE // plan.piece, 1 + plan.depth // plan.piece


def counter_sizes(plan: Plan) -> tuple[int, ...]:
    """Counters: warpgroups that left and blocks that entered, finished parts of h, finished h."""
    cut = plan.num_slices * plan.max_packs if plan.blocks == 1 else 0  # shrink tiles, see packing
    return 2, CONSUMERS * cut, plan.blocks * plan.num_slices


def h_parts(plan: Plan, r: Refs, tile: Scalar, wg: Scalar) -> Ref:
    """Parts of this half of a shrink tile that are in `h_part`."""
    return r.counters.at[2 + tile * CONSUMERS + wg]


def h_done(plan: Plan, r: Refs, block: Scalar, group: Scalar) -> Ref:
    """Contributions to h of one block and group of slices that are done."""
    sizes = counter_sizes(plan)
    return r.counters.at[sizes[0] + sizes[1] + block * plan.num_slices + group]


def h_row(plan: Plan, block: Scalar, group: Scalar) -> Scalar:
    """The row of h of the first token of a block, for a group of slices."""
    return (block * plan.num_slices + group) * plan.columns


def enter(plan: Plan, r: Refs) -> None:
    """Says that this block has begun."""
    sync.enter(r.counters.at[1], plan.sms)


def leave(plan: Plan, r: Refs) -> None:
    """Says that this warpgroup will not wait for h again."""
    sync.leave(r.counters.at[0], 3 * plan.sms, sum(counter_sizes(plan)) - 1)


def each_tile(
    plan: Plan, r: Refs, packed: Packing, sm: Scalar, stage: Scalar, run: Callable[..., Scalar]
) -> None:
    """Calls `run(index, active slots, stage)` for an SM's output tiles; it returns the next stage.

    What is active is read a tile ahead: behind the copies of a full ring it takes microseconds.
    """

    def active_of(index):
        return packed.most if plan.blocks == 1 else r.count[schedule.block_of(plan, sm, index)]

    def tile(i, state):
        stage, active = state
        following = active_of(i + 1)
        return run(i, active, stage), following

    lax.fori_loop(0, schedule.pieces(plan, sm), tile, (stage, active_of(0)))


def rank_rows(plan, r, packed, block, active, first, pieces):
    """(slot, row in the slot, is there one) of consecutive pieces of packed rank rows."""
    found = []
    for j in range(pieces):
        index, row = packing.piece(plan, packed, first + j * plan.piece)
        slot = r.active[block, jnp.minimum(index, plan.slots - 1)]
        found.append((slot, row, index < active))
    return found
