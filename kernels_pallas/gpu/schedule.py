"""Who does what: pure index arithmetic, on host integers or traced scalars alike.

A launch has one block of threads on each SM. Every SM first runs its shrink jobs, then its output
tiles. A tile may be cut along K into parts for the SMs of a cluster, which then add up its partial
sums, each for some of the tokens. Jobs go to the first SMs first, tiles to the last: blocks start
in this order, and tiles wait for jobs.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from lorajax.kernels_pallas.gpu.plan import TILE, Plan

Scalar = Any  #: int, or a traced i32 scalar
Ref = Any  #: a reference in the kernel, or a view of one

RASTER = 8  #: Blocks of tokens whose tiles run side by side, so that both operands stay in L2.


def div(a: Scalar, b: Scalar) -> Scalar:
    """A // b for non-negative numbers, without the sign fix-up of `//`."""
    return lax.div(jnp.int32(a), jnp.int32(b))


def rem(a: Scalar, b: Scalar) -> Scalar:
    """A % b for non-negative numbers."""
    return lax.rem(jnp.int32(a), jnp.int32(b))


def pieces(plan: Plan, sm: Scalar) -> Scalar:
    """How many tiles, or parts of tiles, an SM works on."""
    return jobs_of(plan, tile_place(plan, sm), plan.tiles * plan.split)


def piece(plan: Plan, sm: Scalar, index: Scalar) -> tuple[Scalar, ...]:
    """(tile, part, first step, end step) of an SM's `index`-th piece of work.

    The part is the SM's rank in its cluster.
    """
    job = tile_place(plan, sm) + plan.sms * index
    tile = div(job, plan.split)
    part = job - tile * plan.split
    steps = plan.steps if plan.has_base else 0
    low, high = (div((part + i) * steps, plan.split) for i in range(2))
    return tile, part, low, high


def tile_place(plan: Plan, sm: Scalar) -> Scalar:
    """An SM's place among those that take output tiles: the first ones, with fewest, come last."""
    return rem(sm + plan.sms - plan.free_sms, plan.sms)


def jobs_of(plan: Plan, place: Scalar, jobs: Scalar) -> Scalar:
    """How many of `jobs`, dealt out in turn, are those of the SM at a place."""
    return div(jnp.maximum(jobs - place + plan.sms - 1, 0), plan.sms)


def seat(sender: Scalar, receiver: Scalar) -> Scalar:
    """Where a part's sums go in the inbox of another part of the same tile."""
    return sender - jnp.asarray(sender > receiver).astype(jnp.int32)


def place(plan: Plan, tile: Scalar) -> tuple[Scalar, Scalar]:
    """(block of tokens, column tile) of an output tile."""
    if plan.blocks == 1:
        return jnp.int32(0), tile
    across = plan.d_out // plan.width
    group = div(tile, RASTER * across)
    inside = tile - group * (RASTER * across)
    width = jnp.minimum(plan.blocks - group * RASTER, RASTER)
    column = div(inside, width)
    return group * RASTER + inside - column * width, column


def slice_of(plan: Plan, column: Scalar) -> Scalar:
    """The slice g that a column tile lies in."""
    found, end = jnp.int32(0), 0
    for width in plan.slices[:-1]:
        end += width
        found += (column * plan.width >= end).astype(jnp.int32)
    return found


def parts(plan: Plan, packs: Scalar) -> Scalar:
    """Parts along K of each shrink tile.

    A part waits for the others of its tile. So they go to the SMs that have no output tile to wait
    with, unless there are more shrink tiles than such SMs.
    """
    if plan.parts is not None:
        return jnp.int32(plan.parts)
    tiles = jnp.maximum(packs * plan.num_slices, 1)
    sms = jnp.where(tiles <= plan.free_sms, plan.free_sms, plan.sms)
    count = jnp.clip(div(sms, tiles), 1, plan.max_parts)
    if plan.columns <= 64:
        return count
    # The parts share the groups of tokens to add up: as many for each, and few sums to read.
    return functools.reduce(lambda n, two: jnp.where(count >= two, two, n), (2, 4, 8, 16), 1)


def shrink_jobs(plan: Plan, packs: Scalar, count: Scalar) -> Scalar:
    """Number of shrink jobs (tile of x Aᵀ, part of K) of a launch, idle ones included."""
    most = packs if plan.blocks == 1 else plan.max_packs
    return most * plan.num_slices * plan.blocks * count


def own_jobs(plan: Plan, active: Scalar, sm: Scalar) -> tuple[Scalar, Scalar]:
    """(number of shrink jobs of an SM, parts of each shrink tile) when `active` slots are."""
    packs = packs_of(plan, active, TILE)
    count = parts(plan, packs)
    return jobs_of(plan, sm, shrink_jobs(plan, packs, count)), count


def shrink_job(plan: Plan, job: Scalar, count: Scalar) -> tuple[Scalar, ...]:
    """(tile, part, block, slice, pack) of a shrink job."""
    tile = div(job, count)
    rest = div(tile, plan.blocks)
    pack = div(rest, plan.num_slices)
    return (
        tile,
        job - tile * count,
        tile - rest * plan.blocks,
        rest - pack * plan.num_slices,
        pack,
    )


def part_steps(plan: Plan, part: Scalar, count: Scalar) -> tuple[Scalar, Scalar]:
    """(first, end) step of K of one part."""
    return div(part * plan.steps, count), div((part + 1) * plan.steps, count)


def packs_of(plan: Plan, active: Scalar, size: int) -> Scalar:
    """Tiles of `size` rank rows that `active` slots fill."""
    return div(active * plan.rank + size - 1, size)


def piece_slot(plan: Plan, row: Scalar, active: Scalar) -> tuple[Scalar, Scalar]:
    """(index into the active list, row in the slot) of a packed rank row.

    Past the last active slot it repeats that slot: what is multiplied by the zeros of h must be
    finite, and a copy that hits L2 costs less than a branch.
    """
    index = div(row, plan.rank)
    return jnp.clip(index, 0, jnp.maximum(active - 1, 0)), row - index * plan.rank
