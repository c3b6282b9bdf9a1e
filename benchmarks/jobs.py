"""`--jobs N`: cells are checked and compiled side by side in N processes, and timed one at a time.

Checking and compiling take most of a table's time and leave the GPU nearly idle. Each process has
its own copy of the model in device memory.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from shapes import Case


def in_turn(
    make_bench: Callable[[], Any], cases: list[Case], jobs: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What `run` of a bench yields for each cell.

    Args:
        make_bench: Makes a bench, with `prepare` and `run`, in a process of its own.
        cases: The cells.
        jobs: Processes.

    Raises:
        RuntimeError: A process ended before its cells did; it has said why.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for share in shares(cases, jobs):
        mine, other = context.Pipe()
        pipes.append(mine)
        processes.append(context.Process(target=work, args=(other, make_bench, share)))
        processes[-1].start()
        other.close()
    try:
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send("go")
            while (found := pipe.recv()) is not None:
                yield found
    except EOFError:
        raise RuntimeError("every process must measure its cells; one ended before that") from None
    finally:
        for process in processes:
            process.terminate()


def shares(cases: list[Case], jobs: int) -> list[list[Case]]:
    """The cells of each process; those of the same tokens share programs and stay together."""
    tokens = sorted({case.tokens for case in cases})
    dealt = [{*tokens[i::jobs]} for i in range(min(jobs, len(tokens)))]
    return [[case for case in cases if case.tokens in mine] for mine in dealt]


def work(pipe: Connection, make_bench: Callable[[], Any], cases: list[Case]) -> None:
    """One process: prepares its cells, waits for its turn, and sends their records."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the processes share the memory
    bench = make_bench()
    bench.prepare(cases)
    pipe.send("ready")
    pipe.recv()
    for found in bench.run(cases):
        pipe.send(found)
    pipe.send(None)
