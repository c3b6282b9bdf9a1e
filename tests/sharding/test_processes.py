"""Several processes serve as one does, refuse to differ, and end when one is killed."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import lorajax as lj
from lorajax.engine import Engine, Steps
from lorajax.models import load_model, synthetic
from lorajax.sharding import ProcessError, agree
from tests.compiles import quick_compiles
from tests.core.test_state import make_adapter, make_spec, slot_arrays
from tests.engine import tiny
from tests.sharding.phases import SLOTS, phases
from tests.sharding.process_worker import TIMEOUT

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served")
    tiny.write(path)
    recipe = next(r for r in synthetic.RECIPES if r.name == "sql")
    other = synthetic.make_adapter(tiny.BASE, recipe, seed=99)
    synthetic.write_adapter(path / "other", other)
    return path


@pytest.fixture(scope="module")
def one_process(folder):
    """The tokens of each phase without a mesh."""
    base = folder / "base"
    spec = lj.LoraSpec.from_hf_config(base, num_slots=SLOTS, slot_rank=16)
    manager = lj.AdapterManager(spec, sources={name: folder / name for name in tiny.ADAPTERS})
    engine = Engine(Steps(load_model(base)), manager, num_rows=2, max_length=32)
    with quick_compiles():
        return dict(phases(engine, folder))


def free_port():
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return sock.getsockname()[1]


def run_processes(num, *args, module="tests.sharding.process_worker"):
    """(exit status, JSON lines, standard error) of each process."""
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(port), str(num), str(i), *map(str, args)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(num)
    ]
    try:
        outputs = [process.communicate(timeout=180) for process in running]
    finally:
        for process in running:
            process.kill()
    lines = [[json.loads(x) for x in out.splitlines() if x[:1] == "{"] for out, _ in outputs]
    return [
        (process.returncode, own, err)
        for process, own, (_, err) in zip(running, lines, outputs, strict=True)
    ]


@pytest.mark.parametrize("num", [2, 4])
def test_processes_serve_as_one_does(num, folder, one_process):
    ended = run_processes(num, folder)
    for status, lines, err in ended[:-1]:
        assert status == 3, err
        served = {line["phase"]: line["tokens"] for line in lines if "phase" in line}
        assert {name: served[name] for name in one_process} == one_process
        assert served["again"] == one_process["load and evict"]
        (counts,) = [line for line in lines if "compiles" in line]
        assert counts["compiles"] == 0
        assert counts["evictions"] > 0
        (refused,) = [line["refused"] for line in lines if "refused" in line]
        assert "decide alike" in refused
        assert re.findall(r"process (\d) has slot", refused) == [*map(str, range(num))]
        assert "'sql'" in refused
        # The last process was killed in a load: the others end, soon and with a reason.
        (killed,), (end,) = (
            [line[key] for line in lines if key in line] for key in ("dying", "ended")
        )
        assert next(line["at"] for line in lines if "at" in line) - killed < TIMEOUT + 10
        assert "must be alive" in end
    assert ended[-1][0] == -9


def test_one_process_agrees_with_itself():
    agree(["anything"])


def test_nothing_is_written_without_agreement():
    spec, asked, differ = make_spec(num_slots=2), [], []

    def agree_or_not(entries):
        asked.append(list(entries))
        if differ:
            raise ProcessError("they differ")

    sources = {name: make_adapter(spec, 1, seed=i) for i, name in enumerate("ab")}
    manager = lj.AdapterManager(spec, sources=sources, agree=agree_or_not)
    with manager.lease(["a"]) as lease:
        before = manager.state
        assert asked == [[f"slot {lease.slots['a'][0]}: 'a' 0 block 0"]]
        assert manager.state is before
        assert len(asked) == 1  # nothing changed, so nobody was asked
        differ.append(True)
        with manager.lease(["b"]):
            with pytest.raises(ProcessError):
                _ = manager.state
            assert not any(x.is_deleted() for x in jax.tree.leaves(before))
            differ.clear()
            (slot,) = lease.slots["a"]
            got = [slot_arrays(manager.state, "qkv", s)[0] for s in (slot, 1 - slot)]
    for array, name in zip(got, "ab", strict=True):
        np.testing.assert_array_equal(array, sources[name].arrays["qkv"].A[0])
