"""Tile sizes of the TPU kernel: an explicit rule from shapes and VMEM, and a file of overrides.

`choose_tiles` walks the candidates from large to small and takes the first that fits; so a case too
large for one generation's VMEM falls to smaller tiles instead of failing to compile.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources

import numpy as np

from lorajax.kernels_pallas.tpu.problem import LANES, Problem, tile_height

MIB = 2**20


@dataclass(frozen=True)
class Chip:
    """What the rule needs to know about a TPU.

    Attributes:
        name: "v4", "v5e", "v5p", "v6e", "tpu7x", or "portable": what all of them can run.
        vmem: Bytes of vector memory that the compiler may use.
        tokens: Most tokens of a tile: enough for a byte of the base weight to be used as often as
            the matrix unit needs it (peak FLOP/s over bytes/s is 574 on v6e, 230 to 310 elsewhere).
    """

    name: str
    vmem: int
    tokens: int = 512


#: By JAX's `device_kind`: VMEM less a sixteenth. `PORTABLE` serves a lowering on a machine without
#: a TPU that names none (see `launch.current_chip`).
CHIPS = {
    "TPU v4": Chip("v4", 15 * MIB),
    "TPU v5 lite": Chip("v5e", 120 * MIB),
    "TPU v5e": Chip("v5e", 120 * MIB),
    "TPU v5": Chip("v5p", 60 * MIB),
    "TPU v5p": Chip("v5p", 60 * MIB),
    "TPU v6 lite": Chip("v6e", 120 * MIB, 1024),
    "TPU v6e": Chip("v6e", 120 * MIB, 1024),
    "TPU7x": Chip("tpu7x", 60 * MIB),
}
PORTABLE = Chip("portable", 15 * MIB)

#: Share of VMEM that the counted arrays may fill: spills and conversions need the rest.
_FILL = 0.875
_MAX_COLUMNS = 4096
_MIN_COLUMNS = 512
_SUM_BYTES = 4 * MIB
_BASE_BYTES = 4 * MIB
_SHRINK_BYTES = 2 * MIB


@dataclass(frozen=True)
class Tiles:
    """Sizes of one kernel.

    Attributes:
        tokens: Rows of a token tile: a whole number of routing blocks, or a part of one.
        columns: Columns of an output tile; divides d_out.
        depth: Rows of a tile of the base weight; divides d_in.
        shrink: Features of A that one copy brings; divides d_in.
        shrink_ring: Buffers for packs of A.
        expand_ring: Buffers for packs of B.
    """

    tokens: int
    columns: int
    depth: int
    shrink: int
    shrink_ring: int
    expand_ring: int

    def rows(self, problem: Problem) -> int:
        """Tokens that one unit covers: a routing block, or the part of it in this tile."""
        return min(self.tokens, problem.block)

    def sub_blocks(self, problem: Problem) -> int:
        """Routing blocks in a token tile."""
        return max(1, self.tokens // problem.block)

    def units(self, problem: Problem) -> int:
        """Packs of a token tile in which every slot is active."""
        return self.sub_blocks(problem) * problem.max_packs

    def grid(self, problem: Problem) -> tuple[int, int, int]:
        """Token tiles, column tiles, depth tiles."""
        depth = problem.d_in // self.depth if problem.base == "product" else 1
        return -(-problem.tokens // self.tokens), problem.d_out // self.columns, depth


def choose_tiles(problem: Problem, chip: Chip, overrides: list[dict] | None = None) -> Tiles | None:
    """The tiles for a problem, or None if even the smallest do not fit in VMEM.

    Args:
        problem: Shapes and dtypes.
        chip: The TPU.
        overrides: Entries of the form of tiles.json, by default that file's. An entry is taken
            if its `match` agrees with the problem; its `tiles` replace those of the first
            candidate.
    """
    for entry in OVERRIDES if overrides is None else overrides:
        match = {"chip": chip.name} | entry["match"]
        fields = {"chip": chip.name} | vars(problem)
        if all(_plain(fields[key]) == value for key, value in match.items()):
            return replace(next(candidates(problem, chip.tokens)), **entry["tiles"])
    room = _FILL * chip.vmem
    fitting = (t for t in candidates(problem, chip.tokens) if vmem_bytes(problem, t) <= room)
    return next(fitting, None)


def candidates(problem: Problem, max_tokens: int) -> Iterator[Tiles]:
    """Tiles from the most to the least wanted, of at most `max_tokens` tokens or one block.

    Many tokens a tile come first, since each token tile reads the base weight anew; then wide
    tiles, since a column tile restarts the expand; depth is what is left of about 4 MiB, a copy
    long enough to hide a step's overhead.
    """
    p = problem
    size = p.dtype.itemsize
    for tokens in _token_tiles(p, max_tokens):
        for scale in (1, 2, 4, 8, 16, 32):
            cap = min(_MAX_COLUMNS, _SUM_BYTES // (4 * tokens)) // scale
            columns = _columns(p, max(LANES, cap))
            depth = _divisor(p.d_in, max(LANES, _BASE_BYTES // scale // (columns * size)))
            row = LANES * size * len(p.slices)
            shrink = _divisor(p.d_in, max(LANES, _SHRINK_BYTES // scale // row))
            yield Tiles(tokens, columns, depth, shrink, 2, 2 if scale > 1 else 3)


def _token_tiles(problem: Problem, max_tokens: int) -> list[int]:
    """Token tiles from large to small: blocks together, one block, parts of a block."""
    block, blocks = problem.block, problem.blocks
    together = [m * block for m in (8, 4, 2) if m * block <= max_tokens and m < 2 * blocks]
    parts, height = [], tile_height(problem.dtype)
    part = block
    while part % (2 * height) == 0:
        part //= 2
        parts.append(part)
    return [*(together if blocks > 1 else []), block, *parts]


def _columns(problem: Problem, cap: int) -> int:
    """Columns of a tile: such that none lies across two slices, if that leaves them wide enough.

    A tile across slices needs each slice's h and a mask.
    """
    inside = _divisor(math.gcd(*problem.slices), cap)
    return inside if inside >= min(cap, _MIN_COLUMNS) else _divisor(problem.d_out, cap)


def _divisor(size: int, cap: int) -> int:
    """The largest divisor of size that is a multiple of 128 up to cap; size itself if none is."""
    found = [] if size % LANES else [d for d in range(LANES, cap + 1, LANES) if size % d == 0]
    return found[-1] if found else size


def vmem_bytes(problem: Problem, tiles: Tiles) -> int:
    """Bytes of VMEM that a kernel needs: pipelined blocks twice, scratch once, products once."""
    p, t = problem, tiles
    G, rows, units = len(p.slices), t.rows(p), t.units(p)
    f32 = np.dtype(np.float32)
    single = t.grid(p)[0] == 1
    blocks = (1 if single else 2) * (
        _padded((t.tokens, p.d_in), p.dtype) + _padded((t.tokens, p.slots), f32)
    )
    blocks += 2 * _padded((t.tokens, t.columns), p.out_dtype)
    if p.base == "product":
        blocks += 2 * _padded((t.depth, t.columns), p.dtype)
    if p.base == "given":
        blocks += 2 * _padded((t.tokens, t.columns), p.out_dtype)
    scratch = (
        _padded((t.tokens, t.columns), f32)
        + units * G * _padded((rows, LANES), p.dtype)
        + t.shrink_ring * G * _padded((LANES, t.shrink), p.slot_dtype)
        + t.expand_ring * _padded((LANES, t.columns), p.slot_dtype)
        + G * _padded((p.rank, p.slots), f32)
        + G * _padded((rows, LANES), f32)
    )
    products = _padded((t.tokens, t.columns), f32)
    if p.slot_dtype != p.dtype:
        products += _padded((LANES, max(t.shrink, t.columns)), p.dtype)
    return blocks + scratch + products


def _padded(shape: tuple[int, int], dtype: np.dtype) -> int:
    """Bytes of a two-dimensional VMEM array, whose tiles are full."""
    height = tile_height(dtype)
    rows = -(-shape[0] // height) * height
    return rows * (-(-shape[1] // LANES) * LANES) * dtype.itemsize


def _plain(value: object) -> object:
    """A field of Problem as JSON has it."""
    if isinstance(value, tuple):
        return list(value)
    return value.name if isinstance(value, np.dtype) else value


#: Entries of tiles.json, tiles that measured better than the rule's.
OVERRIDES: list[dict] = json.loads(
    resources.files("lorajax.kernels_pallas.tpu").joinpath("tiles.json").read_text()
)
