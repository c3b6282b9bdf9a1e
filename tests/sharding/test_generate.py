"""`lorajax generate` on a mesh, and as several processes, against merged weights."""

import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lorajax.cli.app import app
from tests.cli.test_generate import GOOD, arguments, check, files, read_lines, write_lines
from tests.sharding.test_processes import free_port

__all__ = ["files"]  # the fixture
pytestmark = pytest.mark.usefixtures("quick_compiles")

LINES = [{k: v for k, v in line.items() if k != "prompt"} for line in GOOD if "prompt_ids" in line]


def is_served(path, default=5):
    for line, record in zip(LINES, read_lines(path), strict=True):
        check(line, record, logprobs=True, default=default)


@pytest.mark.parametrize("fully", [pytest.param([], marks=pytest.mark.meshes), ["--fully-sharded"]])
def test_on_a_mesh(fully, files, tmp_path):
    write_lines(tmp_path / "in.jsonl", LINES)
    extra = ["--mesh", "data=2,tensor=4", "--slots", "4", "--logprobs", "--max-tokens", "5"]
    result = CliRunner().invoke(app, arguments(files, tmp_path, *extra, *fully))
    assert result.exit_code == 0, result.output
    assert "steps of 6 rows" in result.stderr
    is_served(tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--mesh", "tensor"], "AXIS=SIZE.*'tensor'"),
        (["--mesh", "heads=2"], "AXIS=SIZE.*'heads=2'"),
        (["--mesh", "tensor=2,tensor=2"], "once; got 'tensor'"),
        (["--mesh", "tensor=16"], "at most the 8.*got 16"),
        (["--mesh", "tensor=8"], "num_attention_heads.*8 devices; got 4"),
        (["--process-id", "1"], "together; got"),
        (["--fully-sharded"], "mesh that cuts slots; got no --mesh"),
    ],
)
def test_unusable_arguments(extra, words, files, tmp_path):
    write_lines(tmp_path / "in.jsonl", LINES)
    result = CliRunner().invoke(app, arguments(files, tmp_path, *extra))
    assert result.exit_code == 2
    assert re.search(words, result.stderr)
    assert not (tmp_path / "out.jsonl").exists()


def run_two(files, tmp_path, inputs):
    """(exit status, standard error) of two processes that run the command."""
    port, running = free_port(), []
    for i, lines in enumerate(inputs):
        (tmp_path / str(i)).mkdir(exist_ok=True)
        write_lines(tmp_path / str(i) / "in.jsonl", lines)
        extra = ["--mesh", "data=2,tensor=2", "--fully-sharded", "--slots", "4", "--logprobs"]
        extra += ["--max-tokens", "5"]
        extra += ["--coordinator", f"localhost:{port}", "--num-processes", "2"]
        command = [sys.executable, "-c", "from lorajax.cli import main; main()"]
        command += arguments(files, tmp_path / str(i), *extra, "--process-id", str(i))
        env = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        running.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=120)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, error) for process, error in zip(running, errors, strict=True)]


def test_two_processes(files, tmp_path):
    for status, error in run_two(files, tmp_path, [LINES, LINES]):
        assert status == 0, error
    is_served(tmp_path / "0" / "out.jsonl")
    assert not (tmp_path / "1" / "out.jsonl").exists()


def test_two_processes_with_different_inputs(files, tmp_path):
    for status, error in run_two(files, tmp_path, [LINES, LINES[1:]]):
        assert status == 2
        assert "all processes must decide alike" in error
        assert "process 1 has input" in error
        assert "Traceback" not in error
    assert not (tmp_path / "0" / "out.jsonl").exists()
