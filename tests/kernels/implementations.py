"""How each implementation is run on a machine without its hardware, and known in the HLO."""

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
from jax.experimental.pallas import tpu as pltpu


@dataclass(frozen=True)
class Runner:
    """One implementation under test.

    Attributes:
        name: As `implementation=` takes it.
        platform: To lower for.
        mark: From an op's name to a text that its HLO must have; `None`: no custom call at all.
        simulate: Context in which a jitted call of it runs on CPU; checks for races at exit.
    """

    name: str
    platform: str
    mark: Callable[[str], str | None]
    simulate: Callable[[], contextlib.AbstractContextManager]


@contextlib.contextmanager
def tpu_simulation() -> Iterator[None]:
    """Interprets TPU kernels, uninitialised memory being NaN, and fails on a data race."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    printed = io.StringIO()
    try:
        with pltpu.force_tpu_interpret_mode(params), contextlib.redirect_stdout(printed):
            yield
            jax.effects_barrier()
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()


RUNNERS = [
    Runner("xla", "cpu", lambda op: None, contextlib.nullcontext),
    Runner("mosaic_tpu", "tpu", lambda op: f"{op}_tpu", tpu_simulation),
]
