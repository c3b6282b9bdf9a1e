"""Counts backend compiles in a test."""

import contextlib
from collections.abc import Iterator

from lorajax.engine import CompileCounter


class CompileCheck(CompileCounter):
    """A counter that can assert."""

    @contextlib.contextmanager
    def none(self) -> Iterator[None]:
        """Asserts that nothing is compiled inside."""
        before = self.count
        yield
        assert self.count == before, f"{self.count - before} new compiles"
