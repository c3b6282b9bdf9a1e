"""`lorajax inspect`: what it shows and its exit status."""

import dataclasses

import pytest
from typer.testing import CliRunner

from lorajax.cli.app import app
from lorajax.cli.inspect_adapter import ranges
from lorajax.models import synthetic
from tests.engine import tiny


def inspect(*args):
    return CliRunner().invoke(app, ["inspect", *map(str, args)], env={"COLUMNS": "120"})


def write(folder, name, **config):
    recipe = next(r for r in synthetic.RECIPES if r.name == name)
    adapter = synthetic.make_adapter(tiny.BASE, recipe)
    changed = dataclasses.replace(adapter, config={**adapter.config, **config})
    return synthetic.write_adapter(folder / name, changed)


def row_of(result, module):
    (line,) = [x for x in result.stdout.splitlines() if x.startswith(module + " ")]
    return line.split()


def test_ranks_scales_and_slots_of_patterns(tmp_path):
    base = synthetic.write_base(tmp_path / "base", tiny.BASE)
    result = inspect(write(tmp_path, "code"), "--model", base)
    assert result.exit_code == 0, result.output
    # module, layers, rank, scale, features, dtype
    assert row_of(result, "self_attn.q_proj")[1:4] == ["0-1", "24", f"{16 / 24:g}"]
    assert row_of(result, "self_attn.o_proj")[1:4] == ["0-1", "8", "2"]
    assert row_of(result, "mlp.gate_proj")[1:4] == ["0-1", "8", "5"]
    assert row_of(result, "mlp.down_proj")[1:4] == ["0-1", "4", "2"]
    assert "2 of rank 16" in result.stdout
    assert "accepted" in result.stdout


def test_without_a_model_and_with_another_slot_rank(tmp_path):
    result = inspect(write(tmp_path, "deep"), "--slot-rank", 8)
    assert result.exit_code == 0, result.output
    assert "8 of rank 8" in result.stdout
    assert "float32" in result.stdout


def test_a_refused_adapter_says_why(tmp_path):
    result = inspect(write(tmp_path, "sql", use_dora=True))
    assert result.exit_code == 1, result.output
    assert "refused:" in result.stdout
    assert "use_dora" in result.stdout


def test_an_adapter_of_another_base_is_refused(tmp_path):
    other = dataclasses.replace(tiny.BASE, hidden_size=64)
    base = synthetic.write_base(tmp_path / "base", other)
    result = inspect(write(tmp_path, "sql"), "--model", base)
    assert result.exit_code == 1, result.output
    assert "refused:" in result.stdout
    assert "q_proj" in result.stdout


def test_a_broken_file_is_refused_without_a_traceback(tmp_path):
    folder = write(tmp_path, "sql")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    result = inspect(folder)
    assert result.exit_code == 1, result.output
    assert "refused:" in result.stdout


@pytest.mark.parametrize("args", [("/nowhere",), (".", "--slot-rank", "16")])
def test_unusable_paths(args):
    result = inspect(*args)
    assert result.exit_code == 2
    assert "error:" in result.stderr


def test_unusable_options(tmp_path):
    folder = write(tmp_path, "sql")
    assert inspect(folder, "--model", "/nowhere").exit_code == 2
    assert inspect(folder, "--slot-rank", "5").exit_code == 2


def test_ranges():
    assert ranges([3, 0, 1, 2, 7, 9, 10]) == "0-3, 7, 9-10"
    assert ranges([]) == ""
