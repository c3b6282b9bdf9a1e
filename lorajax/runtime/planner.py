"""Which adapters get which slots, and who must leave: pure and the same on every process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lorajax.errors import SpecError
from lorajax.runtime.policy import EvictionPolicy
from lorajax.runtime.pool import Pool, Version


@dataclass(frozen=True)
class Plan:
    """What to change so that all wanted adapters are resident.

    Attributes:
        evict: Versions that lose their slots.
        assign: Slots of each version that is not resident yet.
    """

    evict: tuple[Version, ...]
    assign: Mapping[Version, tuple[int, ...]]


@dataclass(frozen=True)
class Refusal:
    """Why no eviction can make room.

    Attributes:
        needed: Slots that each wanted version takes.
        num_slots: S.
        available: Slots that are free or evictable, besides those of the wanted residents.
        missing: Slots that the wanted versions which are not resident take.
        holders: Versions that cannot be evicted: name, slots, why.
    """

    needed: Mapping[Version, int]
    num_slots: int
    available: int
    missing: int
    holders: tuple[tuple[Version, int, str], ...]

    def __str__(self) -> str:
        wanted = ", ".join(f"{v.name!r} ({n})" for v, n in self.needed.items())
        held = ", ".join(f"{v.name!r} ({n}, {why})" for v, n, why in self.holders) or "nobody"
        return (
            f"adapters must fit the slots that are free or evictable; got {self.missing} more "
            f"slots needed with {self.available} of {self.num_slots} to be had, for {wanted}; "
            f"slots are held by: {held}; end leases, unpin, use fewer adapters at a time, or "
            "build the spec with more num_slots"
        )


def plan(pool: Pool, wanted: Mapping[Version, int], policy: EvictionPolicy) -> Plan | Refusal:
    """Finds slots for all wanted versions, or says who is in the way.

    Args:
        pool: Now; it is not changed.
        wanted: Slots that each version takes.
        policy: The order in which adapters go.

    Returns:
        A plan that evicts no pinned, leased or wanted version, and none needlessly: victims are the
        first in the policy's order that make enough room, less those that need not go (newest
        spared first). A refusal only if evicting everybody evictable would not do.

    Raises:
        SpecError: The policy did not return exactly the versions it was given.
    """
    missing = {v: wanted[v] for v in sorted(wanted) if v not in pool.residents}
    candidates = {v: r for v, r in pool.residents.items() if r.evictable and v not in wanted}
    free = pool.free
    shortage = sum(missing.values()) - len(free)
    sizes = {v: len(r.slots) for v, r in candidates.items()}
    if shortage > sum(sizes.values()):
        return Refusal(
            needed={v: wanted[v] for v in sorted(wanted)},
            num_slots=pool.num_slots,
            available=len(free) + sum(sizes.values()),
            missing=sum(missing.values()),
            holders=_holders(pool, wanted),
        )
    evict = _victims(_ordered(policy, candidates), sizes, shortage) if shortage > 0 else ()
    slots = sorted((*free, *(s for v in evict for s in pool.residents[v].slots)))
    assign, start = {}, 0
    for version, count in missing.items():
        assign[version] = tuple(slots[start : start + count])
        start += count
    return Plan(evict, assign)


def _ordered(policy: EvictionPolicy, candidates: Mapping) -> Sequence[Version]:
    order = tuple(policy(candidates))
    if len(order) != len(candidates) or set(order) != set(candidates):
        raise SpecError(
            f"an eviction policy must return each evictable version once; got {list(order)} for "
            f"{list(candidates)}; sort what it is given and return all of it"
        )
    return order


def _victims(
    order: Sequence[Version], sizes: Mapping[Version, int], shortage: int
) -> tuple[Version, ...]:
    chosen, room = [], 0
    for version in order:
        if room >= shortage:
            break
        chosen.append(version)
        room += sizes[version]
    for version in reversed(chosen):
        if room - sizes[version] >= shortage:
            room -= sizes[version]
            chosen = [v for v in chosen if v != version]
    return tuple(chosen)


def _holders(pool: Pool, wanted: Mapping[Version, int]) -> tuple[tuple[Version, int, str], ...]:
    def why(version: Version) -> str:
        held = pool.residents[version]
        leased = f"{held.leases} lease" + ("s" if held.leases > 1 else "")
        reasons = (
            (held.pinned, "pinned"),
            (bool(held.leases), leased),
            (held.retired, "unloaded"),
            (version in wanted, "wanted"),
        )
        return ", ".join(text for true, text in reasons if true)

    return tuple(
        (v, len(r.slots), why(v))
        for v, r in sorted(pool.residents.items(), key=lambda item: item[0])
        if v in wanted or not r.evictable
    )


def pin_refusal(pool: Pool, version: Version, size: int, reserve: int) -> str | None:
    """Why a version may not be pinned, or None.

    Args:
        pool: Now.
        version: To be pinned.
        size: Slots that it takes.
        reserve: Slots of the largest registered adapter that is not pinned, besides this one.
    """
    held = pool.residents.get(version)
    pinned = pool.pinned_slots - (len(held.slots) if held is not None and held.pinned else 0)
    left, reserve = pool.num_slots - pinned - size, max(1, reserve)
    if left >= reserve:
        return None
    others = [v.name for v, r in pool.residents.items() if r.pinned and v != version]
    return (
        "pinned adapters must leave room for any other one that is registered, and at least one "
        f"slot; got {left} of {pool.num_slots} slots left with {reserve} needed, pinning "
        f"{version.name!r} ({size}) next to {others} ({pinned}); unpin one, or build the spec with "
        "more num_slots"
    )
