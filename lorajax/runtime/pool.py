"""Who holds which slot: an immutable value and its transitions. No arrays, no locks, no clock."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, order=True)
class Version:
    """One content under one name: a name that gets new weights is another version.

    Attributes:
        name: The registered name.
        digest: SHA-256 of the content, equal on every process.
    """

    name: str
    digest: str


@dataclass(frozen=True)
class Resident:
    """An adapter version that holds slots.

    Attributes:
        slots: One for each ceil(rank / R), in the order of the adapter's packed blocks.
        loaded: Logical time at which it was placed.
        used: Logical time of its newest lease.
        leases: Running leases that use it.
        pinned: Never evicted.
        retired: Unloaded or replaced: it goes when its last lease ends.
    """

    slots: tuple[int, ...]
    loaded: int
    used: int
    leases: int = 0
    pinned: bool = False
    retired: bool = False

    @property
    def evictable(self) -> bool:
        """Whether another adapter may take its slots."""
        return not (self.pinned or self.leases)


@dataclass(frozen=True)
class Pool:
    """The table of all slots. Every transition below returns a new one.

    Attributes:
        num_slots: S.
        residents: Who holds slots, sorted by version so that every process sees one order.
        clock: Logical time: the number of placements and leases so far.
    """

    num_slots: int
    residents: Mapping[Version, Resident] = field(default_factory=dict)
    clock: int = 0

    @property
    def free(self) -> tuple[int, ...]:
        """Slots that nobody holds, ascending."""
        held = {slot for r in self.residents.values() for slot in r.slots}
        return tuple(s for s in range(self.num_slots) if s not in held)

    @property
    def table(self) -> tuple[tuple[Version, int] | None, ...]:
        """For each slot, the version it holds and which of its packed blocks; None is zeros."""
        table: list[tuple[Version, int] | None] = [None] * self.num_slots
        for version, resident in self.residents.items():
            for block, slot in enumerate(resident.slots):
                table[slot] = (version, block)
        return tuple(table)

    @property
    def pinned_slots(self) -> int:
        """Slots of pinned adapters."""
        return sum(len(r.slots) for r in self.residents.values() if r.pinned)


def place(pool: Pool, evict: Iterable[Version], assign: Mapping[Version, tuple[int, ...]]) -> Pool:
    """Evicts some versions and gives slots to others, as a plan says."""
    gone, now = set(evict), pool.clock + 1
    residents = {v: r for v, r in pool.residents.items() if v not in gone}
    residents |= {v: Resident(slots, loaded=now, used=now) for v, slots in assign.items()}
    return _with(replace(pool, clock=now), residents)


def acquire(pool: Pool, versions: Iterable[Version]) -> Pool:
    """Counts one lease on each of the versions, which must be resident.

    A retired one that is leased again was loaded again: it is in use again.
    """
    now, residents = pool.clock + 1, dict(pool.residents)
    for version in versions:
        held = residents[version]
        residents[version] = replace(held, leases=held.leases + 1, used=now, retired=False)
    return _with(replace(pool, clock=now), residents)


def release(pool: Pool, versions: Iterable[Version]) -> Pool:
    """Ends one lease on each of the versions; retired ones leave with their last lease."""
    residents = dict(pool.residents)
    for version in versions:
        held = replace(residents[version], leases=residents[version].leases - 1)
        residents[version] = held
        if held.retired and not held.leases:
            del residents[version]
    return _with(pool, residents)


def retire(pool: Pool, version: Version) -> Pool:
    """Takes a version out of use: at once, or when its last lease ends. Its pin goes at once."""
    residents = dict(pool.residents)
    held = residents.pop(version, None)
    if held is not None and held.leases:
        residents[version] = replace(held, pinned=False, retired=True)
    return _with(pool, residents)


def revive(pool: Pool, version: Version) -> Pool:
    """Brings a retired version back that still holds slots: the same content was loaded again."""
    held = pool.residents.get(version)
    if held is None:
        return pool
    return _with(pool, {**pool.residents, version: replace(held, retired=False)})


def set_pinned(pool: Pool, version: Version, pinned: bool) -> Pool:
    """Pins or unpins a resident version."""
    held = replace(pool.residents[version], pinned=pinned)
    return _with(pool, {**pool.residents, version: held})


def _with(pool: Pool, residents: Mapping[Version, Resident]) -> Pool:
    return replace(pool, residents={v: residents[v] for v in sorted(residents)})
