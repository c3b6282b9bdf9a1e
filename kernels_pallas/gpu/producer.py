"""The producer warpgroup: copies every operand into the ring of stages, by TMA."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lorajax.kernels_pallas.gpu import cluster, schedule, sync
from lorajax.kernels_pallas.gpu.plan import HALF, TILE, Plan
from lorajax.kernels_pallas.gpu.refs import (
    BASE,
    CONSUMERS,
    EXPAND,
    SHRINK,
    Refs,
    expand_steps,
    h_done,
    leave,
    rank_rows,
    scale_stride,
)
from lorajax.kernels_pallas.gpu.schedule import Scalar

START = 2  #: Stages of a tile that are asked for before anything is read about adapters.


def produce(plan: Plan, r: Refs, sm: Scalar) -> None:
    """Copies every operand of this SM, in the order in which the consumers take them."""
    layer, base_layer = r.layer[0], r.base_layer[0]

    def shrinks():
        mine, count = schedule.own_jobs(plan, r.count[0], sm)

        def shrink(i, state):
            return feed_shrink(plan, r, layer, sm + i * plan.sms, count, *state)

        return lax.fori_loop(0, mine, shrink, (jnp.int32(0), jnp.int32(0)))[0]

    def tile(i, stage):
        return feed_tile(plan, r, layer, base_layer, sm, i, stage)

    stage = lax.cond(sm < plan.shrinkers, shrinks, lambda: jnp.int32(0))
    tiles = schedule.pieces(plan, sm)
    lax.fori_loop(0, tiles, tile, stage)
    leave(plan, r)
    if plan.split > 1:
        pl.when(tiles > 0)(cluster.meet)


def claim(plan: Plan, r: Refs, stage: Scalar) -> Scalar:
    """Waits until a stage's slot in the ring is free."""
    slot = schedule.rem(stage, plan.stages)

    @pl.when(stage >= plan.stages)
    def _():
        plgpu.barrier_wait(r.empty.at[slot])

    return slot


def feed_shrink(plan, r, layer, job, count, stage, scaled):
    """Copies one part of one tile of A xᵀ, and the scales of its rows."""
    _, part, block, g, pack = schedule.shrink_job(plan, job, count)
    used = pack < schedule.packs_of(plan, r.count[block], TILE)
    low, high = schedule.part_steps(plan, part, count)
    rows = [
        ((layer * plan.slots + slot) * plan.num_slices + g) * plan.rank + row
        for slot, row in rank_rows(plan, r, block, pack * TILE, TILE // plan.piece)
    ]

    @pl.when(used)
    def _():
        pl.when(scaled > 0)(lambda: plgpu.barrier_wait(r.scales_empty))
        size = scale_stride(plan)
        for j, row in enumerate(rows):
            to = r.scales.at[pl.ds(HALF + j * size, size)]
            plgpu.copy_gmem_to_smem(r.scale.at[pl.ds(row, size)], to, r.scales_full)

    def step(k, stage):
        slot = claim(plan, r, stage)
        copy_tokens(plan, r.x, block * plan.block, k, r, slot, SHRINK)
        for j, row in enumerate(rows):
            to = r.ring[1].at[slot, pl.ds(j * plan.piece, plan.piece)]
            source = r.A.at[pl.ds(row, plan.piece), pl.ds(k * plan.depth, plan.depth)]
            plgpu.copy_gmem_to_smem(source, to, r.full[SHRINK].at[slot])
        return stage + 1

    high = jnp.where(used, high, low)
    return lax.fori_loop(low, high, step, stage), scaled + used.astype(jnp.int32)


def feed_tile(plan, r, layer, base_layer, sm, index, stage):
    """Copies this SM's piece of one output tile, for part 0 the operands of the expand too."""
    tile, part, low, high = schedule.piece(plan, sm, index)
    block, column = schedule.place(plan, tile)

    def base(k, stage):
        slot = claim(plan, r, stage)
        copy_tokens(plan, r.x, block * plan.block, k, r, slot, BASE)
        rows = pl.ds(base_layer * plan.d_in + k * plan.depth, plan.depth)
        source = r.w.at[rows, pl.ds(column * plan.width, plan.width)]
        plgpu.copy_gmem_to_smem(source, r.ring[0].at[slot], r.full[BASE].at[slot])
        return stage + 1

    def rows_of(e):
        found = rank_rows(plan, r, block, e * plan.depth, plan.depth // plan.piece)
        return [(layer * plan.slots + slot) * plan.rank + row for slot, row in found]

    def expand(e, state):
        stage, rows = state
        slot = claim(plan, r, stage)
        for j, row in enumerate(rows):
            source = r.B.at[pl.ds(row, plan.piece), pl.ds(column * plan.width, plan.width)]
            to = r.ring[0].at[slot, pl.ds(j * plan.piece, plan.piece)]
            plgpu.copy_gmem_to_smem(source, to, r.full[EXPAND].at[slot])

        @pl.when(e == 0)  # B does not depend on h: its copies are under way by now
        def _():
            sync.wait_for_copies(done, CONSUMERS * count * need, seen)

        row = (block * plan.num_slices + g) * plan.columns
        copy_tokens(plan, r.h, row, e, r, slot, EXPAND)
        return stage + 1, rows_of(e + 1)

    g = schedule.slice_of(plan, column)
    done, seen = h_done(plan, r, block, g), jnp.int32(0)
    first = jnp.minimum(low + START, high)
    if plan.has_base:
        stage = lax.fori_loop(low, first, base, stage)
    # Read here: sooner it would delay the copies, later it queues behind those of a full ring.
    _, count = schedule.own_jobs(plan, r.count[0], sm)
    extra = expand_steps(plan, r, block, part)
    need = schedule.packs_of(plan, r.count[block], TILE)
    rows = rows_of(0)
    if plan.has_base:
        middle = jnp.maximum(high - plan.stages, first)
        stage = lax.fori_loop(first, middle, base, stage)
        seen = sync.look(done)
        stage = lax.fori_loop(middle, high, base, stage)
    stage, _ = lax.fori_loop(0, extra, expand, (stage, rows))
    return stage


def copy_tokens(plan, source, row, k, r, slot, kind):
    """Copies the token side of a stage. Rows past T read as zero."""
    source = source.at[pl.ds(row, plan.columns), pl.ds(k * plan.depth, plan.depth)]
    plgpu.copy_gmem_to_smem(source, r.tokens[0].at[slot], r.full[kind].at[slot])
