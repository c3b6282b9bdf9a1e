"""How the rank rows of active slots lie side by side, and which SM multiplies which by x.

The rows of A of the active slots are cut into shrink tiles of 128. The tiles of different slices
are apart, unless the rows of all slices fit into one: then every slot brings those of all, and the
expand has zeros in the place of other slices' B. A tile may be cut along K into parts; a job is one
part of one tile. Jobs go to the SMs with fewest output tiles first, as many as one part of an
output tile is long, and then to everyone who shrinks in turn.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp

from lorajax.kernels_pallas.gpu.plan import TILE, Plan
from lorajax.kernels_pallas.gpu.schedule import Scalar, dealt, div


class Packing(NamedTuple):
    """What is active, as all SMs see it.

    Attributes:
        most: The most slots that a block of tokens has active.
        joined: The rows of all slices of a slot lie side by side, and not apart.
        tiles: Shrink tiles of all blocks of tokens. Some are idle where blocks differ.
        parts: Along K of each tile.
    """

    most: Scalar
    joined: Scalar
    tiles: Scalar
    parts: Scalar


def pack(plan: Plan, most: Scalar) -> Packing:
    """The packing where no block of tokens has more than `most` active slots."""
    joined = jnp.int32(most) * plan.slot_rows <= TILE
    groups = jnp.where(joined, 1, plan.num_slices)
    tiles = fill(plan, joined, most, TILE) * groups * plan.blocks
    return Packing(most, joined, tiles, _parts(plan, tiles))


def fill(plan: Plan, joined: Scalar, active: Scalar, size: int) -> Scalar:
    """Tiles of `size` rank rows that `active` slots fill."""
    rows = jnp.where(joined, plan.slot_rows, plan.rank)
    return div(active * rows + size - 1, size)


def used(plan: Plan, packing: Packing, active: Scalar, pack: Scalar) -> Scalar:
    """Whether a pack of 128 rank rows has some of a block with `active` slots."""
    return pack < fill(plan, packing.joined, active, TILE)


def _parts(plan: Plan, tiles: Scalar) -> Scalar:
    """Parts of each of `tiles` shrink tiles.

    As long as they suffice, SMs without an output tile take one part each: h is there soonest, and
    no tile waits for an SM that waits for other parts. With several blocks of tokens time is long,
    and tiles stay whole.
    """
    if plan.blocks > 1:
        return jnp.int32(1)
    tiles = jnp.maximum(tiles, 1)
    apart = tiles <= plan.free_sms
    count = div(jnp.where(apart, plan.free_sms, plan.most_jobs), tiles)
    count = jnp.clip(count, 1, plan.max_parts)
    if plan.columns <= 64:
        return count
    # The parts share the groups of tokens to add up: as many for each, and few sums to read.
    return functools.reduce(lambda n, two: jnp.where(count >= two, two, n), (2, 4, 8, 16), 1)


def own_jobs(plan: Plan, packing: Packing, sm: Scalar) -> Scalar:
    """The number of shrink jobs of an SM."""
    jobs, first = packing.tiles * packing.parts, plan.free_sms * _turns(plan, packing)
    early = dealt(jnp.minimum(jobs, first), sm, max(plan.free_sms, 1))
    late = dealt(jnp.maximum(jobs - first, 0), sm, plan.shrinkers)
    early = jnp.where(sm < plan.free_sms, early, 0)
    return jnp.where(sm < plan.shrinkers, early + late, 0)


def job(plan: Plan, packing: Packing, sm: Scalar, index: Scalar) -> Scalar:
    """An SM's `index`-th shrink job."""
    turns = _turns(plan, packing)
    early = jnp.where(sm < plan.free_sms, turns, 0)
    late = plan.free_sms * turns + sm + (index - early) * plan.shrinkers
    return jnp.where(index < early, sm + index * plan.free_sms, late)


def _turns(plan: Plan, packing: Packing) -> Scalar:
    """Jobs of each SM with fewest tiles before others have one: as long as a part of a tile."""
    return jnp.maximum(div(packing.parts, plan.split), 1)


def place(plan: Plan, packing: Packing, job: Scalar) -> tuple[Scalar, ...]:
    """(tile, part, block of tokens, group of slices, pack of 128 rank rows) of a shrink job."""
    tile = div(job, packing.parts)
    rest = div(tile, plan.blocks)
    pack = jnp.where(packing.joined, rest, div(rest, plan.num_slices))
    group = jnp.where(packing.joined, 0, rest - pack * plan.num_slices)
    return tile, job - tile * packing.parts, tile - rest * plan.blocks, group, pack


def part_steps(plan: Plan, packing: Packing, part: Scalar) -> tuple[Scalar, Scalar]:
    """(first, end) step of K of one part."""
    low, high = (div((part + i) * plan.steps, packing.parts) for i in range(2))
    return low, high


def expand_stages(plan: Plan, packing: Packing, active: Scalar, part: Scalar) -> Scalar:
    """How many stages of the expand are dealt to one part of an output tile, in turn."""
    return dealt(fill(plan, packing.joined, active, plan.depth), part, plan.split)


def piece(plan: Plan, packing: Packing, row: Scalar) -> tuple[Scalar, Scalar]:
    """(index into the active list, which of the slot's rows) of a packed rank row."""
    together, apart = div(row, plan.slot_rows), div(row, plan.rank)
    index = jnp.where(packing.joined, together, apart)
    return index, row - jnp.where(packing.joined, together * plan.slot_rows, apart * plan.rank)


def row_of_a(plan: Plan, layer: Scalar, slot: Scalar, group: Scalar, row: Scalar) -> Scalar:
    """Where a row of a slot and group of slices is in A, `[L S G R, d_in]`, and in scale."""
    return ((layer * plan.slots + slot) * plan.num_slices + group) * plan.rank + row


def row_of_b(
    plan: Plan, packing: Packing, layer: Scalar, slot: Scalar, g: Scalar, row: Scalar
) -> tuple[Scalar, Scalar]:
    """(where a row of a slot is in B, `[L S R, d_out]`; whether it is a row of slice g)."""
    of = div(row, plan.rank)
    mine = ~packing.joined | (of == g)
    return row + (layer * plan.slots + slot - of) * plan.rank, mine
