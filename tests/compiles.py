"""Counts backend compiles through `jax.monitoring`."""

import contextlib
from collections.abc import Iterator

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Number of backend compiles since it was entered, in `count`."""

    def __init__(self):
        self.count = 0

    def _listen(self, event: str, duration: float, **_: object) -> None:
        self.count += event == _EVENT

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    @contextlib.contextmanager
    def none(self) -> Iterator[None]:
        """Asserts that nothing is compiled inside."""
        before = self.count
        yield
        assert self.count == before, f"{self.count - before} new compiles"
