"""One of several processes that serve together; `test_processes.py` starts it.

    python -m tests.sharding.process_worker PORT NUM_PROCESSES PROCESS_ID FOLDER

Prints JSON lines: the tokens of each phase, then how the end came.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax

import lorajax as lj
from lorajax.engine import CompileCounter, Engine, Steps
from lorajax.models import load_model
from lorajax.sharding import Partition, ProcessError, agree, connect, state_shardings
from tests.engine import tiny
from tests.sharding.phases import AXES, SLOTS, phases, serve

TIMEOUT = 10


def say(**fields) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    port, num, index, folder = *map(int, sys.argv[1:4]), Path(sys.argv[4])
    jax.config.update("jax_num_cpu_devices", 4 // num)
    jax.config.update("jax_disable_most_optimizations", True)  # as tests.compiles.quick_compiles
    connect(f"localhost:{port}", num, index, timeout=TIMEOUT)
    partition = Partition.of(jax.make_mesh(tuple(AXES.values()), tuple(AXES)))
    base, sources = folder / "base", {name: folder / name for name in tiny.ADAPTERS}
    spec = lj.LoraSpec.from_hf_config(base, num_slots=SLOTS, slot_rank=16)
    manager = lj.AdapterManager(
        spec,
        sources=sources,
        shardings=state_shardings(spec, partition.mesh),
        agree=agree,
    )
    steps = Steps(load_model(base, partition=partition), partition=partition)
    engine = Engine(steps, manager, num_rows=2, max_length=32)
    engine.warm_up(16)
    agree(["warm"])
    with CompileCounter() as counter:
        for name, tokens in phases(engine, folder):
            say(phase=name, tokens=tokens)
    say(compiles=counter.count, evictions=manager.stats.evictions)

    # One process is given another file under the same name.
    manager.reload("sql", folder / ("other" if index else "law"))
    try:
        serve(engine)
    except ProcessError as error:
        say(refused=str(error))
    for name, source in sources.items():  # their pools differ by now: start anew
        manager.unload(name)
        manager.register(name, source)
    say(phase="again", tokens=serve(engine))

    # The last process is killed in the middle of a load.
    manager.unload("chat")
    manager.register("chat", dying if index == num - 1 else folder / "chat")
    say(dying=time.time())
    try:
        serve(engine)
    except ProcessError as error:
        say(ended=str(error), at=time.time())
        os._exit(3)  # an ordinary exit would wait for the process that is gone


def dying(name: str) -> lj.Adapter:
    """A source that kills its process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(name)


if __name__ == "__main__":
    main()
