"""Counts backend compiles in a test, or makes them quick."""

import contextlib
from collections.abc import Iterator

import jax

from lorajax.engine import CompileCounter


class CompileCheck(CompileCounter):
    """A counter that can assert."""

    @contextlib.contextmanager
    def none(self) -> Iterator[None]:
        """Asserts that nothing is compiled inside."""
        before = self.count
        yield
        assert self.count == before, f"{self.count - before} new compiles"


@contextlib.contextmanager
def quick_compiles() -> Iterator[None]:
    """Compiles take half as long inside, since LLVM optimises less.

    For tests that compare no bits of different programs. A jitted function keeps what was compiled
    inside, so it must not be one that such a test calls with the same shapes.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
