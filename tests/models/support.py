"""Decoders, slots and steps for the tests of the models."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from lorajax import Adapter, LoraSpec, LoraState, init_state, models, write_slots
from lorajax.adapters import adapter_from_tensors
from lorajax.adapters import load_adapter as load_adapter
from tests import hf
from tests.goldens.rows import LENGTHS, PROMPT, STEPS, TOKENS

split = nnx.split
prefill = jax.jit(models.prefill, static_argnums=0)
decode = jax.jit(models.decode, static_argnums=0)


def together(family: str, dtype: str = "float32") -> pytest.MarkDecorator:
    """The tests of one model go to one worker, which compiles its steps once."""
    return pytest.mark.xdist_group(f"{family}-{dtype}")


def cases(*families: str, dtype: str = "float32") -> list[Any]:
    """Values of a test's `family`, each marked so."""
    return [pytest.param(family, marks=together(family, dtype)) for family in families]


@functools.cache
def decoder(family: str, dtype: str = "float32", seed: int = 0) -> models.Decoder:
    config = hf.BASES[family]
    tensors = hf.base_tensors(config, seed)
    return models.from_tensors(models.ModelConfig.from_hf(config), tensors, dtype=dtype)


def spec_for(
    family: str, num_slots: int = 20, dtype: str = "float32", slot_rank: int = 16
) -> LoraSpec:
    """Slots of everything that adapters may change."""
    return LoraSpec.from_hf_config(
        hf.BASES[family],
        num_slots=num_slots,
        slot_rank=slot_rank,
        dtype=dtype,
        targets=(*hf.LINEAR, "embed_tokens", "lm_head"),
    )


def adapter(form: str, family: str, spec: LoraSpec, seed: int = 0) -> Adapter:
    tensors = hf.adapter_tensors(form, hf.BASES[family], seed)
    return adapter_from_tensors(hf.adapter_config(form), tensors, spec, name=form)


def resident(spec: LoraSpec, adapters: Mapping[str, Adapter]) -> tuple[LoraState, dict[str, Any]]:
    """A state with the adapters in it, and the slots of each."""
    state, slots, free = init_state(spec), {}, 0
    for name, one in adapters.items():
        slots[name] = list(range(free, free + one.num_slots))
        free += one.num_slots
        state = write_slots(state, slots[name], one)
    return state, slots


def weights_of(
    rows: Sequence[Mapping[str, float]], slots: Mapping[str, Sequence[int]], num_slots: int
) -> np.ndarray:
    """`f32[N, S]`."""
    out = np.zeros((len(rows), num_slots), np.float32)
    for i, mix in enumerate(rows):
        for name, weight in mix.items():
            out[i, list(slots[name])] = weight
    return out


def run(
    model: models.Decoder,
    lora: LoraState | None,
    row_weights: np.ndarray | None,
    tokens: np.ndarray = TOKENS,
    lengths: np.ndarray = LENGTHS,
) -> np.ndarray:
    """`[N, STEPS, V]`: prefill of every row in one batch, then teacher-forced decode steps.

    The batch is filled up with idle rows, so that the tests share compiled steps.
    """
    graphdef, params = split(model)
    N, idle = len(tokens), len(TOKENS) - len(tokens)
    tokens, lengths = np.pad(tokens, ((0, idle), (0, 0))), np.pad(lengths, (0, idle))
    if row_weights is not None:
        row_weights = np.pad(row_weights, ((0, idle), (0, 0)))
    rows = np.arange(N + idle, dtype=np.int32)
    cache = models.init_cache(model.config, N + idle, PROMPT + STEPS, model.embed[...].dtype)
    logits, cache = prefill(
        graphdef, params, lora, cache, tokens[:, :PROMPT], lengths, rows, row_weights
    )
    out = [logits]
    for step in range(STEPS - 1):
        at = np.where(rows < N, lengths + step, -1).astype(np.int32)
        logits, cache = decode(graphdef, params, lora, cache, tokens[rows, at], at, row_weights)
        out.append(logits)
    return np.stack([np.asarray(x)[:N] for x in out], axis=1)


def errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative error of each vector of scores: norm of the difference by norm of the wanted."""
    difference = got.astype(np.float64) - want.astype(np.float64)
    return np.linalg.norm(difference, axis=-1) / np.linalg.norm(want.astype(np.float64), axis=-1)
