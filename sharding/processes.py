"""Several processes that run one program: joining them, and checking that they decide alike."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from lorajax.errors import LoraError

#: Bytes of a decision that are sent: its hash, and the start of its text for the message.
_HASH, _TEXT = 32, 4096


class ProcessError(LoraError):
    """The processes of one program differ, or one is gone; the others did not act on it."""


def connect(
    coordinator: str | None, num_processes: int | None, process_id: int | None, *, timeout: int = 30
) -> None:
    """Joins the processes of one program; call it before anything else of JAX.

    Args:
        coordinator: `HOST:PORT` of process 0; None to ask the cluster (TPU pods, Slurm).
        num_processes: How many there are, or None.
        process_id: Which one this is, or None.
        timeout: Seconds after which a process that is silent counts as dead; the others then end.
    """
    # Collectives between CPUs of several processes exist only in this implementation.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        heartbeat_timeout_seconds=timeout,
        shutdown_timeout_seconds=timeout,
    )


def agree(entries: Sequence[str]) -> None:
    """Checks that all processes bring the same entries; each must call it, in the same order.

    Args:
        entries: What was decided, such as a slot with an adapter's name and its content's hash.

    Raises:
        ProcessError: They differ, and the message shows the entries that do; or a process is gone.
    """
    if jax.process_count() == 1:
        return
    raw = "\n".join(entries).encode()
    mine = np.zeros(_HASH + _TEXT, np.uint8)
    mine[:_HASH] = np.frombuffer(hashlib.sha256(raw).digest(), np.uint8)
    mine[_HASH : _HASH + len(raw)] = np.frombuffer(raw, np.uint8)[:_TEXT]
    everyone = _gathered(mine)
    if (everyone[:, :_HASH] == everyone[0, :_HASH]).all():
        return
    texts = [bytes(row[_HASH:]).rstrip(b"\0").decode(errors="replace") for row in everyone]
    lines = [text.split("\n") for text in texts]
    common = set.intersection(*map(set, lines))
    own = [", ".join(line for line in mine if line not in common) or "nothing" for mine in lines]
    brought = "; ".join(f"process {i} has {text}" for i, text in enumerate(own))
    raise ProcessError(
        f"all processes must decide alike; got differences: {brought}; give every process the same "
        "adapters, files and requests, and make the same calls on each"
    )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Turns the error of a collective whose other processes are gone into one that says so.

    Use it where results of a step are read: that is when such an error comes.

    Raises:
        ProcessError: JAX raised an error inside, and there are several processes.
    """
    try:
        yield
    except LoraError:
        raise
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # JAX raises either
        if jax.process_count() == 1:
            raise
        raise ProcessError(
            f"all processes must be alive; got an error of their connection: {error}; look for the "
            "first error in the others' logs, and start them all again"
        ) from error


def _gathered(mine: np.ndarray) -> np.ndarray:
    """The rows of all processes."""
    with together():
        return np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, mine.size)
