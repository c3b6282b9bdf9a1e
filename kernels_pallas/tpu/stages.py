"""The stages of the TPU kernel's body: packs of slots on their way to VMEM, shrink, expand."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lorajax.kernels_pallas.tpu.problem import LANES, Problem
from lorajax.kernels_pallas.tpu.tiles import Tiles

Scalar = jax.Array | int
Rows = pl.Slice | slice


class Refs(NamedTuple):
    """The kernel's memory: prefetched scalars, blocks, arrays left in HBM, scratch.

    Attributes:
        layer: SMEM `i32[1]`, the layer of the slots.
        base_layer: SMEM `i32[1]`, the layer of the base weight.
        active: SMEM `i32[P S]`, active slots of each block, flattened.
        count: SMEM `i32[P]`.
        order: SMEM `i32[I + 1]`, token tiles in the order of the grid, then how many to compute.
        x: VMEM `[tokens, d_in]`.
        weights: VMEM `f32[tokens, S]`, S filled up to whole lanes.
        scale: VMEM `f32[G, R, S]`, the layer's, filled up likewise.
        base: VMEM, w `[depth, columns]`, y `[tokens, columns]`, or None.
        A: HBM `[L, S, G, R, d_in]`.
        B: HBM `[L, S, R, d_out]`.
        out: VMEM `[tokens, columns]`.
        acc: VMEM `f32[tokens, columns]`.
        h: VMEM `[units, G, rows, 128]`, the masked and scaled `x Aᵀ` of a token tile.
        a: VMEM `[ring, G, 128, shrink]`, packs of A.
        b: VMEM `[ring, 128, columns]`, packs of B.
        partial: VMEM `f32[G, rows, 128]`, `x Aᵀ` so far.
        a_sem: One semaphore for each buffer of a.
        b_sem: The same for b.
    """

    layer: Any
    base_layer: Any
    active: Any
    count: Any
    order: Any
    x: Any
    weights: Any
    scale: Any
    base: Any
    A: Any
    B: Any
    out: Any
    acc: Any
    h: Any
    a: Any
    b: Any
    partial: Any
    a_sem: Any
    b_sem: Any


def dot(x: jax.Array, y: jax.Array, *, transposed: bool = False) -> jax.Array:
    """`x y` (or `x yᵀ`) summed in float32; float32 factors are not rounded to bfloat16."""
    return lax.dot_general(
        x,
        y,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


@dataclass(frozen=True)
class Units:
    """The packs that one token tile uses: unit u is pack p of routing block m of the tile."""

    problem: Problem
    tiles: Tiles
    refs: Refs
    first_block: Scalar
    packs: tuple[Scalar, ...]

    @classmethod
    def of(cls, problem: Problem, tiles: Tiles, refs: Refs, tile: Scalar) -> "Units":
        """The units of a token tile."""
        if tiles.tokens >= problem.block:
            first = tile * tiles.sub_blocks(problem)
        else:
            first = lax.div(tile, problem.block // tiles.tokens)
        last, per_pack = problem.blocks - 1, problem.per_pack
        packs = []
        for m in range(tiles.sub_blocks(problem)):
            block = first + m
            count = refs.count[jnp.minimum(block, last)]
            count = jnp.where(block <= last, count, 0)
            packs.append(lax.div(count + (per_pack - 1), per_pack))
        return cls(problem, tiles, refs, first, tuple(packs))

    @property
    def layer(self) -> Scalar:
        """The layer of the slots, kept inside: the compiler's checks of bounds are off."""
        return jnp.clip(self.refs.layer[0], 0, self.refs.A.shape[0] - 1)

    @property
    def total(self) -> Scalar:
        """Units of the tile."""
        return sum(self.packs[1:], start=self.packs[0])

    def locate(self, u: Scalar) -> tuple[Scalar, Scalar]:
        """Routing block m of the tile, and pack p, of unit u."""
        if len(self.packs) == 1:
            return 0, u
        m, p = jnp.int32(0), u
        for j, packs in enumerate(self.packs[:-1]):
            beyond = (m == j) & (p >= packs)
            m, p = jnp.where(beyond, j + 1, m), jnp.where(beyond, p - packs, p)
        return m, p

    def members(self, u: Scalar) -> tuple[Scalar, Scalar]:
        """Where unit u's slots start in `active`, and how many there are."""
        m, p = self.locate(u)
        block, first = self.first_block + m, p * self.problem.per_pack
        count = jnp.minimum(self.refs.count[block] - first, self.problem.per_pack)
        return block * self.problem.slots + first, count

    def each_slot(self, u: Scalar, visit) -> None:
        """Calls `visit(position in the pack, slot)` for the active slots of unit u."""
        start, count = self.members(u)

        def step(i, carry):
            visit(i, self.refs.active[start + i])
            return carry

        lax.fori_loop(0, count, step, 0)

    def start_pack(self, u: Scalar, start_slot) -> None:
        """Starts unit u's copies. A full pack has no loop, so that the scalar work overlaps."""
        first, count = self.members(u)
        full = count == self.problem.per_pack

        @pl.when(full)
        def _whole():
            for i in range(self.problem.per_pack):
                start_slot(i, self.refs.active[first + i])

        @pl.when(~full)
        def _parts():
            self.each_slot(u, start_slot)

    def await_pack(self, u: Scalar, wait_slot, whole: Any) -> None:
        """Waits for unit u's copies: at once if the pack is full, else slot by slot.

        Args:
            u: The unit.
            wait_slot: Called as `each_slot` does.
            whole: A copy as large as all copies of a full pack together, on their semaphore.
        """
        _, count = self.members(u)
        full = (count == self.problem.per_pack) & (LANES % self.problem.rank == 0)

        @pl.when(full)
        def _whole():
            whole.wait()

        @pl.when(~full)
        def _parts():
            self.each_slot(u, wait_slot)

    def slot_rows(self, i: Scalar) -> Rows:
        """Rows of a pack that belong to the slot at position i."""
        rank = self.problem.rank
        start = i * rank if isinstance(i, int) else pl.multiple_of(i * rank, rank)
        return pl.ds(start, rank)

    def token_rows(self, u: Scalar) -> Rows:
        """Rows of the token tile that unit u covers."""
        rows = self.tiles.rows(self.problem)
        m, _ = self.locate(u)
        return pl.ds(m if isinstance(m, int) else pl.multiple_of(m * rows, rows), rows)


