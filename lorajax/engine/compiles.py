"""Counts backend compiles through `jax.monitoring`, to prove that there are none."""

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Number of backend compiles since it was entered, in `count`.

    A context manager; it listens to the whole process, so other threads' compiles count too.
    """

    def __init__(self):
        self.count = 0

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += event == _EVENT

    def __enter__(self) -> "CompileCounter":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)
