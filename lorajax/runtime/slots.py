"""The device arrays as a picture of the pool: brought up to date slot by slot."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorajax.adapter import Adapter
from lorajax.runtime.pool import Pool, Version
from lorajax.spec import LoraSpec
from lorajax.state import LoraState, clear_slots, init_state, write_slots

#: As `Pool.table`: for each slot a version and its packed block, or None for zeros.
Table = tuple[tuple[Version, int] | None, ...]


@dataclass(frozen=True)
class Slots:
    """The state, and what each of its slots holds.

    Attributes:
        state: The slot arrays.
        table: What they hold.
    """

    state: LoraState
    table: Table


def described(table: Table) -> list[str]:
    """A line for each slot that holds something: adapter, hash of its content, packed block."""
    return [
        f"slot {slot}: {held[0].name!r} {held[0].digest[:16]} block {held[1]}"
        for slot, held in enumerate(table)
        if held is not None
    ]


def empty_slots(spec: LoraSpec, shardings: Any = None) -> Slots:
    """Zeros everywhere. Compiles both writers, so that service compiles nothing."""
    state = clear_slots(init_state(spec, shardings), [0])
    nothing = Adapter(name="", digest="", rank=0, num_slots=1, arrays={})
    return Slots(write_slots(state, [0], nothing), (None,) * spec.num_slots)


def sync(slots: Slots, pool: Pool, adapters: Mapping[Version, Adapter]) -> Slots:
    """Writes and zeroes the slots that differ from the pool's table.

    Args:
        slots: Its state is donated: if this raises, it is dead.
        pool: The table to reach.
        adapters: Host arrays of every resident.
    """
    want = pool.table
    differing = {s: held for s, held in enumerate(want) if slots.table[s] != held}
    if not differing:
        return slots
    state = clear_slots(slots.state, [s for s, held in differing.items() if held is None])
    for version in sorted({held[0] for held in differing.values() if held is not None}):
        state = write_slots(state, pool.residents[version].slots, adapters[version])
    return Slots(state, want)
