"""The right to use some slots, given back exactly once."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import numpy as np

from lorajax.errors import LoraError
from lorajax.runtime import rows as _rows
from lorajax.runtime.pool import Version
from lorajax.runtime.rows import CacheKey, Pairs


class Lease:
    """Slots of the adapters of a batch; they hold these adapters until the lease ends.

    A context manager. It ends once, at the first of: leaving the `with`, `close`, and being
    garbage. It may end on another thread than it began.

    Attributes:
        slots: Slots of each adapter that a row uses.
        cache_keys: `AdapterManager.cache_key` of each row, of the versions that this lease holds.
    """

    def __init__(
        self,
        rows: Sequence[Pairs],
        versions: Mapping[str, Version],
        *,
        slots: Mapping[str, tuple[int, ...]],
        num_slots: int,
        release: Callable[[], None],
    ):
        """Made by `AdapterManager.lease`.

        Args:
            rows: N rows in normal form.
            versions: What each used name stands for.
            slots: Slots of each used name.
            num_slots: S.
            release: Called once. It must not take a lock, because the collector may call it.
        """
        self.slots = slots
        self.cache_keys: tuple[CacheKey, ...] = tuple(_rows.cache_key(r, versions) for r in rows)
        self._row_weights = _rows.row_weights(rows, slots, num_slots)
        self._end = weakref.finalize(self, release)
        self._end.atexit = False

    @property
    def row_weights(self) -> np.ndarray:
        """`f32[N, S]`, for the step's `make_routing`.

        Raises:
            LoraError: The lease has ended: its slots may hold other adapters by now.
        """
        self._check_open()
        return self._row_weights

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return not self._end.alive

    def close(self) -> None:
        """Ends the lease; again is harmless."""
        self._end()

    def __enter__(self) -> "Lease":
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise LoraError(
                f"a lease must be open while its slots are used; got one of {sorted(self.slots)} "
                "that has ended; take a new lease"
            )
