"""What the processes of `process_worker.py` and the one process of the test both serve."""

from collections.abc import Iterator
from pathlib import Path

from lorajax.engine import Engine, Request
from tests.engine import tiny

AXES = {"data": 2, "tensor": 2}
SLOTS = 4  # the adapters take 9 together, so some are evicted
CHOICES = (None, "chat", "deep", "sql", {"chat": 0.5, "phi": -0.5}, "law", None, "chat")


def serve(engine: Engine) -> dict[str, list[int]]:
    requests = [
        Request(str(i), tiny.prompt(i, 4 + i), 4, choice) for i, choice in enumerate(CHOICES)
    ]
    results = list(engine.serve(requests))
    assert not [r.error for r in results if r.error]
    return {r.request.id: list(r.token_ids) for r in results}


def phases(engine: Engine, folder: Path) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Load and evict, then a hot swap, then an unload and the name anew."""
    manager = engine.manager
    yield "load and evict", serve(engine)
    manager.reload("sql", folder / "other")
    yield "hot swap", serve(engine)
    manager.unload("chat")
    manager.load("chat", folder / "sql")
    yield "unload", serve(engine)
    manager.unload("chat")
    manager.load("chat", folder / "chat")
    manager.reload("sql", folder / "sql")
