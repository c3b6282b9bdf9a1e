"""The order of a merged target's columns where each shard holds a share of every slice."""

from dataclasses import dataclass

import numpy as np

from lorajax.errors import SpecError


@dataclass(frozen=True)
class Columns:
    """Columns of slices side by side, q|k|v, laid out for shards: q0|k0|v0|q1|k1|v1 and so on.

    A contiguous cut of q|k|v would give the first shards only q, and splitting the product would
    move activations between devices. In this order a contiguous cut gives every shard the columns
    of its own heads. A slice with fewer heads than shards is copied: shard i of n holds head
    `i * heads // n`, the one that its query heads attend to, so there are more columns than in a
    checkpoint.

    Attributes:
        widths: Widths of the G slices in a checkpoint.
        heads: Heads of each slice, which are never cut; empty where columns are independent.
        shards: n, devices that the columns are cut over.
    """

    widths: tuple[int, ...]
    heads: tuple[int, ...] = ()
    shards: int = 1

    def __post_init__(self):
        for width, units in zip(self.widths, self._units, strict=True):
            if units % self.shards and (not self.heads or self.shards % units):
                what = f"{units} heads" if self.heads else f"{width} columns"
                raise SpecError(
                    f"each slice must divide over {self.shards} shards, or its heads be fewer and "
                    f"divide them; got {what} in slices {list(self.widths)}; use another size of "
                    "the tensor axis"
                )

    @property
    def _units(self) -> tuple[int, ...]:
        """What each slice is made of: heads, or columns."""
        return self.heads or self.widths

    @property
    def local(self) -> tuple[int, ...]:
        """Widths of the G slices on one shard."""
        return tuple(
            width // units * max(1, units // self.shards)
            for width, units in zip(self.widths, self._units, strict=True)
        )

    @property
    def width(self) -> int:
        """Columns of all shards, copies included."""
        return self.shards * sum(self.local)

    def order(self) -> np.ndarray:
        """`i64[width]`, for each column here the one in the checkpoint."""
        starts = np.cumsum((0, *self.widths[:-1]))
        return np.concatenate(
            [
                start + i * units // self.shards * (width // units) + np.arange(local)
                for i in range(self.shards)
                for start, width, units, local in zip(
                    starts, self.widths, self._units, self.local, strict=True
                )
            ]
        )

    def take(self, array: np.ndarray, index: slice = slice(None)) -> np.ndarray:
        """Some columns of an array that is in a checkpoint's order.

        Args:
            array: `[..., sum(widths)]`.
            index: Which of the columns here.

        Returns:
            `[..., n]`; the array itself if all its columns are asked for and none moves.
        """
        if self.shards == 1 and index == slice(None):
            return array
        return array[..., self.order()[index]]
