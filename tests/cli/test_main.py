"""The entry point without its extra."""

import importlib.util

import pytest

from lorajax import cli


def test_a_missing_extra_is_told_in_one_line(monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "typer" else real(name)
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message == "the command line needs typer; run: pip install 'lorajax[cli]'\n"


def test_help_lists_the_commands(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lorajax", "--help"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for command in ("demo", "generate", "inspect"):
        assert command in shown


def test_help_of_generate_shows_the_line_format_whole(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lorajax", "generate", "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main()
    assert '"prompt_ids": [int]' in capsys.readouterr().out
