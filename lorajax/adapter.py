"""An adapter in host memory, packed for the slots of one spec."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class PackedWeights:
    """One target's share of an adapter, cut into n slots.

    A contiguous block for each slot, so that writing a slot is one copy an array.

    Attributes:
        A: `[n, L, G, R, d_in]` in the spec's dtype; unused rows are zero.
        B: `[n, L, R, d_out]` in the spec's dtype.
        scale: `f32[n, L, G, R]`.
    """

    A: np.ndarray
    B: np.ndarray
    scale: np.ndarray


@dataclass(frozen=True, eq=False)
class Adapter:
    """A validated adapter: what `load_adapter` returns and `write_slots` takes.

    Attributes:
        name: For messages.
        digest: SHA-256 of its configuration and tensors; equal content, equal digest on any host.
        rank: Largest rank of a module.
        num_slots: n, slots it takes.
        arrays: For each target it touches, the packed arrays.
        modules: For each module of the file ("model.layers.0.self_attn.q_proj"), (rank, scale).
        config: Its `adapter_config.json`.
    """

    name: str
    digest: str
    rank: int
    num_slots: int
    arrays: Mapping[str, PackedWeights]
    modules: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed arrays."""
        return sum(a.nbytes for p in self.arrays.values() for a in (p.A, p.B, p.scale))
