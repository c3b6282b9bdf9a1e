"""Eviction policies: pure functions that say who goes first."""

from collections.abc import Callable, Mapping, Sequence

from lorajax.errors import SpecError
from lorajax.runtime.pool import Resident, Version

#: Takes the evictable residents and returns all of them, the first victim first. It must depend on
#: nothing else, or processes would decide differently; it runs under the manager's lock.
EvictionPolicy = Callable[[Mapping[Version, Resident]], Sequence[Version]]


def lru(residents: Mapping[Version, Resident]) -> list[Version]:
    """Least recently leased first; versions break ties."""
    return sorted(residents, key=lambda v: (residents[v].used, v))


def fifo(residents: Mapping[Version, Resident]) -> list[Version]:
    """Longest in its slots first; versions break ties."""
    return sorted(residents, key=lambda v: (residents[v].loaded, v))


_NAMED: Mapping[str, EvictionPolicy] = {"lru": lru, "fifo": fifo}


def get_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """The policy of that name, or the given one.

    Raises:
        SpecError: There is none of that name.
    """
    if callable(policy):
        return policy
    if policy not in _NAMED:
        raise SpecError(
            f"an eviction policy must be one of {sorted(_NAMED)} or a function; got {policy!r}; "
            "pass a function from evictable residents to the order in which they go"
        )
    return _NAMED[policy]
