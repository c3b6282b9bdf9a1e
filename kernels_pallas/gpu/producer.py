"""The producer warpgroup: copies every operand into the ring of stages, by TMA."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lorajax.kernels_pallas.gpu import cluster, packing, schedule, sync
from lorajax.kernels_pallas.gpu.plan import TILE, Plan
from lorajax.kernels_pallas.gpu.refs import (
    BASE,
    CONSUMERS,
    EXPAND,
    SHRINK,
    Refs,
    each_tile,
    h_done,
    h_row,
    leave,
    rank_rows,
)
from lorajax.kernels_pallas.gpu.schedule import Scalar

START = 2  #: Stages of a tile that are asked for before anything is read about adapters.


def produce(plan: Plan, r: Refs, sm: Scalar) -> None:
    """Copies every operand of this SM, in the order in which the consumers take them."""

    def shrinks():
        packed = packing.pack(plan, r.most[0])

        def shrink(i, stage):
            return feed_shrink(plan, r, packed, packing.job(plan, packed, sm, i), stage)

        return lax.fori_loop(0, packing.own_jobs(plan, packed, sm), shrink, jnp.int32(0))

    stage = lax.cond(sm < plan.shrinkers, shrinks, lambda: jnp.int32(0))
    tiles = schedule.pieces(plan, sm)
    _, _, low, high = schedule.piece(plan, sm, 0)
    begun = jnp.where(tiles > 0, jnp.minimum(high - low, START), 0)
    stage = feed_base(plan, r, sm, 0, low, low + begun, stage)
    # Read here: sooner it would delay the copies, later it queues behind those of a full ring.
    packed = packing.pack(plan, r.most[0])

    def tile(i, active, stage):
        return feed_tile(plan, r, packed, sm, i, active, jnp.where(i == 0, begun, 0), stage)

    each_tile(plan, r, packed, sm, stage, tile)
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


def feed_shrink(plan, r, packed, job, stage):
    """Copies one part of one tile of A xᵀ. Rows past the last active slot read as zero."""
    _, part, block, group, pack = packing.place(plan, packed, job)
    active = r.count[block]
    used = packing.used(plan, packed, active, pack)
    low, high = packing.part_steps(plan, packed, part)
    found = rank_rows(plan, r, packed, block, active, pack * TILE, TILE // plan.piece)
    rows = [
        jnp.where(there, packing.row_of_a(plan, r.layer[0], slot, group, row), r.A.shape[0])
        for slot, row, there in found
    ]

    def step(k, stage):
        slot = claim(plan, r, stage)
        copy_tokens(plan, r.x, block * plan.block, k, r, slot, SHRINK)
        columns = pl.ds(k * plan.depth, plan.depth)
        copy_pieces(plan, r.A, rows, columns, r.ring[1].at[slot], r.full[SHRINK].at[slot])
        return stage + 1

    return lax.fori_loop(low, jnp.where(used, high, low), step, stage)


def feed_base(plan, r, sm, index, first, end, stage):
    """Copies some steps of the base product of one of this SM's tiles."""
    block, column = schedule.place(plan, schedule.piece(plan, sm, index)[0])

    def step(k, stage):
        slot = claim(plan, r, stage)
        copy_tokens(plan, r.x, block * plan.block, k, r, slot, BASE)
        rows = pl.ds(r.base_layer[0] * plan.d_in + k * plan.depth, plan.depth)
        source = r.w.at[rows, pl.ds(column * plan.width, plan.width)]
        plgpu.copy_gmem_to_smem(source, r.ring[0].at[slot], r.full[BASE].at[slot])
        return stage + 1

    return lax.fori_loop(first, end, step, stage) if plan.has_base else stage


def feed_tile(plan, r, packed, sm, index, active, begun, stage):
    """Copies the operands of this SM's piece of one output tile, those of the expand last."""
    tile, part, low, high = schedule.piece(plan, sm, index)
    block, column = schedule.place(plan, tile)
    g = schedule.slice_of(plan, column)
    group = jnp.where(packed.joined, 0, g)
    done = h_done(plan, r, block, group)
    need = CONSUMERS * packed.parts * packing.fill(plan, packed.joined, active, TILE)

    def pieces(i):
        """(slot, row in the slot, is there one) of this part's i-th stage of the expand."""
        first = (part + i * plan.split) * plan.depth
        return rank_rows(plan, r, packed, block, active, first, plan.depth // plan.piece)

    def slots_of(i):
        return [slot for slot, _, _ in pieces(i)]

    def row_of_b(slot, row, there):
        row, mine = packing.row_of_b(plan, packed, r.layer[0], slot, g, row)
        return jnp.where(there & mine, row, r.B.shape[0])  # outside B, where it reads as zero

    def expand(i, state):
        stage, slots = state
        slot = claim(plan, r, stage)
        rows = [row_of_b(s, *at) for s, (_, *at) in zip(slots, pieces(i), strict=True)]
        columns = pl.ds(column * plan.width, plan.width)
        copy_pieces(plan, r.B, rows, columns, r.ring[0].at[slot], r.full[EXPAND].at[slot])

        @pl.when(i == 0)  # B does not depend on h: its copies are under way by now
        def _():
            sync.wait_for_copies(done, need, seen)

        k = part + i * plan.split
        copy_tokens(plan, r.h, h_row(plan, block, group), k, r, slot, EXPAND)
        return stage + 1, slots_of(i + 1)

    slots = slots_of(0)
    middle = jnp.maximum(high - plan.stages, low + begun)
    stage = feed_base(plan, r, sm, index, low + begun, middle, stage)
    seen = sync.look(done)
    stage = feed_base(plan, r, sm, index, middle, high, stage)
    extra = packing.expand_stages(plan, packed, active, part)
    return lax.fori_loop(0, extra, expand, (stage, slots))[0]


def copy_tokens(plan, source, row, k, r, slot, kind):
    """Copies the token side of a stage. Rows past T read as zero."""
    source = source.at[pl.ds(row, plan.columns), pl.ds(k * plan.depth, plan.depth)]
    plgpu.copy_gmem_to_smem(source, r.tokens[0].at[slot], r.full[kind].at[slot])


def copy_pieces(plan, source, rows, columns, target, full):
    """Copies pieces of rank rows into a stage."""
    for j, row in enumerate(rows):
        to = target.at[pl.ds(j * plan.piece, plan.piece)]
        plgpu.copy_gmem_to_smem(source.at[pl.ds(row, plan.piece), columns], to, full)
