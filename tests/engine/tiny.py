"""A tiny base with adapters for the engine's and the command line's tests, and their oracle."""

import functools
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from lorajax import models
from lorajax.models import synthetic

BASE = synthetic.SyntheticBase(
    hidden_size=32, intermediate_size=48, vocab_size=64, max_position_embeddings=96
)
#: Name to adapter; at slot rank 16 they take 1, 1, 2, 1, 4 slots.
ADAPTERS = {
    r.name: synthetic.make_adapter(BASE, r)
    for r in synthetic.RECIPES
    if r.name in ("chat", "sql", "law", "phi", "deep")
}
_LENGTH = 64
_CONFIG = models.ModelConfig.from_hf(BASE.config())
_prefill = jax.jit(models.prefill, static_argnums=0)


def write(folder: Path) -> tuple[Path, dict[str, Path]]:
    """Writes the base and all adapters."""
    sources = {n: synthetic.write_adapter(folder / n, a) for n, a in ADAPTERS.items()}
    return synthetic.write_base(folder / "base", BASE), sources


def prompt(seed: int, length: int | None = None) -> tuple[int, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(3, BASE.vocab_size, length or rng.integers(2, 17)).tolist())


@functools.cache
def _model(mix: tuple[tuple[str, float], ...]):
    parts = [(ADAPTERS[name], weight) for name, weight in mix]
    return nnx.split(models.from_tensors(_CONFIG, synthetic.merged_tensors(BASE, parts)))


def merged_greedy(
    adapter: str | Mapping[str, float] | None,
    prompt_ids: tuple[int, ...],
    max_tokens: int,
    eos: frozenset[int] = frozenset(),
) -> tuple[list[int], list[float]]:
    """Tokens and log probabilities of the merged model: no cache, one prefill a token."""
    mix = {adapter: 1.0} if isinstance(adapter, str) else dict(adapter or {})
    graphdef, params = _model(tuple(sorted(mix.items())))
    text, tokens, logprobs = list(prompt_ids), [], []
    cache = models.init_cache(_CONFIG, 1, _LENGTH, np.float32)
    while len(tokens) < max_tokens and not (tokens and tokens[-1] in eos):
        padded = np.zeros((1, _LENGTH), np.int32)
        padded[0, : len(text)] = text
        length, row = np.array([len(text)], np.int32), np.zeros(1, np.int32)
        logits, _ = _prefill(graphdef, params, None, cache, padded, length, row, None)
        scores = np.asarray(logits[0], np.float64)
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores.max() - np.logaddexp.reduce(scores)))
        text.append(tokens[-1])
    return tokens, logprobs
