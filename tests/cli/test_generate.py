"""`lorajax generate`: its files, exit status and messages, against merged weights."""

import dataclasses
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from lorajax.cli.app import app
from lorajax.cli.generate import GenerateOptions, generate
from tests.engine import tiny

pytestmark = pytest.mark.usefixtures("quick_compiles")

EOS = frozenset({tiny.BASE.eos_token_id})


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    base, sources = tiny.write(tmp_path_factory.mktemp("tiny"))
    vocab = {f"w{i}": i for i in range(tiny.BASE.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(base / "tokenizer.json"))
    return base, sources


def arguments(files, tmp_path, *extra, adapters=tuple(tiny.ADAPTERS)):
    base, sources = files
    out = ["generate", "--model", str(base)]
    for name in adapters:
        out += ["--adapter", f"{name}={sources[name]}"]
    paths = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    return [*out, *paths, *extra]


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


GOOD = [
    {"id": "base", "prompt_ids": tiny.prompt(0, 4), "adapter": None, "max_tokens": 9},
    {"id": "sql", "prompt_ids": tiny.prompt(1, 9), "adapter": "sql", "max_tokens": 2},
    {"id": "deep", "prompt_ids": tiny.prompt(2, 13), "adapter": "deep", "max_tokens": 7},
    {"id": "text", "prompt": "w5 w9 w33 w60", "adapter": "law"},
    {"id": "mix", "prompt_ids": tiny.prompt(4, 6), "adapter": {"phi": 0.5, "chat": -0.5}},
    {"id": "phi", "prompt_ids": tiny.prompt(5, 16), "adapter": "phi", "max_tokens": 1},
]
BAD = {
    "who": {"id": "who", "prompt_ids": [1], "adapter": "nobody"},
    "big": {"id": "big", "prompt_ids": [1], "adapter": {"deep": 1, "law": 1}},
    "long": {"id": "long", "prompt_ids": [1] * 90, "adapter": None, "max_tokens": 7},
    "none": {"id": "none", "prompt_ids": [], "adapter": "sql"},
    "vocab": {"id": "vocab", "prompt_ids": [64]},
    "zero": {"id": "zero", "prompt_ids": [1], "max_tokens": 0},
}
WHY = {
    "who": "'nobody'",
    "big": "slots",
    "long": "must fit 96 positions",
    "none": "must have a token",
    "vocab": r"\[0, 64\); got 64",
    "zero": "at least 1; got 0",
}


def check(line, record, *, logprobs, default=5):
    prompt = line.get("prompt_ids") or [int(word[1:]) for word in line["prompt"].split()]
    tokens, scores = tiny.merged_greedy(
        line.get("adapter"), tuple(prompt), line.get("max_tokens", default), EOS
    )
    assert record["id"] == line["id"]
    assert record["token_ids"] == tokens
    assert set(record) == {"id", "token_ids"} | ({"logprobs"} if logprobs else set())
    if logprobs:
        np.testing.assert_allclose(record["logprobs"], scores, rtol=1e-5, atol=1e-5)


def test_good_and_bad_lines_share_a_file(files, tmp_path):
    lines = [line for pair in zip(GOOD, BAD.values(), strict=True) for line in pair]
    write_lines(tmp_path / "in.jsonl", lines)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("not json\n")
    extra = ["--slots", "4", "--logprobs", "--max-tokens", "5", "--batch-size", "4"]
    result = CliRunner().invoke(app, arguments(files, tmp_path, *extra))
    assert result.exit_code == 1, result.output
    records = read_lines(tmp_path / "out.jsonl")
    assert [r["id"] for r in records] == [*(line["id"] for line in lines), None]
    by_id = {r["id"]: r for r in records}
    for line in GOOD:
        check(line, by_id[line["id"]], logprobs=True)
    for name, why in WHY.items():
        assert set(by_id[name]) == {"id", "error"}
        assert re.search(why, by_id[name]["error"])
    assert re.search(r"served 6 of 13 lines", result.stderr)
    assert int(re.search(r"(\d+) evictions", result.stderr)[1]) > 0
    assert result.stdout == ""


def test_the_installed_command_serves_a_file(files, tmp_path):
    write_lines(tmp_path / "in.jsonl", GOOD[:2])
    command = [sys.executable, "-c", "from lorajax.cli import main; main()"]
    done = subprocess.run(
        command + arguments(files, tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "served 2 of 2 lines" in done.stderr
    assert "\x1b" not in done.stderr
    for line, record in zip(GOOD[:2], read_lines(tmp_path / "out.jsonl"), strict=True):
        check(line, record, logprobs=False)


def test_a_terminal_sees_progress_and_bfloat16_is_served(files, tmp_path):
    write_lines(tmp_path / "in.jsonl", GOOD[1:2])
    screen = io.StringIO()
    opts = GenerateOptions(
        model=files[0],
        adapters={"sql": files[1]["sql"]},
        input=tmp_path / "in.jsonl",
        output=tmp_path / "out.jsonl",
        max_tokens=4,
        dtype="bfloat16",
        slots=None,
        slot_rank=16,
        batch_size=1,
        logprobs=False,
    )
    assert generate(opts, Console(file=screen, force_terminal=True, width=100)) == 0
    assert "serving" in screen.getvalue()
    assert [len(r["token_ids"]) for r in read_lines(tmp_path / "out.jsonl")] == [2]


def test_an_implementation_can_be_asked_for(files, tmp_path):
    write_lines(tmp_path / "in.jsonl", GOOD[1:2])
    result = CliRunner().invoke(app, arguments(files, tmp_path, "--implementation", "xla"))
    assert result.exit_code == 0, result.output
    check(GOOD[1], *read_lines(tmp_path / "out.jsonl"), logprobs=False)


def test_an_empty_file_is_served(files, tmp_path):
    (tmp_path / "in.jsonl").write_text("\n")
    result = CliRunner().invoke(app, arguments(files, tmp_path))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out.jsonl").read_text() == ""


def refused(args, tmp_path, message):
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2, result.output
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    assert "unexpected" not in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--dtype", "float8"], r"--dtype must be one of .* got 'float8'"),
        (["--slots", "2"], r"rank 64 of 'deep' for 2 slots of rank 16 .*--slots 4"),
        (["--slots", "0"], r"--slots must be at least 1; got 0"),
        (["--batch-size", "0"], r"--batch-size must be at least 1"),
        (["--max-tokens", "0"], r"--max-tokens must be at least 1"),
        (["--slot-rank", "12"], r"slot_rank must be a multiple of 8; got 12"),
        (["--adapter", "sql"], r"NAME=DIR; got 'sql'"),
        (["--adapter", "sql=x"], r"'sql' twice"),
        (["--adapter", "new=/nowhere"], r"adapter 'new' must be a folder; got nothing"),
        (["--adapter", "a b=."], r"adapter 'a b' must have a adapter_config.json|a b"),
        (["--input", "/nowhere.jsonl"], r"input must be a file.*/nowhere.jsonl"),
        (["--input", "."], r"input must be a file"),
        (["--output", "."], r"output must be a file; got the folder"),
        (["--implementation", "fast"], r"implementation must be one of .* got 'fast'"),
        (["--implementation", "mosaic_gpu"], r"it needs an NVIDIA GPU .*; got cpu; .*the default"),
        (["--output", "/nowhere/out.jsonl"], r"folder of an output must be there"),
        (["--model", "/nowhere"], r"model must be a folder; got nothing at /nowhere"),
    ],
)
def test_unusable_arguments(files, tmp_path, extra, message):
    write_lines(tmp_path / "in.jsonl", GOOD)
    refused(arguments(files, tmp_path, *extra), tmp_path, message)


def test_input_and_output_must_differ(files, tmp_path):
    write_lines(tmp_path / "in.jsonl", GOOD)
    before = (tmp_path / "in.jsonl").read_bytes()
    extra = ["--output", str(tmp_path / "in.jsonl")]
    refused(arguments(files, tmp_path, *extra), tmp_path, "input and output must be two files")
    assert (tmp_path / "in.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config"),
        ("config.json", '{"model_type": "mamba"}', "mamba"),
        ("generation_config.json", "[]", "generation_config.json"),
        ("model.safetensors", "short", "safetensors"),
        ("model.safetensors", None, "safetensors"),
        ("tokenizer.json", "{}", "tokenizer.json"),
    ],
)
def test_unusable_models(files, tmp_path, file, content, message):
    tiny.synthetic.write_base(tmp_path / "base", tiny.BASE)
    if content is None:
        (tmp_path / "base" / file).unlink()
    else:
        (tmp_path / "base" / file).write_text(content)
    write_lines(tmp_path / "in.jsonl", GOOD)
    refused(arguments((tmp_path / "base", files[1]), tmp_path), tmp_path, message)


