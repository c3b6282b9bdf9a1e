"""Reads the static schedule that libtpu writes: how many bundles each part of a kernel issues.

A bundle is one instruction word of the TPU's core, one cycle if nothing stalls. The dump of a
program (`--xla_jf_dump_to`, `--xla_jf_dump_llo_text`) lists its bundles with the depth of the loop
they stand in, but not how often a loop runs; `kernel_bundles` adds that for this project's kernel.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

#: Slots in a pack of the report's rank 16.
PACK = 8
_SHADOW = 4
_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*(>*)\s*\{(.*)")


@dataclass
class Block:
    """Bundles in a row, in one loop and without a jump.

    Attributes:
        depth: Loops around it; the grid is the first.
        bundles: Their number.
        pushes: Weights that enter the matrix unit.
        stores: Vector stores.
        starts: Copies from HBM that are started.
        regions: Labels that jumps can aim at, inside or at its start.
        target: Label that the jump at its end aims at, if it ends with one.
        skippable: Some forward jump leads past it.
    """

    depth: int
    bundles: int = 0
    pushes: int = 0
    stores: int = 0
    starts: int = 0
    regions: set[int] = field(default_factory=set)
    target: int | None = None
    skippable: bool = False


@dataclass
class Kernel:
    """What one call issues, in bundles.

    Attributes:
        control: The pipeline of the grid and jumps, at every step.
        base: The base product, and the passes over a finished tile.
        shrink: Products with A, masks included.
        expand: Products with B.
        copies: Starting the copies of slots.
    """

    control: int = 0
    base: int = 0
    shrink: int = 0
    expand: int = 0
    copies: int = 0
    blocks: list[Block] = field(default_factory=list, repr=False)

    @property
    def total(self) -> int:
        """All bundles."""
        return self.control + self.base + self.shrink + self.expand + self.copies


def read_blocks(path: Path) -> list[Block]:
    """The blocks of a `final_bundles` file, in order of address."""
    bundles: list[tuple[str, int, str]] = []
    for line in path.read_text().splitlines():
        found = _BUNDLE.match(line)
        if found:
            bundles.append((found[2] or "", len(found[3]), found[4]))
        elif bundles:
            label, depth, text = bundles[-1]
            bundles[-1] = (label, depth, text + line)
    blocks: list[Block] = []
    shadow = 0
    for label, depth, text in bundles:
        # A jump takes effect after four more bundles, which run in any case.
        shadow -= 1
        if not text.strip(" }") and blocks:
            depth = blocks[-1].depth  # an empty bundle carries no mark
        ended = shadow == 0 if blocks and blocks[-1].target else False
        if not blocks or label or ended or (shadow < 0 and depth != blocks[-1].depth):
            blocks.append(Block(depth))
        block = blocks[-1]
        block.bundles += 1
        block.pushes += text.count("vmatpush")
        block.stores += text.count(" vst ")
        block.starts += len(re.findall(r"dma\.hbm_to_vmem", text))
        block.regions |= {int(n) for n in re.findall(r"region (\d+)", text) if "Start" in text}
        jump = re.search(r"sbr\.rel .*?target = \$region(\d+)", text)
        if jump:
            block.target, shadow = int(jump[1]), 1 + _SHADOW
    mark_skippable(blocks)
    return blocks


def mark_skippable(blocks: list[Block]) -> None:
    """Marks the blocks between a forward jump and its target."""
    for i, block in enumerate(blocks):
        if block.target is None:
            continue
        ahead = (j for j in range(i + 1, len(blocks)) if block.target in blocks[j].regions)
        for j in range(i + 1, next(ahead, i + 1)):
            blocks[j].skippable = True


def kernel_bundles(
    blocks: list[Block], grid: tuple[int, int], *, copies: int, units: int, chunks: int
) -> Kernel:
    """Bundles of one call with one token tile, all of whose packs are full.

    An upper bound: whatever the kernel can skip it does at the first or last step of a column tile,
    so blocks that a jump can skip count once a column tile, though most run once a call.

    Args:
        blocks: From `read_blocks`.
        grid: Column tiles and depth tiles.
        copies: Copies of slots in the whole call.
        units: Packs of active slots; 0 for a kernel without adapters.
        chunks: Copies along d_in that bring a pack of A.
    """
    columns, depth = grid
    steps, result = columns * depth, Kernel(blocks=blocks)
    base = max((i for i, b in enumerate(blocks) if b.depth == 1), key=lambda i: blocks[i].pushes)
    loops = [i for i, b in enumerate(blocks) if b.depth == 2 and b.pushes]
    # A full pack's copies stand in one block, without a loop.
    packs = [b.bundles / b.starts for b in blocks if b.starts >= PACK]
    result.copies = math.ceil(copies * max(packs, default=0))
    for i, block in enumerate(blocks):
        times = columns if block.skippable else steps
        if block.starts >= PACK:
            continue
        if block.depth == 0:
            result.control += block.bundles
        elif i == base:
            result.base += steps * block.bundles
        elif block.depth == 1 and block.stores >= 64:
            result.base += times * block.bundles
        elif block.depth == 1:
            result.control += times * block.bundles
        elif block.depth == 2 and i > base and loops and i <= loops[0]:
            # After the base product comes the shrink's loop, then the expand's.
            result.shrink += units * chunks * block.bundles
        elif block.depth == 2 and i > base and loops and i <= loops[-1] + 1:
            result.expand += units * columns * block.bundles
    return result
