"""`lorajax demo`: it passes, and says so in JSON; a failed check fails it."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from lorajax.cli import app as app_module
from lorajax.cli.demo import DemoReport, DemoRow

GOOD = DemoReport(
    rows=(DemoRow("base", "", "-", 0, (1, 2, 3, 4), 1e-6, True),),
    adapters=1,
    slots_needed=9,
    base_rows_bit_equal=True,
    evictions=3,
    new_compiles=0,
    step_ms_base=1.0,
    step_ms_lora=1.5,
    seconds=1.0,
)


def test_the_demo_passes(tmp_path):
    path = tmp_path / "demo.json"
    result = CliRunner().invoke(app_module.app, ["demo", "--json", str(path)])
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert set(report) == {
        "rows",
        "adapters",
        "max_rel_err",
        "base_rows_bit_equal",
        "evictions",
        "new_compiles_after_warmup",
        "step_ms_base",
        "step_ms_lora",
    }
    assert report["adapters"] >= 8
    assert report["rows"] > report["adapters"]
    assert 0 < report["max_rel_err"] <= 1e-5
    assert report["base_rows_bit_equal"] is True
    assert report["evictions"] > 0
    assert report["new_compiles_after_warmup"] == 0
    assert report["step_ms_lora"] > 0
    assert report["step_ms_base"] > 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for name in ("0.7 sql + 0.3 chat", "fused names", "rsLoRA", "base"):
        assert any(name in line for line in lines)
    assert sum(line.startswith("ok") for line in lines) == 4


BAD_ROW = DemoRow("sql", "", "8", 1, (1, 2, 3, 4), 2e-5, True)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": (*GOOD.rows, BAD_ROW)},
        {"rows": (dataclasses.replace(GOOD.rows[0], same_tokens=False),)},
        {"rows": (dataclasses.replace(GOOD.rows[0], error=float("nan")),)},
        {"base_rows_bit_equal": False},
        {"evictions": 0},
        {"new_compiles": 1},
    ],
)
def test_a_failed_check_fails_the_demo(monkeypatch, change):
    report = dataclasses.replace(GOOD, **change)
    monkeypatch.setattr(app_module, "run_demo", lambda: iter(["working", report]))
    result = CliRunner().invoke(app_module.app, ["demo"])
    assert result.exit_code == 1
    assert result.stdout.count("FAILED") == 1


def test_a_json_path_that_cannot_be_written_is_told_at_once(monkeypatch):
    monkeypatch.setattr(app_module, "run_demo", lambda: iter([]))
    result = CliRunner().invoke(app_module.app, ["demo", "--json", "/nowhere/demo.json"])
    assert result.exit_code == 2
    assert "/nowhere" in result.stderr