@dataclass(frozen=True)
class Shrink:
    """`h = where(W != 0, (x Aᵀ) scale W, 0)` for all units of a token tile, into `refs.h`."""

    units: Units

    @property
    def chunks(self) -> int:
        """Copies along d_in that bring one pack of A."""
        return self.units.problem.d_in // self.units.tiles.shrink

    def _copy(self, v: Scalar, i: Scalar, slot: Scalar) -> Any:
        """The copy of chunk v of a slot at position i of its pack; v counts all units' chunks."""
        units, refs = self.units, self.units.refs
        at = lax.rem(v, units.tiles.shrink_ring)
        source = refs.A.at[units.layer, slot, :, :, self._columns(v)]
        target = refs.a.at[at, :, units.slot_rows(i), :]
        return pltpu.make_async_copy(source, target, refs.a_sem.at[at])

    def _columns(self, v: Scalar) -> Rows:
        """Features of chunk v."""
        width = self.units.tiles.shrink
        if self.chunks == 1:
            return pl.ds(0, width)
        return pl.ds(pl.multiple_of(lax.rem(v, self.chunks) * width, width), width)

    def start(self) -> None:
        """Starts the first copies, so that they run under the base product."""
        for v in range(self.units.tiles.shrink_ring - 1):
            self._start(jnp.int32(v))

    def _start(self, v: Scalar) -> None:
        @pl.when(v < self.units.total * self.chunks)
        def _():
            u = lax.div(v, self.chunks)
            self.units.start_pack(u, lambda i, slot: self._copy(v, i, slot).start())

    def run(self) -> None:
        """Computes h of every unit."""
        units, refs, G = self.units, self.units.refs, len(self.units.problem.slices)
        ring, chunks = units.tiles.shrink_ring, self.chunks

        def step(v, carry):
            self._start(v + (ring - 1))
            u, chunk, at = lax.div(v, chunks), lax.rem(v, chunks), lax.rem(v, ring)
            whole = pltpu.make_async_copy(refs.a.at[at], refs.a.at[at], refs.a_sem.at[at])
            units.await_pack(u, lambda i, slot: self._copy(v, i, slot).wait(), whole)
            factors = self._factors(u)
            x = refs.x[units.token_rows(u), self._columns(v)]
            parts = [dot(x, refs.a[at, g].astype(x.dtype), transposed=True) for g in range(G)]
            if chunks == 1:
                self._finish(u, parts, factors)
                return carry

            @pl.when(chunk == 0)
            def _first():
                for g in range(G):
                    refs.partial[g] = parts[g]

            @pl.when(chunk > 0)
            def _more():
                for g in range(G):
                    refs.partial[g] += parts[g]

            @pl.when(chunk == chunks - 1)
            def _last():
                self._finish(u, [refs.partial[g] for g in range(G)], factors)

            return carry

        lax.fori_loop(0, units.total * chunks, step, 0)

    def _finish(self, u: Scalar, parts: list[jax.Array], factors: list[jax.Array]) -> None:
        """Masks and scales unit u's products.

        Rows and lanes are selected, never multiplied by a zero: a NaN of one slot or one row, or
        what lies in the unused rows of a buffer, must not reach another.
        """
        refs, weights = self.units.refs, factors[0]
        for g, part in enumerate(parts):
            factor = factors[1 + g] * weights
            refs.h[u, g] = jnp.where(weights != 0, part * factor, 0.0).astype(refs.h.dtype)

    def _factors(self, u: Scalar) -> list[jax.Array]:
        """Unit u's W, `f32[rows, 128]`, and for each slice its scale, `f32[1, 128]`."""
        refs, slots = self.units.refs, self._slot_of_lane(u)
        weights = _take_lanes(refs.weights[self.units.token_rows(u), :], slots)
        weights = jnp.where(slots >= 0, weights, 0.0)
        scales = (refs.scale[g] for g in range(len(self.units.problem.slices)))
        return [weights, *(_own_rank(_take_lanes(scale, slots)) for scale in scales)]

    def _slot_of_lane(self, u: Scalar) -> jax.Array:
        """`i32[1, 128]`: the slot that each lane of unit u belongs to, or -1."""
        problem, refs = self.units.problem, self.units.refs
        start, count = self.units.members(u)
        lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        position = lax.div(lane, jnp.int32(problem.rank))
        slot = jnp.full(lane.shape, -1, jnp.int32)
        for i in range(min(problem.per_pack, problem.slots)):
            member = refs.active[start + jnp.minimum(i, count - 1)]
            slot = jnp.where((position == i) & (i < count), member, slot)
        return slot


