"""The two consumer warpgroups: multiply what the producer copied, and write h and y."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lorajax.kernels_pallas.gpu import cluster, schedule, sync
from lorajax.kernels_pallas.gpu.compat import load, store
from lorajax.kernels_pallas.gpu.plan import GROUP, HALF, TILE, Plan, epilogues
from lorajax.kernels_pallas.gpu.refs import (
    BASE,
    CONSUMERS,
    EXPAND,
    SHRINK,
    WGMMA,
    Refs,
    expand_steps,
    h_done,
    h_parts,
    leave,
    rank_rows,
    scale_stride,
)
from lorajax.kernels_pallas.gpu.schedule import Scalar

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def consume(plan: Plan, r: Refs, sm: Scalar, wg: Scalar) -> None:
    """Multiplies what the producer copied, and writes h and y."""

    def shrinks():
        mine, count = schedule.own_jobs(plan, r.count[0], sm)

        def shrink(i, stage):
            return run_shrink(plan, r, wg, sm + i * plan.sms, count, stage)

        return lax.fori_loop(0, mine, shrink, jnp.int32(0))

    def tile(i, stage):
        return run_tile(plan, r, sm, wg, i, stage)

    stage = lax.cond(sm < plan.shrinkers, shrinks, lambda: jnp.int32(0))
    leave(plan, r)
    lax.fori_loop(0, schedule.pieces(plan, sm), tile, stage)
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


def run_shrink(plan, r, wg, job, count, stage):
    """One part of a tile of A xᵀ; the last part adds the others, masks, scales and writes h."""
    tile, part, block, g, pack = schedule.shrink_job(plan, job, count)
    used = pack < schedule.packs_of(plan, r.count[block], TILE)
    low, high = schedule.part_steps(plan, part, count)
    steps = jnp.where(used, high - low, 0)

    target = (block * plan.num_slices + g) * plan.columns
    first = pack * TILE + wg * HALF
    rows = rank_rows(plan, r, block, first, HALF // plan.piece)
    finish = functools.partial(write_h, plan, r, wg, block, rows, target, first)

    def scope(acc):
        multiply(plan, r, acc, wg, SHRINK, stage, steps)
        total = acc[...]

        @pl.when(used & (count == 1))
        def _():
            scale = row_scale(plan, r, wg)
            for t, width in epilogues(plan.columns):
                finish(scale, total[:, t : t + width], t, width)

        if plan.parts is None:

            @pl.when(used & (count > 1))
            def _():
                store(r.h_part.at[job, wg], total)

    pl.run_scoped(scope, ACC((HALF, plan.columns), jnp.float32))
    if plan.parts is None:
        pl.when(used & (count > 1))(lambda: add_h(plan, r, wg, tile, part, count, finish))

    @pl.when(used)
    def _():
        plgpu.wait_smem_to_gmem(0)
        sync.signal(h_done(plan, r, block, g))

    return stage + steps


def add_h(plan, r, wg, tile, part, count, finish):
    """Adds up the parts of a shrink tile for this part's share of the tokens."""
    done = h_parts(plan, r, tile, wg)
    sync.signal(done)
    scale = row_scale(plan, r, wg)
    sync.wait(done, count)
    first, width = tile * count, plan.h_columns

    def group(i, _):
        t = (part + i * count) * width
        found = [
            load(r.h_part.at[first + jnp.minimum(j, count - 1), wg, :, pl.ds(t, width)], WGMMA)
            for j in range(plan.max_parts)
        ]
        finish(scale, add_up(found, count), t, width)

    groups = plan.columns // width
    lax.fori_loop(0, schedule.div(groups - part + count - 1, count), group, None)


def add_up(found, count):
    """The sum of the first `count` arrays, always in this order."""
    total = found[0]
    for i, value in enumerate(found[1:], 1):
        total = jnp.where(count > i, total + value, total)
    return total


def write_h(plan, r, wg, block, slots, target, column, scale, value, t, width):
    """Masks, scales and stores hᵀ of 64 rank rows and `width` tokens from t on."""
    rows = plgpu.broadcasted_iota(jnp.int32, (HALF, width), 0, layout=WGMMA)

    def weights(j: int) -> jax.Array:
        vector = load(r.mask.at[slots[j][0], pl.ds(block * plan.block + t, width)], WGMMA.reduce(0))
        used = schedule.div(column + j * plan.piece, plan.rank) < r.count[block]
        return lax.broadcast_in_dim(jnp.where(used, vector, 0.0), (HALF, width), (1,))

    weight = weights(0)
    for j in range(1, len(slots)):
        weight = jnp.where(rows >= j * plan.piece, weights(j), weight)
    spread = lax.broadcast_in_dim(scale, (HALF, width), (0,))
    value = jnp.where(weight != 0.0, value * (spread * weight), 0.0)
    put(r.out[1].at[wg], value.astype(r.h.dtype), r.h, target + t, column, width)


def row_scale(plan, r, wg):
    """The scale of this consumer's 64 packed rows, from pieces that lie `scale_stride` apart."""
    plgpu.barrier_wait(r.scales_full)
    rows = plgpu.broadcasted_iota(jnp.int32, (HALF,), 0, layout=WGMMA.reduce(1))
    scale = None
    pieces = HALF // plan.piece
    for j in range(pieces):
        # Shifted back by its place in the row of 64, so that element i of the load is row i.
        offset = HALF + (wg * pieces + j) * scale_stride(plan) - j * plan.piece
        found = load(r.scales.at[pl.ds(offset, HALF)], WGMMA.reduce(1))
        scale = found if scale is None else jnp.where(rows >= j * plan.piece, found, scale)
    plgpu.barrier_arrive(r.scales_empty)
    return scale


def put(staging, value, target, row, column, width):
    """Stores a [columns, width] tile transposed. Rows past the end of the target are dropped."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staging = staging.at[pl.ds(0, width)]
    transpose(staging)[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, target.at[pl.ds(row, width), pl.ds(column, value.shape[0])])


def run_tile(plan, r, sm, wg, index, stage):
    """This SM's piece of one output tile."""
    tile, part, low, high = schedule.piece(plan, sm, index)
    block, column = schedule.place(plan, tile)
    extra = expand_steps(plan, r, block, part)
    row, target = block * plan.block, column * plan.width + wg * plan.half

    def write(value, t, width):
        put(r.out[0].at[wg], value.astype(r.y.dtype), r.y, row + t, target, width)

    def scope(acc):
        if plan.has_base:
            multiply(plan, r, acc, wg, BASE, stage, high - low)
        multiply(plan, r, acc, wg, EXPAND, stage + high - low, extra)
        if plan.split > 1:
            add_y(plan, r, wg, part, acc[...], write)
            return
        total = acc[...]
        for t, width in epilogues(plan.columns):
            write(total[:, t : t + width], t, width)

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
        for t, width in epilogues(size):
            value = functools.reduce(jnp.add, [sums(j, t, width) for j in range(plan.split)])
            write(value, first + t, width)
