"""What the manager decides, as one value: each function returns the next one, or raises."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from lorajax.errors import PoolFullError
from lorajax.runtime import pool as moves
from lorajax.runtime.planner import Refusal, pin_refusal, plan
from lorajax.runtime.policy import EvictionPolicy
from lorajax.runtime.pool import Pool, Version


@dataclass(frozen=True)
class Stats:
    """Counts since the start, of adapters: a lease of three counts three.

    Attributes:
        hits: Leased while resident.
        misses: Leased while not resident.
        loads: Placed in slots.
        evictions: Removed from slots for another one.
    """

    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions: int = 0


@dataclass(frozen=True)
class Ledger:
    """Who holds which slot, and what was counted."""

    pool: Pool
    stats: Stats = field(default_factory=Stats)


def admit(ledger: Ledger, wanted: Mapping[Version, int], policy: EvictionPolicy) -> Ledger:
    """Places all wanted versions (version: slots that it takes) and leases each once.

    Raises:
        PoolFullError: There is no room; the message names who holds the slots.
    """
    hits = sum(version in ledger.pool.residents for version in wanted)
    placed = _placed(ledger, wanted, policy)
    stats = placed.stats
    stats = replace(stats, hits=stats.hits + hits, misses=stats.misses + len(wanted) - hits)
    return Ledger(moves.acquire(placed.pool, wanted), stats)


def adopt(
    ledger: Ledger,
    version: Version,
    size: int,
    *,
    replaces: Version | None,
    pinned: bool,
    others: Iterable[tuple[Version, int]],
    policy: EvictionPolicy,
) -> Ledger:
    """Makes a version what its name stands for; the pin of what it replaces passes on to it.

    Args:
        ledger: Now.
        version: The new one, or the same again.
        size: Slots that it takes.
        replaces: What the name stood for, if it was read.
        pinned: Also place and pin it.
        others: The other versions that names stand for, and their slots; used only to pin.
        policy: Who goes if it has to be placed.

    Raises:
        PoolFullError: There is no room to pin it, or more is pinned than before and too little
            would be left.
    """
    pool = ledger.pool
    before = None if replaces is None else pool.residents.get(replaces)
    had = len(before.slots) if before is not None and before.pinned else 0
    if replaces is not None and replaces != version:
        pool = moves.retire(pool, replaces)
    ledger = replace(ledger, pool=moves.revive(pool, version))
    if not (pinned or had):
        return ledger
    if size > had:
        _check_pin(ledger, version, size, others)
    ledger = _placed(ledger, {version: size}, policy)
    return replace(ledger, pool=moves.set_pinned(ledger.pool, version, True))


def _check_pin(
    ledger: Ledger, version: Version, size: int, others: Iterable[tuple[Version, int]]
) -> None:
    kept = {v for v, r in ledger.pool.residents.items() if r.pinned}
    reserve = max((slots for other, slots in others if other not in kept), default=0)
    refusal = pin_refusal(ledger.pool, version, size, reserve)
    if refusal is not None:
        raise PoolFullError(refusal)


def _placed(ledger: Ledger, wanted: Mapping[Version, int], policy: EvictionPolicy) -> Ledger:
    found = plan(ledger.pool, wanted, policy)
    if isinstance(found, Refusal):
        raise PoolFullError(str(found))
    stats = replace(
        ledger.stats,
        loads=ledger.stats.loads + len(found.assign),
        evictions=ledger.stats.evictions + len(found.evict),
    )
    return Ledger(moves.place(ledger.pool, found.evict, found.assign), stats)
