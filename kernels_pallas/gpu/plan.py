"""Static choices for one launch on a Hopper GPU: tiles, pipeline depth, the split of the work."""

import math
from dataclasses import dataclass
from functools import cached_property

from lorajax.kernels_pallas.gpu.tiles import Tile

TILE = 128  #: Rows of A, or columns of y, of one tile: two warpgroups of wgmma's M = 64.
HALF = 64  #: Rows of A of one warpgroup.
WIDE = 256  #: Columns of y of a wide tile.
MAX_BLOCK = 256  #: wgmma's largest N; tokens are the N side.
EPILOGUE = 32  #: Tokens of one step of an epilogue; twice as many where there are most.
OTHER_BYTES = 2048  #: Shared memory that is left for barriers.
GPCS = 8  #: Most GPCs of a GPU: groups of SMs; the blocks of one cluster run in one of them.
MAX_CLUSTER = 8  #: Most blocks of a cluster that every GPU takes.
SHORT_RING = 160 * 1024  #: Most bytes of the stages of an SM where time is short.
GROUP = 8  #: Tokens of four registers of an accumulator: 16 bytes of each thread.


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of a GPU.

    Attributes:
        sms: Streaming multiprocessors; at most one block runs on each.
        shared_bytes: Shared memory that a block may use.
        kind: JAX's name of the device, by which measured tiles are found.
    """

    sms: int
    shared_bytes: int
    kind: str = ""

    def clusters(self, size: int) -> int:
        """Clusters of `size` blocks that run at once, however the SMs are divided into GPCs.

        A GPC has an even number of SMs; those that are left over are fewer than a cluster.
        """
        left_over = size - 1 if size % 2 else size - 2
        return max(0, -((GPCS * left_over - self.sms) // size))


@dataclass(frozen=True)
class Plan:
    """Shapes and tiles of one launch; everything here is known while tracing.

    Attributes:
        device: The GPU.
        tokens: T.
        block: Tokens of a block of the routing.
        d_in: Width of x.
        d_out: Width of y.
        slots: S.
        rank: R.
        slices: Widths of the G slices.
        has_base: The launch also computes x w.
        tile: What was measured to be best, or None: then rules choose depth, stages and split.
    """

    device: Device
    tokens: int
    block: int
    d_in: int
    d_out: int
    slots: int
    rank: int
    slices: tuple[int, ...]
    has_base: bool
    tile: Tile | None = None

    @property
    def blocks(self) -> int:
        """P, blocks of tokens."""
        return -(-self.tokens // self.block)

    @property
    def columns(self) -> int:
        """N of wgmma: the tokens of a block, rounded up to 8."""
        return -(-self.block // 8) * 8

    @property
    def piece(self) -> int:
        """Rows of a slot that one copy brings: the whole slot, or 64 of its rows."""
        return min(self.rank, HALF)

    @property
    def num_slices(self) -> int:
        """G."""
        return len(self.slices)

    @property
    def slot_rows(self) -> int:
        """Rank rows of one slot, of all slices: G R."""
        return self.num_slices * self.rank

    @property
    def depth(self) -> int:
        """Elements of K of one pipeline stage: large copies, but not so large that few fit."""
        if self.tile is not None:
            return self.tile.depth
        return 128 if self.columns <= 64 else 64

    @property
    def steps(self) -> int:
        """Stages of K in x Aᵀ and x w."""
        return self.d_in // self.depth

    @cached_property
    def width(self) -> int:
        """Columns of y of one tile.

        Each tile reads all of x: wide ones halve what an SM takes in besides w. They pay where that
        is much, the accumulator fits, and most SMs still have a tile.
        """
        wide = 64 < self.columns <= 128 and all(n % WIDE == 0 for n in self.slices)
        return WIDE if wide and self.d_out // WIDE >= self.device.sms * 3 // 4 else TILE

    @property
    def half(self) -> int:
        """Columns of y of one warpgroup."""
        return self.width // 2

    @property
    def tiles(self) -> int:
        """Output tiles of all blocks."""
        return self.blocks * (self.d_out // self.width)

    @property
    def max_packs(self) -> int:
        """Packs of 128 rank rows when every slot is active."""
        return -(-self.slots * self.rank // TILE)

    @property
    def h_shape(self) -> tuple[int, int]:
        """Shape of h, the scaled and masked x Aᵀ: row (p G + g) columns + t, column a rank row."""
        return self.blocks * self.num_slices * self.columns, self.max_packs * TILE

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer, and of a consumer, that has the accumulator."""
        return (56, 224) if self.columns <= 128 else (40, 232)

    @property
    def token_bytes(self) -> int:
        """Shared memory of the tokens of one pipeline stage."""
        return self.columns * self.depth * 2

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one pipeline stage: a tile of weights and one of tokens."""
        return self.width * self.depth * 2 + self.token_bytes

    @property
    def staged(self) -> int:
        """Tokens of one step of an epilogue: of one staging tile of y or h."""
        return min(EPILOGUE if self.columns <= 128 else 2 * EPILOGUE, self.columns)

    @property
    def out_buffers(self) -> int:
        """Staging tiles of y of one warpgroup: while one is stored, the next is filled."""
        return 1 if self.columns <= 128 else 2

    @property
    def out_bytes(self) -> int:
        """Shared memory of the staging tiles of y or h of both warpgroups."""
        return 2 * self.out_buffers * self.staged * self.half * (2 if self.has_base else 4)

    @property
    def most_stages(self) -> int:
        """Stages that the shared memory holds."""
        left = self.device.shared_bytes - OTHER_BYTES - self.out_bytes
        return max(0, left // self.stage_bytes)

    @cached_property
    def stages(self) -> int:
        """Stages of the pipeline.

        What all SMs have asked for queues in front of memory, and everything else queues behind it:
        at 4 TB/s the rings of 132 SMs are 5 us of work. A short product has no time for that.
        """
        if self.tile is not None:
            return self.tile.stages
        short = self.columns <= 32 or self.d_in // self.split < 2048
        if not short:
            return self.most_stages
        inbox = -(-self.inbox_bytes // self.token_bytes)
        return min(max(SHORT_RING // self.stage_bytes, inbox), self.most_stages)

    @cached_property
    def split(self) -> int:
        """Parts along K that an output tile is cut into, each for another SM of a cluster.

        Where memory bounds the product, a part of the SMs can take all its bandwidth, and whole
        tiles are best even if they fill the last wave badly. A fifth of the SMs is left over to run
        the shrink: an SM that does both holds up its tile. The split must not depend on the active
        slots, or base rows would be summed in another order when adapters come and go.
        """
        if not self.has_base:
            return 1
        if self.tile is not None:
            return self.tile.split
        most = min(self.device.sms * 4 // 5 // self.tiles, self.d_in // 512, 4)
        fitting = (s for s in range(2, most + 1) if self.tiles <= self.device.clusters(s))
        return max(fitting, default=1)

    @property
    def clusters(self) -> int:
        """Clusters of the grid; a cluster has a block for each part of an output tile."""
        return self.device.clusters(self.split)

    @property
    def sms(self) -> int:
        """Blocks of the grid, all resident at once, each on an SM of its own."""
        return self.clusters * self.split

    @property
    def free_sms(self) -> int:
        """SMs with fewer output tiles than the others: the first ones of the grid."""
        return -self.tiles * self.split % self.sms

    @property
    def shrinkers(self) -> int:
        """The first SMs of the grid; the others never have a shrink job, and need not look."""
        apart = self.blocks == 1 and self.max_packs * self.num_slices <= self.free_sms
        return self.free_sms if apart else self.sms

    @property
    def max_parts(self) -> int:
        """Most parts along K that one shrink tile is cut into."""
        return max(1, min(16, self.d_in // 256))

    @property
    def most_jobs(self) -> int:
        """Jobs that shrink tiles are cut into at most, if they are cut: a few for each SM."""
        return self.shrinkers * (4 if self.columns <= 64 else 2)

    @property
    def h_columns(self) -> int:
        """Tokens of one step of adding up the parts of a shrink tile, which its SMs share out."""
        return 16 if self.columns > 128 and self.columns % 16 == 0 else 8

    @property
    def share(self) -> int:
        """Tokens for which one part of an output tile adds up all of them."""
        return -(-self.columns // GROUP // self.split) * GROUP

    @property
    def shares(self) -> tuple[int, ...]:
        """First token of the share of each part that has one; the last may overlap its neighbour.

        Both then store the same bits: the order in which the parts are added is fixed.
        """
        starts = range(0, self.columns, self.share)
        return tuple(min(t, self.columns - self.share) for t in starts)

    @property
    def inbox_shape(self) -> tuple[int, int, int, int]:
        """Other parts' sums, f32: (consumer, sender, group of tokens, register of a thread)."""
        return 2, self.split - 1, self.share // GROUP, HALF * GROUP

    @property
    def inbox_bytes(self) -> int:
        """Shared memory of the inbox, taken from the tokens' side of the stages."""
        return math.prod(self.inbox_shape) * 4

    def epilogues(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """(start, length) of the steps in which the sums of some tokens are stored."""
        return tuple((t, min(self.staged, tokens - t)) for t in range(0, tokens, self.staged))


def unsupported(plan: Plan) -> str | None:
    """Why the kernel cannot run a plan, or None."""
    if plan.d_in % TILE:
        return f"d_in must be a multiple of {TILE}; got {plan.d_in}"
    if any(width % TILE for width in plan.slices):
        return f"every slice must be a multiple of {TILE} columns; got {plan.slices}"
    if plan.rank % 8 or (HALF % plan.rank and plan.rank % HALF):
        return f"the slot rank must be 8, 16, 32, 64 or a multiple of 64; got {plan.rank}"
    if plan.block > MAX_BLOCK:
        return f"a block must have at most {MAX_BLOCK} tokens; got {plan.block}"
    if plan.blocks > 1 and plan.block % 8:
        return f"a block must be a multiple of 8 tokens where there are several; got {plan.block}"
    if plan.h_shape[0] * plan.h_shape[1] > 1 << 28:
        return f"x Aᵀ of all slots must have at most 2^28 entries; got {plan.h_shape}"
    if not 2 <= plan.stages <= plan.most_stages:
        return (
            f"a block needs 2 stages in {plan.device.shared_bytes} bytes of shared memory; got "
            f"{plan.stages} of at most {plan.most_stages}"
        )
    if plan.inbox_bytes > plan.stages * plan.token_bytes:
        return (
            f"the tokens of all stages must have room for the sums of other parts; got "
            f"{plan.stages} stages of {plan.depth} elements of K for {plan.inbox_bytes} bytes"
        )
    return _unsupported_tile(plan, plan.tile) if plan.tile is not None else None


def _unsupported_tile(plan: Plan, tile: Tile) -> str | None:
    """Why a measured tile cannot serve a plan, or None."""
    if tile.depth not in (64, 128):
        return f"a stage must have 64 or 128 elements of K; got {tile.depth}"
    if tile.split > plan.steps:
        return f"a tile must have no more parts than its {plan.steps} steps; got {tile.split}"
    if tile.split > 1 and (tile.split > MAX_CLUSTER or plan.tiles > plan.clusters):
        return (
            f"the parts of a tile wait for each other in a cluster of at most {MAX_CLUSTER} SMs, "
            f"so all clusters must run at once on the {plan.device.sms} SMs; got {plan.tiles} "
            f"tiles of {tile.split} parts"
        )
    return None
