"""bfloat16: serving through slots is about as exact as the merged bfloat16 model."""

import ml_dtypes
import numpy as np
import pytest

from lorajax import models
from tests import hf
from tests.goldens.rows import LENGTHS, STEPS, TOKENS
from tests.models import float64, support

MIXES = (
    {},
    {"all_linear": 1.0},
    {"rslora": 1.0},
    {"qv": 1.0},
    {"patterns": 1.0},
    {"rslora": 0.7, "plain": -0.4},
)
FORMS = ("all_linear", "rslora", "qv", "patterns", "plain")
N = len(MIXES)
TOK, LEN = TOKENS[:N], LENGTHS[:N]


def deltas_of(mix: dict[str, float], config: dict, seed: int) -> dict[str, np.ndarray]:
    total: dict[str, np.ndarray] = {}
    for form, weight in mix.items():
        for module, delta in hf.dense_deltas(form, config, seed).items():
            total[module] = total.get(module, 0.0) + weight * delta
    return total


def reference(config: dict, tensors: dict[str, np.ndarray], row: int) -> np.ndarray:
    out = float64.logits(config, tensors, TOK[row][: LEN[row] + STEPS - 1])
    return out[LEN[row] - 1 :]


@pytest.mark.parametrize("family", support.cases("qwen2", "qwen3"))
def test_float64_reference_agrees_with_float32(family):
    config = hf.BASES[family]
    got = support.run(support.decoder(family), None, None, TOK, LEN)
    tensors = float64.merged(hf.base_tensors(config), {})
    want = np.stack([reference(config, tensors, row) for row in range(N)])
    assert support.errors(got, want).max() < 1e-5


@pytest.mark.parametrize("family", support.cases("qwen2", "qwen3", dtype="bfloat16"))
def test_no_worse_than_twice_the_merged_model(family):
    config, seeds = hf.BASES[family], (1, 2, 3)
    spec = support.spec_for(family, dtype="bfloat16")
    ours, rounded = np.zeros((N, STEPS)), np.zeros((N, STEPS))
    for seed in seeds:
        model = support.decoder(family, "bfloat16", seed)
        base = {k: v.astype(ml_dtypes.bfloat16) for k, v in hf.base_tensors(config, seed).items()}
        adapters = {f: support.adapter(f, family, spec, seed) for f in FORMS}
        state, slots = support.resident(spec, adapters)
        weights = support.weights_of(MIXES, slots, spec.num_slots)
        got = support.run(model, state, weights, TOK, LEN)
        for row, mix in enumerate(MIXES):
            exact = float64.merged(base, deltas_of(mix, config, seed))
            want = reference(config, exact, row)
            whole = {k: v.astype(ml_dtypes.bfloat16) for k, v in exact.items()}
            plain = models.from_tensors(model.config, whole, dtype="bfloat16")
            other = support.run(plain, None, None, TOK, LEN)[row]
            ours[row] += support.errors(got[row], want) ** 2
            rounded[row] += support.errors(other, want) ** 2
    ratio = np.sqrt(ours.mean(axis=1) / rounded.mean(axis=1))
    assert ratio[0] == 1.0, "the base row is the base model, bit for bit"
    assert ratio.max() <= 2.0, ratio
    assert np.sqrt(rounded.mean(axis=1) / len(seeds)).max() < 0.1
    assert rounded.min() > 0
