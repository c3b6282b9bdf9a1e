"""The slot arrays of one target, as every kernel takes them."""

from dataclasses import dataclass, field
from typing import Any

import jax

#: A leaf: an array, or what stands for one in a tree of shapes or shardings.
Leaf = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoraWeights:
    """Slots of one target for L layers (L is 1 where each layer has its own arrays).

    Features are minor: one slot's slice is a contiguous `R x d` block, so a pack of slots is a few
    copies, and no axis is padded to the 128 lanes of a TPU.

    Attributes:
        A: `[L, S, G, R, d_in]`. Shrink factors, one block for each slice of a merged target.
        B: `[L, S, R, d_out]`, always finite. Columns of slice g use only the rows of A's slice g.
        scale: `f32[L, S, G, R]`. alpha/r (or alpha/sqrt(r)) of the module in that slot; NaN marks a
            row whose B was not finite, so that the fault stays with the adapter's own tokens.
        slices: Widths of the G slices of d_out.
    """

    A: Leaf
    B: Leaf
    scale: Leaf
    slices: tuple[int, ...] = field(metadata={"static": True})

    @property
    def num_slots(self) -> int:
        """S."""
        return self.A.shape[1]