def test_text_without_a_tokenizer_fails_its_line_only(files, tmp_path):
    base = tiny.synthetic.write_base(tmp_path / "base", tiny.BASE)
    write_lines(tmp_path / "in.jsonl", [GOOD[3]])
    result = CliRunner().invoke(app, arguments((base, files[1]), tmp_path))
    assert result.exit_code == 1, result.output
    (record,) = read_lines(tmp_path / "out.jsonl")
    assert "tokenizer.json" in record["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, r"'bad'.*use_dora"),
        ({"peft_type": "IA3"}, r"'bad'.*IA3"),
        ({"r": 9}, r"'bad'.*rank"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_named_with_its_reason(
    files, tmp_path, change, message
):
    adapter = tiny.ADAPTERS["sql"]
    config = {**adapter.config, **change}
    bad = tiny.synthetic.write_adapter(
        tmp_path / "bad", dataclasses.replace(adapter, config=config)
    )
    write_lines(tmp_path / "in.jsonl", GOOD[:1])
    refused(arguments(files, tmp_path, "--adapter", f"bad={bad}"), tmp_path, f"(?s){message}")


def test_a_broken_weight_file_is_named(files, tmp_path):
    bad = tiny.synthetic.write_adapter(tmp_path / "bad", tiny.ADAPTERS["sql"])
    (bad / "adapter_model.safetensors").write_bytes(b"\x10")
    write_lines(tmp_path / "in.jsonl", GOOD[:1])
    refused(arguments(files, tmp_path, "--adapter", f"bad={bad}"), tmp_path, "'bad'")


def test_a_pattern_that_matches_nothing_is_warned_of(files, tmp_path):
    adapter = tiny.ADAPTERS["sql"]
    config = {**adapter.config, "alpha_pattern": {"nothing": 3}}
    odd = tiny.synthetic.write_adapter(
        tmp_path / "odd", dataclasses.replace(adapter, config=config)
    )
    (tmp_path / "in.jsonl").write_text("")
    args = arguments(files, tmp_path, "--adapter", f"odd={odd}", adapters=())
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "warning:" in result.stderr
    assert "'nothing'" in result.stderr
