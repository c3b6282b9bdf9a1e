"""Which waiting requests join the batch: a pure function, so that it can be tested alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lorajax.engine.request import AdapterChoice


@dataclass(frozen=True)
class Waiting:
    """A request in the queue.

    Attributes:
        adapter: What it asks for.
        overtaken: Requests that came later and took slots before it.
    """

    adapter: AdapterChoice
    overtaken: int = 0


@dataclass(frozen=True)
class Admission:
    """The decision.

    Attributes:
        chosen: Indices into the queue, ascending.
        overtaken: For every entry of the queue, its new count.
    """

    chosen: tuple[int, ...]
    overtaken: tuple[int, ...]


def admit(
    waiting: Sequence[Waiting],
    free_rows: int,
    can_admit: Callable[[Sequence[AdapterChoice]], bool],
    *,
    max_overtakes: int,
    window: int,
) -> Admission:
    """Chooses who joins: first come first served, as far as slots allow.

    A request whose adapters do not fit beside the running ones may be overtaken by later requests
    whose adapters do fit, but only `max_overtakes` times: then no later adapter is admitted, the
    running requests end, and their slots become free for it. Base requests take no slot, so they
    never wait for one and overtake nobody.

    Args:
        waiting: The queue, oldest first.
        free_rows: Rows of the batch that are free.
        can_admit: Whether adapters fit together beside those in use now; monotone: what does not
            fit does not fit with more.
        max_overtakes: How often a request may be overtaken.
        window: Adapter requests looked at; bounds the cost of a decision.
    """
    overtaken = [w.overtaken for w in waiting]
    chosen: list[int] = []
    adapters: list[AdapterChoice] = []
    refused: list[int] = []
    looked_at = 0
    for i, entry in enumerate(waiting):
        if len(chosen) == free_rows:
            break
        if entry.adapter is None:
            chosen.append(i)
            continue
        if looked_at == window or any(overtaken[j] >= max_overtakes for j in refused):
            continue
        looked_at += 1
        if can_admit([*adapters, entry.adapter]):
            chosen.append(i)
            adapters.append(entry.adapter)
            for j in refused:
                overtaken[j] += 1
        else:
            refused.append(i)
    return Admission(tuple(chosen), tuple(overtaken))
