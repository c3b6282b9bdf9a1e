"""The two consumer warpgroups: multiply what the producer copied, and write h and y."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lorajax.kernels_pallas.gpu import cluster, packing, schedule, sync
from lorajax.kernels_pallas.gpu.compat import load, store
from lorajax.kernels_pallas.gpu.gather import gather
from lorajax.kernels_pallas.gpu.plan import GROUP, HALF, TILE, Plan
from lorajax.kernels_pallas.gpu.refs import (
    BASE,
    CONSUMERS,
    EXPAND,
    SHRINK,
    WGMMA,
    Refs,
    each_tile,
    h_done,
    h_parts,
    h_row,
    leave,
    rank_rows,
)
from lorajax.kernels_pallas.gpu.schedule import Scalar

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def consume(plan: Plan, r: Refs, sm: Scalar, wg: Scalar) -> None:
    """Multiplies what the producer copied, and writes h and y."""
    packed = packing.pack(plan, r.most[0])

    def shrinks():
        mine = packing.own_jobs(plan, packed, sm)

        def shrink(i, stage):
            return run_shrink(plan, r, wg, packed, packing.job(plan, packed, sm, i), stage)

        def finish(i, _):
            add_h(plan, r, wg, packed, packing.job(plan, packed, sm, i))

        stage = lax.fori_loop(0, mine, shrink, jnp.int32(0))
        lax.fori_loop(0, jnp.where(packed.parts > 1, mine, 0), finish, None)
        return stage

    def tile(i, active, stage):
        return run_tile(plan, r, packed, sm, wg, i, active, stage)

    stage = lax.cond(sm < plan.shrinkers, shrinks, lambda: jnp.int32(0))
    leave(plan, r)
    each_tile(plan, r, packed, sm, stage, tile)
    plgpu.wait_smem_to_gmem(0)


def multiply(plan, r, acc, wg, kind, stage, steps):
    """Adds `steps` stages to the accumulator; one multiplication is in flight while waiting."""

    def step(i, _):
        slot = schedule.rem(stage + i, plan.stages)
        plgpu.barrier_wait(r.full[kind].at[slot])
        if kind == SHRINK:
            left = r.ring[1].at[slot, pl.ds(wg * HALF, HALF)]
        else:
            left = transpose(r.ring[0].at[slot, :, pl.ds(wg * plan.half, plan.half)])
        sync.fence_registers()
        plgpu.wgmma(acc, left, transpose(r.tokens[0].at[slot]))
        plgpu.wgmma_wait(1)

        @pl.when(i > 0)
        def _():
            plgpu.barrier_arrive(r.empty.at[schedule.rem(stage + i - 1, plan.stages)])

    lax.fori_loop(0, steps, step, None)
    plgpu.wgmma_wait(0)

    @pl.when(steps > 0)
    def _():
        plgpu.barrier_arrive(r.empty.at[schedule.rem(stage + steps - 1, plan.stages)])


def transpose(ref):
    """The transposed view of a matrix in shared memory."""
    return ref.T if hasattr(ref, "T") else plgpu.transpose_ref(ref, (1, 0))


def run_shrink(plan, r, wg, packed, job, stage):
    """One part of a tile of A xᵀ: kept in `h_part`, or written to h where it is the whole tile."""
    tile, part, block, group, pack = packing.place(plan, packed, job)
    used = packing.used(plan, packed, r.count[block], pack)
    low, high = packing.part_steps(plan, packed, part)
    steps = jnp.where(used, high - low, 0)

    def scope(acc):
        multiply(plan, r, acc, wg, SHRINK, stage, steps)
        total = acc[...]

        @pl.when(used & (packed.parts == 1))
        def _():
            write = h_writer(plan, r, wg, packed, block, group, pack)
            for t, width in plan.epilogues(plan.columns):
                write(total[:, t : t + width], t, width)
            finish_h(plan, r, block, group)

        @pl.when(used & (packed.parts > 1))
        def _():
            store(r.h_part.at[job, wg], total)
            sync.signal(h_parts(plan, r, tile, wg))

    pl.run_scoped(scope, ACC((HALF, plan.columns), jnp.float32))
    return stage + steps


def add_h(plan, r, wg, packed, job):
    """Adds up the parts of a shrink tile for this part's share of the tokens, and writes h."""
    tile, part, block, group, pack = packing.place(plan, packed, job)
    count, width = packed.parts, plan.h_columns
    first = tile * count

    @pl.when(packing.used(plan, packed, r.count[block], pack))
    def _():
        write = h_writer(plan, r, wg, packed, block, group, pack)
        sync.wait(h_parts(plan, r, tile, wg), count)

        def add(i, _):
            t = (part + i * count) * width
            found = [
                load(r.h_part.at[first + jnp.minimum(j, count - 1), wg, :, pl.ds(t, width)], WGMMA)
                for j in range(plan.max_parts)
            ]
            write(add_up(found, count), t, width)

        lax.fori_loop(0, schedule.dealt(plan.columns // width, part, count), add, None)
        finish_h(plan, r, block, group)


def finish_h(plan, r, block, group):
    """Says that what this warpgroup writes to h is there."""
    plgpu.wait_smem_to_gmem(0)
    sync.signal(h_done(plan, r, block, group))


def add_up(found, count):
    """The sum of the first `count` arrays, always in this order."""
    total = found[0]
    for i, value in enumerate(found[1:], 1):
        total = jnp.where(count > i, total + value, total)
    return total


def h_writer(plan, r, wg, packed, block, group, pack):
    """A function that masks, scales and stores hᵀ of this consumer's 64 rows and some tokens."""
    first = pack * TILE + wg * HALF
    slots = rank_rows(plan, r, packed, block, r.count[block], first, HALF // plan.piece)
    target = h_row(plan, block, group)

    def by_piece(rows, values):
        """In each row that value which belongs to its piece."""
        found = values[0]
        for j, value in enumerate(values[1:], 1):
            found = jnp.where(rows >= j * plan.piece, value, found)
        return found

    rows = plgpu.broadcasted_iota(jnp.int32, (HALF,), 0, layout=WGMMA.reduce(1))
    starts = [packing.row_of_a(plan, r.layer[0], slot, group, row) for slot, row, _ in slots]
    starts = [start - j * plan.piece for j, start in enumerate(starts)]
    scale = gather(r.scale, rows + by_piece(rows, starts))

    def write(value, t, width):
        def weights(slot, used):
            there = load(r.mask.at[slot, pl.ds(block * plan.block + t, width)], WGMMA.reduce(0))
            there = jnp.where(used, there, 0.0)
            return lax.broadcast_in_dim(there, (HALF, width), (1,))

        rows = plgpu.broadcasted_iota(jnp.int32, (HALF, width), 0, layout=WGMMA)
        weight = by_piece(rows, [weights(slot, used) for slot, _, used in slots])
        spread = lax.broadcast_in_dim(scale, (HALF, width), (0,))
        h = jnp.where(weight != 0.0, value * (spread * weight), 0.0)
        put(r.out[1].at[wg, 0], h.astype(r.h.dtype), r.h, target + t, first, width)

    return write


def put(staging, value, target, row, column, width, in_flight=0):
    """Stores a [columns, width] tile transposed. Rows past the end of the target are dropped.

    `in_flight` is the number of earlier stores that may still read their staging tiles.
    """
    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
    staging = staging.at[pl.ds(0, width)]
    transpose(staging)[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, target.at[pl.ds(row, width), pl.ds(column, value.shape[0])])


def run_tile(plan, r, packed, sm, wg, index, active, stage):
    """This SM's piece of one output tile."""
    tile, part, low, high = schedule.piece(plan, sm, index)
    block, column = schedule.place(plan, tile)
    extra = packing.expand_stages(plan, packed, active, part)
    row, target = block * plan.block, column * plan.width + wg * plan.half

    def write(i, value, t, width):
        """The i-th store of this tile."""
        staging, others = r.out[0].at[wg, i % plan.out_buffers], min(i, plan.out_buffers - 1)
        put(staging, value.astype(r.y.dtype), r.y, row + t, target, width, in_flight=others)

    def scope(acc):
        if plan.has_base:
            multiply(plan, r, acc, wg, BASE, stage, high - low)
        multiply(plan, r, acc, wg, EXPAND, stage + high - low, extra)
        if plan.split > 1:
            add_y(plan, r, wg, part, acc[...], write)
            return
        total = acc[...]
        for i, (t, width) in enumerate(plan.epilogues(plan.columns)):
            write(i, total[:, t : t + width], t, width)

    if plan.split > 1:
        cluster.open_inbox(r.inbox_full.at[wg], plan.inbox_bytes // CONSUMERS)
    pl.run_scoped(scope, ACC((plan.half, plan.columns), jnp.float32))
    return stage + high - low + extra


def add_y(plan, r, wg, part, total, write):
    """Adds up the parts of one output tile for this part's share of the tokens, and stores them."""
    inbox, full, size = r.tokens[1].at[wg], r.inbox_full.at[wg], plan.share
    cluster.meet()  # all have read their stages, whose memory is that of the inboxes
    for other, t in enumerate(plan.shares):

        @pl.when(part != other)
        def _(other=other, t=t):
            to = inbox.at[schedule.seat(part, other)]
            cluster.send(to, full, other, total[:, t : t + size])

    own = total[:, :size]
    for other, t in enumerate(plan.shares[1:], 1):
        own = jnp.where(part == other, total[:, t : t + size], own)

    def sums(other, t, width):
        """The sums of one part for some tokens of the share, its own or from the inbox."""
        seat = jnp.minimum(schedule.seat(other, part), plan.split - 2)  # its own is another's
        found = cluster.receive(inbox.at[seat, pl.ds(t // GROUP, width // GROUP)], width)
        return jnp.where(part == other, own[:, t : t + width], found)

    @pl.when(part < len(plan.shares))
    def _():
        cluster.await_inbox(full)
        first = jnp.minimum(part * size, plan.columns - size)
        for i, (t, width) in enumerate(plan.epilogues(size)):
            value = functools.reduce(jnp.add, [sums(j, t, width) for j in range(plan.split)])
            write(i, value, first + t, width)
