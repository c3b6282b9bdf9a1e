"""The command line with adapters of the embedding and the head, as PEFT saves them."""

import json

import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

from lorajax.cli.app import app
from tests import hf
from tests.models import float64

pytestmark = pytest.mark.usefixtures("quick_compiles")

CONFIG = hf.BASES["qwen2"]  # tied
PROMPT, TOKENS = [5, 17, 88, 40], 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    tensors = hf.base_tensors(CONFIG)
    hf.write_base(folder / "base", CONFIG, tensors)
    for form in hf.VOCABULARY:
        hf.write_adapter(folder / form, form, CONFIG)
    path = folder / "vocabulary" / "adapter_model.safetensors"
    factors = safetensors.numpy.load_file(path)
    copies = {
        f"base_model.model.{m}.base_layer.weight": tensors["model.embed_tokens.weight"]
        for m in (hf.EMBEDDING, hf.HEAD)
    }
    safetensors.numpy.save_file({**factors, **copies}, path)
    return folder


def greedy(form):
    """Tokens of the merged model, in float64."""
    tensors = hf.base_tensors(CONFIG)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    merged = float64.merged(tensors, hf.dense_deltas(form, CONFIG) if form else {})
    text = list(PROMPT)
    for _ in range(TOKENS):
        text.append(int(float64.logits(CONFIG, merged, np.array(text))[-1].argmax()))
    return text[len(PROMPT) :]


@pytest.mark.parametrize("extra", [[], ["--mesh", "data=2,tensor=2"]])
def test_generate(files, tmp_path, extra):
    forms = [None, *hf.VOCABULARY]
    lines = [{"id": str(f), "prompt_ids": PROMPT, "adapter": f} for f in forms]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = ["generate", "--model", str(files / "base"), "--max-tokens", str(TOKENS), *extra]
    args += [a for f in hf.VOCABULARY for a in ("--adapter", f"{f}={files / f}")]
    args += ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    got = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    want = [greedy(form) for form in forms]
    assert [record["token_ids"] for record in got] == want
    assert len({tuple(tokens) for tokens in want}) > 1


def test_inspect(files):
    result = CliRunner().invoke(
        app,
        ["inspect", str(files / "vocabulary"), "--model", str(files / "base")],
        env={"COLUMNS": "160"},
    )
    assert result.exit_code == 0, result.output
    (line,) = [x.split() for x in result.stdout.splitlines() if x.startswith("model.embed_tokens ")]
    assert line[1:] == ["-", "4", "1.25", "96", "->", "48", "bfloat16"]
    assert "accepted" in result.stdout
    alone = CliRunner().invoke(app, ["inspect", str(files / "vocabulary")])
    assert "repeats weights of its base" in alone.stdout
    assert "repeats" not in result.stdout
