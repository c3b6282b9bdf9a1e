"""Times one forward step of a small Llama with adapters against other ways to do it, on this CPU.

    python benchmarks/step.py [--json FILE] [--rows 32] [--repeats 15]

One model, one run: the base alone, this library's step, the same model on a per-token gather, a
one-hot einsum and `ragged_dot`, and, where the extra `oracle` is installed, PEFT's own mixed batch
(`adapter_names`). Contestants take turns, each repeat on fresh tokens; figures are medians, and
ratios are to the base of the same framework's row. Every contestant's logits are compared first.
"""

import argparse
import contextlib
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from forms import FORMS, linear

import lorajax as lj
from lorajax.kernels_pallas.checks import Implementation, always
from lorajax.kernels_pallas.lora_linear import api
from lorajax.models import init_cache, load_model
from lorajax.models.synthetic import (
    AdapterRecipe,
    SyntheticBase,
    make_adapter,
    write_adapter,
    write_base,
)

#: Widths of SmolLM2-135M, which people do run on a CPU; fewer layers and a small vocabulary.
BASE = SyntheticBase(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=6,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=512,
)
RANK = 16


def forward(graphdef, params, lora, tokens, row_weights):
    """Logits of the last token of each row, after a prompt of Q tokens."""
    model = nnx.merge(graphdef, params)
    N, Q = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(Q, dtype=jnp.int32), (N, Q))
    routing = None
    if lora is not None:
        routing = lj.make_routing(row_weights, jnp.repeat(jnp.arange(N, dtype=jnp.int32), Q))
    cache = init_cache(model.config, N, Q, jnp.float32)
    hidden, _ = model(tokens, positions, cache, lora, routing)
    return model.logits(hidden[:, -1])


@contextlib.contextmanager
def form(delta: Callable | None):
    """Makes the model's `lora_linear` compute its delta in another way while it is traced."""
    if delta is None:
        yield
        return
    with mock.patch.dict(api.IMPLEMENTATIONS, xla=Implementation(linear(delta), None, always)):
        yield


def contestants(folder: Path, adapters: list[Path], rows: int, length: int) -> Mapping:
    """(name, function of tokens) for each way, compiled."""
    graphdef, params = nnx.split(load_model(folder, dtype="float32"))
    spec = lj.LoraSpec.from_hf_config(folder, num_slots=len(adapters), slot_rank=RANK)
    manager = lj.AdapterManager(spec, sources={p.name: p for p in adapters})
    names = [adapters[i % len(adapters)].name for i in range(rows)]
    lease = manager.lease(names)  # held for the life of the process
    tokens = jnp.zeros((rows, length), jnp.int32)
    built = {}
    for name, delta in {"base": None, "lorajax": None, **FORMS}.items():
        with form(delta):
            lora = None if name == "base" else manager.state
            run = functools.partial(forward, graphdef)
            compiled = jax.jit(run).lower(params, lora, tokens, lease.row_weights).compile()
        built[name] = functools.partial(_call, compiled, params, lora, lease.row_weights)
    return built | peft_contestants(folder, adapters, names)


def _call(compiled, params, lora, row_weights, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(compiled(params, lora, jnp.asarray(tokens), row_weights))


def peft_contestants(folder: Path, adapters: list[Path], names: list[str]) -> Mapping:
    """Transformers alone, and PEFT's mixed batch; nothing where they are not installed."""
    try:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
    except ImportError:
        return {}
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapters[0], adapter_name=adapters[0].name)
    for path in adapters[1:]:
        model.load_adapter(path, adapter_name=path.name)
    model.eval()

    def call(model, kwargs: dict, tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(tokens), use_cache=False, **kwargs).logits[:, -1].numpy()

    return {
        "transformers base": functools.partial(call, plain, {}),
        "PEFT mixed batch": functools.partial(call, model, {"adapter_names": names}),
    }


def measure(folder: Path, adapters: list[Path], rows: int, length: int, repeats: int) -> dict:
    """Median milliseconds of each contestant; their logits must agree."""
    built = contestants(folder, adapters, rows, length)
    rng = np.random.default_rng(0)
    draw = lambda: rng.integers(0, BASE.vocab_size, (rows, length))
    tokens, times = draw(), {name: [] for name in built}
    want = built["lorajax"](tokens)
    for name, run in built.items():
        got = run(tokens)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert ("base" in name) == (error > 1e-2), (name, error)
        assert "base" in name or error < 1e-4, (name, error)
    for _ in range(repeats):
        tokens = draw()
        for name, run in built.items():
            start = time.perf_counter()
            run(tokens)
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as temp:
        folder = write_base(Path(temp) / "base", BASE)
        recipes = [AdapterRecipe(f"a{i}", RANK) for i in range(32)]
        paths = [
            write_adapter(Path(temp) / r.name, make_adapter(BASE, r, strength=0.2)) for r in recipes
        ]
        print(f"{'':38}" + "ms (ratio to the JAX base)")
        for length in (1, 16):
            for count in (1, 8, 32):
                row = measure(folder, paths[:count], args.rows, length, args.repeats)
                results.append({"tokens_a_row": length, "adapters": count, "ms": row})
                print(f"\n{args.rows} rows x {length} tokens, {count} adapters of rank {RANK}")
                for name, ms in row.items():
                    print(f"  {name:20} {ms:9.2f}  {ms / row['base']:6.2f}x", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
