"""Reasons to refuse an adapter, gathered by kind so that one message tells them all."""

from collections.abc import Iterable

from lorajax.errors import AdapterError

_EXAMPLES = 5
_LONGEST = 400


class Problems:
    """Reasons found so far; those of one kind (same rule, same remedy) are told together."""

    def __init__(self):
        self._kinds: dict[tuple[str, str], list[str]] = {}

    def add(self, rule: str, got: str, do: str) -> None:
        """Notes one reason: what must hold, what came instead, what to do."""
        if not got.isprintable():  # names in a file could forge lines of a log
            got = got.encode("unicode_escape").decode()
        self._kinds.setdefault((rule, do), []).append(got[:_LONGEST])

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def messages(self) -> tuple[str, ...]:
        """One "rule; got; do" for each kind, with at most five examples."""
        return tuple(f"{rule}; got {some(got)}; {do}" for (rule, do), got in self._kinds.items())

    def refuse(self, name: str) -> None:
        """Raises if anything was noted.

        Raises:
            AdapterError: Names the adapter and tells all reasons.
        """
        messages = self.messages()
        if len(messages) == 1:
            raise AdapterError(f"adapter {name!r}: {messages[0]}")
        if messages:
            lines = "".join(f"\n  - {m}" for m in messages)
            raise AdapterError(f"adapter {name!r} is refused for {len(messages)} reasons:{lines}")


def some(items: Iterable[str]) -> str:
    """The first five, and how many more."""
    known = list(items)
    more = len(known) - _EXAMPLES
    return ", ".join(known[:_EXAMPLES]) + (f" and {more} more" if more > 0 else "")
