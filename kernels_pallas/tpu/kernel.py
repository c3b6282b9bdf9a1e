"""The TPU kernel of all three ops: base tile, shrink at a token tile's first step, expand.

Grid: token tiles, column tiles, depth tiles of the base product; the last runs fastest and all run
in order, on one core. A step of the grid computes one tile of the base product while copies of the
slots are under way. The first step of a token tile also shrinks x with the A of its active slots
into `h`, which stays in VMEM; the last depth step of a column tile adds `h B` to the tile.

Active slots are packed side by side, 128 / R to a pack, by copying their rows of A and B from HBM
into one VMEM tile: a slot that no token of the block uses is never read, and the matrix unit sees
full tiles without a sort of tokens. A unit is one pack of one routing block of the token tile; its
copies run in a ring of buffers ahead of its product.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.tpu.problem import LANES, Problem
from lorajax.kernels_pallas.tpu.stages import Expand, Refs, Shrink, Units, dot
from lorajax.kernels_pallas.tpu.tiles import Tiles
from lorajax.kernels_pallas.weights import LoraWeights

#: Names of the kernel in the HLO, by what the base is.
NAMES = {"product": "lora_linear_tpu", "given": "add_lora_tpu", "none": "lora_delta_tpu"}


# Jitted by itself: a model that unrolls its layers then traces and lowers each shape once.
@functools.partial(jax.jit, static_argnames=("problem", "tiles", "vmem_limit"))
def run_kernel(
    problem: Problem,
    tiles: Tiles,
    x: jax.Array,
    base: jax.Array | None,
    weights: LoraWeights,
    routing: Routing,
    *,
    layer: jax.Array,
    base_layer: jax.Array,
    vmem_limit: int,
) -> jax.Array:
    """Runs the kernel.

    Args:
        problem: What the arrays are.
        tiles: Sizes.
        x: `[T, d_in]`.
        base: w `[L, d_in, d_out]`, y `[T, d_out]`, or None, as `problem.base` says.
        weights: Slots.
        routing: Routing of the step.
        layer: `i32[1]`, the layer of the slots.
        base_layer: `i32[1]`, the layer of w.
        vmem_limit: Bytes of VMEM that the compiler may use.

    Returns:
        `[T, d_out]` in `problem.out_dtype`; y's own memory if `problem.base` is "given".
    """
    order = _order(problem, tiles, routing)
    scalars = (layer, base_layer, routing.active.reshape(-1), routing.count, order)
    # XLA keeps scale with S minor, so that this transpose moves nothing.
    scale = weights.scale.transpose(0, 2, 3, 1)
    inputs = [x, routing.weights.T, scale, *([] if base is None else [base]), weights.A, weights.B]
    aliases = {len(scalars) + 3: 0} if problem.base == "given" else {}
    return pl.pallas_call(
        functools.partial(_body, problem, tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=tiles.grid(problem),
            in_specs=_in_specs(
                problem, tiles, (weights.A.shape[0], 1 if base is None else base.shape[0])
            ),
            out_specs=_tile_spec(problem, tiles),
            scratch_shapes=_scratch(problem, tiles),
        ),
        out_shape=jax.ShapeDtypeStruct((problem.tokens, problem.d_out), problem.out_dtype),
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3,
            vmem_limit_bytes=vmem_limit,
            # Every index is in bounds by construction; a check costs as much as starting a copy.
            disable_bounds_checks=True,
        ),
        name=NAMES[problem.base],
    )(*scalars, *inputs)


def _order(problem: Problem, tiles: Tiles, routing: Routing) -> jax.Array:
    """`i32[I + 1]`: the token tiles in the grid's order, then how many of them to compute.

    With a given base, tiles without active slots are left out, for their y is right already: the
    rest of the grid repeats the last block, which costs no copy.
    """
    count = tiles.grid(problem)[0]
    order = jnp.arange(count, dtype=jnp.int32)
    if problem.base != "given":
        return jnp.append(order, jnp.int32(count))
    block = (order * tiles.tokens // problem.block)[:, None] + jnp.arange(
        tiles.sub_blocks(problem)
    )[None]
    inside = block < problem.blocks
    used = (routing.count[jnp.minimum(block, problem.blocks - 1)] > 0) & inside
    live = used.any(axis=1)
    number = live.sum(dtype=jnp.int32)
    packed = jnp.argsort(~live, stable=True).astype(jnp.int32)
    packed = packed[jnp.minimum(order, jnp.maximum(number - 1, 0))]
    return jnp.append(packed, number)


def _tile_index(problem: Problem, tiles: Tiles):
    """Index map of y and of the output: beyond the live tiles it stays where it was."""
    token_tiles, column_tiles, _ = tiles.grid(problem)

    def index(i, n, k, layer, base_layer, active, count, order):
        del k, layer, base_layer, active, count
        if problem.base != "given":
            return i, n
        return order[i], jnp.where(i < order[token_tiles], n, column_tiles - 1)

    return index


def _tile_spec(problem: Problem, tiles: Tiles) -> pl.BlockSpec:
    return pl.BlockSpec((tiles.tokens, tiles.columns), _tile_index(problem, tiles))


def _in_specs(problem: Problem, tiles: Tiles, layers: tuple[int, int]) -> list[pl.BlockSpec]:
    def tokens(i, n, k, layer, base_layer, active, count, order):
        del n, k, layer, base_layer, active, count
        return order[i], 0

    def weight(i, n, k, layer, base_layer, active, count, order):
        del i, layer, active, count, order
        return jnp.clip(base_layer[0], 0, layers[1] - 1), k, n

    def layer_scale(i, n, k, layer, base_layer, active, count, order):
        del i, n, k, base_layer, active, count, order
        return jnp.clip(layer[0], 0, layers[0] - 1), 0, 0, 0

    G, once = len(problem.slices), pl.Buffered(1)
    lanes = -(-problem.slots // LANES) * LANES
    single = tiles.grid(problem)[0] == 1
    mode = {"pipeline_mode": once} if single else {}
    specs = [
        pl.BlockSpec((tiles.tokens, problem.d_in), tokens, **mode),
        pl.BlockSpec((tiles.tokens, lanes), tokens, **mode),
        pl.BlockSpec((None, G, problem.rank, lanes), layer_scale, pipeline_mode=once),
    ]
    if problem.base == "product":
        specs.append(pl.BlockSpec((None, tiles.depth, tiles.columns), weight))
    if problem.base == "given":
        specs.append(_tile_spec(problem, tiles))
    return [*specs, *[pl.BlockSpec(memory_space=pltpu.HBM)] * 2]


def _scratch(problem: Problem, tiles: Tiles) -> list:
    G, rows, units = len(problem.slices), tiles.rows(problem), tiles.units(problem)
    a, b = tiles.shrink_ring, tiles.expand_ring
    return [
        pltpu.VMEM((tiles.tokens, tiles.columns), jnp.float32),
        pltpu.VMEM((units, G, rows, LANES), problem.dtype),
        pltpu.VMEM((a, G, LANES, tiles.shrink), problem.slot_dtype),
        pltpu.VMEM((b, LANES, tiles.columns), problem.slot_dtype),
        pltpu.VMEM((G, rows, LANES), jnp.float32),
        pltpu.SemaphoreType.DMA((a,)),
        pltpu.SemaphoreType.DMA((b,)),
    ]


def _body(problem: Problem, tiles: Tiles, *refs) -> None:
    """One step of the grid."""
    if problem.base == "none":
        refs = (*refs[:8], None, *refs[8:])
    r = Refs(*refs)
    token_tiles, _, depth_tiles = tiles.grid(problem)
    i, n, k = (pl.program_id(axis) for axis in range(3))
    live = i < r.order[token_tiles]
    units = Units.of(problem, tiles, r, r.order[i])
    shrink, expand = Shrink(units), Expand(units, n)
    some = live & (units.total > 0)
    first = (n == 0) & (k == 0)

    @pl.when((i == 0) & first)
    def _clear():
        expand.clear()
        if problem.base == "given":
            # With no live tile at all this one block is still written back.
            r.out[...] = r.base[...]

    @pl.when(some & (k == 0))
    def _start_expand():
        expand.start()

    @pl.when(some & first)
    def _start_shrink():
        shrink.start()

    _base(problem, tiles, r, k)

    @pl.when(some & first)
    def _shrink():
        shrink.run()

    @pl.when(live & (k == depth_tiles - 1))
    def _finish():
        @pl.when(units.total > 0)
        def _expand():
            expand.run()

        _write(problem, r)


def _base(problem: Problem, tiles: Tiles, r: Refs, k: jax.Array) -> None:
    """Starts the tile's sum with the base product of this depth step, or with zero."""
    if problem.base != "product":
        r.acc[...] = jnp.zeros(r.acc.shape, r.acc.dtype)
        return
    if tiles.depth == problem.d_in:
        r.acc[...] = dot(r.x[...], r.base[...])
        return

    @pl.when(k == 0)
    def _zero():
        r.acc[...] = jnp.zeros(r.acc.shape, r.acc.dtype)

    columns = pl.ds(pl.multiple_of(k * tiles.depth, tiles.depth), tiles.depth)
    r.acc[...] += dot(r.x[:, columns], r.base[...])


def _write(problem: Problem, r: Refs) -> None:
    """Writes the tile. Where there is nothing to add to y its bits stay: y + 0.0 loses -0.0."""
    acc = r.acc[...]
    if problem.base == "given":
        y = r.base[...]
        r.out[...] = jnp.where(acc != 0, (y.astype(jnp.float32) + acc).astype(y.dtype), y)
        return
    r.out[...] = acc.astype(r.out.dtype)