def _take_lanes(table: jax.Array, slots: jax.Array) -> jax.Array:
    """`table[:, slots]`: `f32[rows, 128]` from `f32[rows, S padded to lanes]` and `i32[1, 128]`."""
    rows = table.shape[0]
    if rows == 1:  # the lowering of a gather knows no row of one
        table = jnp.broadcast_to(table, (8, table.shape[1]))
    slots = jnp.broadcast_to(jnp.maximum(slots, 0), (table.shape[0], LANES))
    lane = lax.bitwise_and(slots, jnp.int32(LANES - 1))

    def gathered(first: int) -> jax.Array:
        part = table[:, first : first + LANES]
        return jnp.take_along_axis(part, lane, axis=1, mode="promise_in_bounds")

    # A gather within one vector register is one instruction; more slots take more registers.
    out = gathered(0)
    for first in range(LANES, table.shape[1], LANES):
        out = jnp.where(slots >= first, gathered(first), out)
    return out[:rows]


def _own_rank(rows: jax.Array) -> jax.Array:
    """`f32[1, 128]` from `f32[R, 128]`: in lane l the row l mod R."""
    lane = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
    own = lax.rem(lane, jnp.int32(rows.shape[0])) == lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.sum(jnp.where(own, rows, 0.0), axis=0, keepdims=True)


