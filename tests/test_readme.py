"""The README's loop, run as written, against float64."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from lorajax.models.synthetic import (
    AdapterRecipe,
    SyntheticBase,
    make_adapter,
    write_adapter,
    write_base,
)

ROOT = Path(__file__).parent.parent
BASE = SyntheticBase(hidden_size=32, intermediate_size=48)
TOKEN_ROW = np.array([0, 0, 1, 2, -1, 2], np.int32)
ROWS = [{"sql": 1.0}, {}, {"sql": 0.7, "chat": 0.3}]


def readme():
    return (ROOT / "README.md").read_text()


def test_the_loop_of_the_readme(tmp_path, monkeypatch):
    (loop,) = re.findall(r"```python\n(.*?)```", readme(), re.DOTALL)
    assert len([line for line in loop.splitlines() if line.strip()]) <= 13  # with its import
    cfg = write_base(tmp_path / "base", BASE)
    adapters = {n: make_adapter(BASE, AdapterRecipe(n, r)) for n, r in (("sql", 40), ("chat", 8))}
    for name, adapter in adapters.items():
        write_adapter(tmp_path / "adapters" / name, adapter)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((len(TOKEN_ROW), 32), np.float32)
    o = rng.standard_normal((BASE.num_hidden_layers, 32, 32), np.float32) / 8
    monkeypatch.chdir(tmp_path)
    names = {
        "cfg": cfg,
        "params": {"layers": [{"o": jnp.asarray(w)} for w in o]},
        "x": jnp.asarray(x),
        "token_row": TOKEN_ROW,
    }
    exec(compile(loop, "README.md", "exec"), names)

    want = np.float64(x)
    for layer, w in enumerate(o):
        y = want @ w
        for t, row in enumerate(TOKEN_ROW):
            for name, weight in ROWS[row].items() if row >= 0 else ():
                path = f"model.layers.{layer}.self_attn.o_proj"
                y[t] += weight * want[t] @ adapters[name].delta(BASE)[path].T
        want = want + y
    got = np.float64(names["y"])
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-5


def test_the_first_screen_is_the_two_commands_and_the_loop():
    text = readme()
    assert text.index("make demo") < text.index("make test") < text.index("```python")
    assert text[: text.index("```python")].count("\n") < 20


def test_links_of_the_docs_exist():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
