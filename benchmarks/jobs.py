"""`--jobs N`: cells are checked and compiled side by side in N processes, and timed one at a time.

Checking and compiling take most of a table's time and leave the GPU nearly idle. A process that is
silent for too long, or ends, costs its own cells only, and so does an error in a cell.
"""

import argparse
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol


class Bench(Protocol):
    """What a process makes of its cells."""

    def prepare(self, cell: Any) -> None:
        """Checks a cell and compiles what it needs; keeps no large array."""

    def measure(self, cell: Any) -> dict[str, Any]:
        """The record of a cell; prepares what is not yet prepared."""


@dataclass(frozen=True)
class Failure:
    """Why a cell has no record."""

    why: str


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that `in_turn` takes."""
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile side by side")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after this time")
    parser.add_argument(
        "--patience", type=float, default=180, help="end a process that is silent for these seconds"
    )


def in_turn(
    make_bench: Callable[[], Bench],
    cells: list[Any],
    args: argparse.Namespace,
    *,
    key: Callable[[Any], Hashable] = lambda cell: cell,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each cell with its record; the order depends on `key`, and not on the number of processes.

    Args:
        make_bench: Makes a bench in a process of its own.
        cells: The cells; `str` names them.
        args: With the options of `add_options`.
        key: Cells of the same key share what is compiled, and so a process.

    Raises:
        SystemExit: At the end, if a cell has no record; it names them. Why was printed before.
    """
    deadline, missing = time.monotonic() + args.seconds, []
    share_memory()
    dealt = shares(cells, args.jobs, key)
    options = {"ahead": len(dealt) > 1, "patience": args.patience}
    workers = [Worker(make_bench, share, **options) for share in dealt]
    try:
        listen(workers)
        for worker in workers:
            for cell in worker.cells:
                late = time.monotonic() > deadline
                found = Failure("out of time") if late else worker.measure(cell)
                if isinstance(found, Failure):
                    missing.append(str(cell))
                    print(f"not measured: {cell}: {found.why}", flush=True)
                else:
                    yield cell, found
            worker.end()
    finally:
        for worker in workers:
            worker.end()
    if missing:
        raise SystemExit(f"{len(missing)} of {len(cells)} not measured: {', '.join(missing)}")


def share_memory() -> None:
    """Lets this process and those it starts take GPU memory as they need it; before JAX starts."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def shares(cells: list[Any], jobs: int, key: Callable[[Any], Hashable]) -> list[list[Any]]:
    """The cells of each process: about as many keys for each, and neighbours together."""
    groups: dict[Hashable, list[Any]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    each, count = list(groups.values()), min(jobs, len(groups))
    cuts = [i * len(each) // count for i in range(count + 1)]
    return [[*itertools.chain(*each[a:b])] for a, b in itertools.pairwise(cuts)]


class Worker:
    """A process and its cells, seen from outside.

    Attributes:
        cells: The cells.
        failures: Of those that could not be prepared.
        ahead: How many of the cells are still to be prepared before the first is measured.
        pipe: To the process.
        patience: Seconds that it may be silent.
        until: When it must have answered.
        lost: Why the process was ended too early, if it was.
    """

    def __init__(
        self, make_bench: Callable[[], Bench], cells: list[Any], *, ahead: bool, patience: float
    ):
        context = multiprocessing.get_context("spawn")
        self.cells, self.failures, self.lost = cells, {}, None
        self.ahead = len(cells) if ahead else 0
        self.patience, self.until = patience, time.monotonic() + patience
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, make_bench, cells[: self.ahead]))
        self.process.start()
        other.close()

    def answer(self, cell: Any, *, send: bool) -> Any:
        """What the process says of a cell, sent to it now or at its start, or why it is silent."""
        try:
            if send:
                self.pipe.send(cell)
            if self.pipe.poll(max(0.0, self.until - time.monotonic())):
                self.until = time.monotonic() + self.patience
                return self.pipe.recv()
            self.lost = Failure(f"its process was silent for {self.patience:.0f} s, at {cell}")
        except (EOFError, ConnectionError):
            self.lost = Failure(f"its process ended, at {cell}")
        self.end()
        return self.lost

    def hear(self) -> None:
        """Takes in that the next cell is prepared, if that is so or should be by now."""
        if self.pipe.poll() or time.monotonic() > self.until:
            cell = self.cells[-self.ahead]
            found = self.answer(cell, send=False)
            self.ahead = 0 if self.lost else self.ahead - 1
            if isinstance(found, Failure):
                self.failures[cell] = found

    def measure(self, cell: Any) -> dict[str, Any] | Failure:
        """The record of a cell."""
        self.until = time.monotonic() + self.patience
        return self.lost or self.failures.get(cell) or self.answer(cell, send=True)

    def end(self) -> None:
        """Ends the process; a hung one would make the others' kernels wait."""
        self.process.kill()
        self.process.join(10)  # a driver may hold on to it for longer


def listen(workers: list[Worker]) -> None:
    """Returns when every process has prepared its cells, or was ended."""
    while waiting := [worker for worker in workers if worker.ahead]:
        wait([worker.pipe for worker in waiting], timeout=1)
        for worker in waiting:
            worker.hear()


def work(pipe: Connection, make_bench: Callable[[], Bench], ahead: list[Any]) -> None:
    """The process: prepares cells, then measures those that it is asked for."""
    bench = make_bench()
    for cell in ahead:
        pipe.send(attempt(bench.prepare, cell))
    while True:
        pipe.send(attempt(bench.measure, pipe.recv()))


def attempt(function: Callable[[Any], Any], cell: Any) -> Any:
    """What the function makes of a cell, or why it failed."""
    try:
        return function(cell)
    except Exception as error:  # the process goes on with its other cells
        return Failure(f"{type(error).__name__}: {error}")
