"""What is measured: the widths of a model's products, and the cells of a table."""

from dataclasses import dataclass

import numpy as np

BANDWIDTH = 4.25e12  #: Bytes/s that a device-to-device copy reaches on an H200.
RESIDENT = (64, 256)  #: Adapters in the slots, as the peers were measured: the first that suffices.


@dataclass(frozen=True)
class Shapes:
    """Widths of one layer of a Llama, or of one device's share of it.

    Attributes:
        hidden: Width of the residual stream.
        q: Width of the queries.
        kv: Width of the keys, and of the values.
        ffn: Width of gate, and of up.
        head: Width of an attention head, which a mesh does not cut.
    """

    hidden: int
    q: int
    kv: int
    ffn: int
    head: int = 128

    @property
    def modules(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """d_in and the widths of the slices of each product."""
        return {
            "qkv": (self.hidden, (self.q, self.kv, self.kv)),
            "o": (self.q, (self.hidden,)),
            "gate_up": (self.hidden, (self.ffn, self.ffn)),
            "down": (self.ffn, (self.hidden,)),
        }

    @property
    def rank_bytes(self) -> int:
        """Bytes of one rank row of an adapter in one layer."""
        return 2 * sum(d_in * len(slices) + sum(slices) for d_in, slices in self.modules.values())


MODELS = {
    "8B": Shapes(hidden=4096, q=4096, kv=1024, ffn=14336),
    "70B": Shapes(hidden=8192, q=8192, kv=1024, ffn=28672),
    "tiny": Shapes(
        hidden=256, q=256, kv=128, ffn=1024, head=32
    ),  # runs on a CPU; its times say nothing
}


@dataclass(frozen=True)
class Case:
    """One cell: tokens, distinct adapters, and their ranks.

    Attributes:
        tokens: T.
        adapters: D; adapter i has rank `ranks[i % len(ranks)]`.
        ranks: One rank, or several for a mixed batch.
        slot_rank: R.
        ordered: The tokens of an adapter stand side by side, as in prefill.
    """

    tokens: int
    adapters: int
    ranks: tuple[int, ...]
    slot_rank: int
    ordered: bool = False

    @classmethod
    def of(cls, tokens: int, adapters: int, *ranks: int, ordered: bool = False) -> "Case":
        """A cell with slots of rank 16, or of the smallest rank if that is less."""
        return cls(tokens, adapters, ranks, min(16, *ranks), ordered)

    @classmethod
    def parse(cls, text: str, ordered: bool = False) -> "Case":
        """A cell from `T:D:r`, with `8+16+64` for mixed ranks and `@R` for another slot rank."""
        tokens, adapters, rank = text.split(":")
        rank, _, slot_rank = rank.partition("@")
        case = cls.of(int(tokens), int(adapters), *map(int, rank.split("+")), ordered=ordered)
        if not slot_rank:
            return case
        return cls(case.tokens, case.adapters, case.ranks, int(slot_rank), ordered)

    def __str__(self) -> str:
        """The cell as `parse` reads it, without its slot rank."""
        return f"{self.tokens}:{self.adapters}:{self.rank}"

    @property
    def rank(self) -> str:
        """The ranks as `parse` reads them."""
        return "+".join(map(str, self.ranks))

    @property
    def resident(self) -> int:
        """Adapters in the slots."""
        return next(n for n in RESIDENT if n >= self.adapters)

    @property
    def slots(self) -> int:
        """S: the slots of all resident adapters."""
        return sum(self._slots_of(i) for i in range(self.resident))

    def _slots_of(self, adapter: int) -> int:
        return -(-self.ranks[adapter % len(self.ranks)] // self.slot_rank)

    def groups(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(`f32[D, S]`, the slots of each active adapter; `i32[T]`, the adapter of each token).

        Adapters lie in random slots; tokens are spread over them evenly.
        """
        rng = np.random.default_rng(seed)
        free, of_adapter = rng.permutation(self.slots), np.zeros((self.adapters, self.slots))
        for i in range(self.adapters):
            taken, free = np.split(free, [self._slots_of(i)])
            of_adapter[i, taken] = 1.0
        of_token = np.arange(self.tokens) * self.adapters // self.tokens
        if not self.ordered:
            of_token = rng.permutation(np.arange(self.tokens) % self.adapters)
        return of_adapter.astype(np.float32), of_token.astype(np.int32)

    def rows(self, seed: int = 0) -> np.ndarray:
        """`f32[T, S]`, the weight of every slot for each token."""
        of_adapter, of_token = self.groups(seed)
        return of_adapter[of_token]

    def floor_us(self, shapes: Shapes) -> float:
        """Microseconds a layer to move weights, the active adapters, x and y once."""
        ranks = sum(self.ranks[i % len(self.ranks)] for i in range(self.adapters))
        size = ranks * shapes.rank_bytes
        for d_in, slices in shapes.modules.values():
            size += 2 * (d_in * sum(slices) + self.tokens * (d_in + sum(slices)))
        return size / BANDWIDTH * 1e6
