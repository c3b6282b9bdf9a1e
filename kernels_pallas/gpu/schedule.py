"""Who does which output tile: pure index arithmetic, on host integers or traced scalars alike.

A launch has one block of threads on each SM. Every SM first runs its shrink jobs (`packing.py`),
then its output tiles. A tile may be cut along K into parts for the SMs of a cluster, which then add
up its partial sums, each for some of the tokens. Jobs go to the first SMs first, tiles to the last:
blocks start in this order, and tiles wait for jobs.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from lorajax.kernels_pallas.gpu.plan import Plan

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
    return dealt(plan.tiles * plan.split, tile_place(plan, sm), plan.sms)


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


def dealt(jobs: Scalar, place: Scalar, places: Scalar) -> Scalar:
    """How many of `jobs`, dealt out in turn to some places, fall to one of them."""
    return div(jnp.maximum(jobs - place + places - 1, 0), places)


def seat(sender: Scalar, receiver: Scalar) -> Scalar:
    """Where a part's sums go in the inbox of another part of the same tile."""
    return sender - jnp.asarray(sender > receiver).astype(jnp.int32)


def block_of(plan: Plan, sm: Scalar, index: Scalar) -> Scalar:
    """The block of tokens of an SM's `index`-th piece of work, any block if there is none."""
    return jnp.minimum(place(plan, piece(plan, sm, index)[0])[0], plan.blocks - 1)


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