@dataclass(frozen=True)
class Expand:
    """`acc += h B` for one column tile, over all units of the token tile."""

    units: Units
    column_tile: Scalar

    def _copy(self, u: Scalar, i: Scalar, slot: Scalar) -> Any:
        """The copy of a slot at position i of unit u."""
        units, refs, width = self.units, self.units.refs, self.units.tiles.columns
        at = lax.rem(u, units.tiles.expand_ring)
        whole = width == units.problem.d_out
        start = 0 if whole else pl.multiple_of(jnp.int32(self.column_tile) * width, width)
        columns = pl.ds(start, width)
        source = refs.B.at[units.layer, slot, :, columns]
        target = refs.b.at[at, units.slot_rows(i), :]
        return pltpu.make_async_copy(source, target, refs.b_sem.at[at])

    def clear(self) -> None:
        """Zeroes the rows that no slot ever fills, where R does not divide 128: see `_clear`."""
        refs, filled = self.units.refs, self.units.problem.per_pack * self.units.problem.rank
        if filled < LANES:
            rest = (refs.b.shape[0], LANES - filled, refs.b.shape[2])
            refs.b[:, filled:, :] = jnp.zeros(rest, refs.b.dtype)

    def _clear(self, u: Scalar) -> None:
        """Zeroes the rows of unit u's absent slots: h is zero there, and B must be finite."""
        units, b = self.units, self.units.refs.b
        at = lax.rem(u, units.tiles.expand_ring)
        _, count = units.members(u)

        def step(i, carry):
            b[at, units.slot_rows(i), :] = jnp.zeros((units.problem.rank, b.shape[2]), b.dtype)
            return carry

        lax.fori_loop(count, units.problem.per_pack, step, 0)

    def start(self) -> None:
        """Starts the first copies, so that they run under the base product."""
        for u in range(self.units.tiles.expand_ring - 1):
            self._start(jnp.int32(u))

    def _start(self, u: Scalar) -> None:
        @pl.when(u < self.units.total)
        def _():
            self.units.start_pack(u, lambda i, slot: self._copy(u, i, slot).start())
            self._clear(u)

    def run(self) -> None:
        """Adds every unit's product."""
        units, refs, ring = self.units, self.units.refs, self.units.tiles.expand_ring

        def step(u, carry):
            self._start(u + (ring - 1))
            at = lax.rem(u, ring)
            whole = pltpu.make_async_copy(refs.b.at[at], refs.b.at[at], refs.b_sem.at[at])
            units.await_pack(u, lambda i, slot: self._copy(u, i, slot).wait(), whole)
            self._add(u, refs.b[at].astype(refs.h.dtype))
            return carry

        lax.fori_loop(0, units.total, step, 0)

    def _add(self, u: Scalar, b: jax.Array) -> None:
        """Adds unit u's product, for every slice of d_out that the column tile touches."""
        refs, rows = self.units.refs, self.units.token_rows(u)
        width, slices = self.units.tiles.columns, self.units.problem.slices
        starts = [sum(slices[:g]) for g in range(len(slices))]
        first = self.column_tile * width
        if all(start % width == 0 for start in starts):
            g = sum((jnp.int32(first >= start) for start in starts[1:]), start=jnp.int32(0))
            refs.acc[rows, :] += dot(refs.h[u, g], b)
            return
        for g, start in enumerate(starts):
            end = start + slices[g]

            @pl.when((first < end) & (first + width > start))
            def _slice(g=g, start=start, end=end):
                product = dot(refs.h[u, g], b)
                column = first + lax.broadcasted_iota(jnp.int32, product.shape, 1)
                own = (column >= start) & (column < end)
                refs.acc[rows, :] += jnp.where(own, product, 0.0)
