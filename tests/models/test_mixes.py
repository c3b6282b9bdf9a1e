"""Mixes are sums of deltas, and ranks pack into slots."""

import numpy as np
import pytest

from lorajax import SpecError, init_state, models, write_slots
from tests import hf
from tests.goldens.rows import LENGTHS, TOKENS
from tests.models import float64, support

FAMILY = "qwen2"
pytestmark = support.together(FAMILY)
CONFIG = hf.BASES[FAMILY]
MIXES = ({"plain": 0.5, "rslora": -1.25}, {"patterns": 2.0}, {}, {"plain": 1.0, "qv": 1.0})
N = len(MIXES)


def run(model, lora, weights):
    return support.run(model, lora, weights, TOKENS[:N], LENGTHS[:N])


def test_mixes_equal_merged_weights():
    spec = support.spec_for(FAMILY)
    adapters = {f: support.adapter(f, FAMILY, spec) for f in ("plain", "rslora", "patterns", "qv")}
    state, slots = support.resident(spec, adapters)
    model = support.decoder(FAMILY)
    got = run(model, state, support.weights_of(MIXES, slots, spec.num_slots))
    before = run(model, None, None)
    for row, mix in enumerate(MIXES):
        ours = models.merge_adapters(model, spec, [(adapters[f], w) for f, w in mix.items()])
        tensors = float64.merged(hf.base_tensors(CONFIG), {})
        for form, weight in mix.items():
            deltas = hf.dense_deltas(form, CONFIG)
            tensors = float64.merged(tensors, {m: weight * d for m, d in deltas.items()})
        theirs = models.from_tensors(model.config, tensors_32(tensors))
        want = run(theirs, None, None)[row]
        assert support.errors(got[row], want).max() < 1e-5
        assert support.errors(run(ours, None, None)[row], want).max() < 1e-5
        assert not mix or support.errors(before[row], want).min() > 1e-2
    np.testing.assert_array_equal(before, run(model, None, None))  # merging left it alone


def tensors_32(tensors):
    return {name: t.astype(np.float32) for name, t in tensors.items()}


def test_two_slots_equal_one_of_twice_the_rank():
    results = []
    for rank, count in ((8, 2), (16, 1)):
        spec = support.spec_for(FAMILY, slot_rank=rank)
        one = support.adapter("rslora", FAMILY, spec)  # rank 16
        assert one.num_slots == count
        state = write_slots(init_state(spec), range(1, 1 + count), one)
        weights = np.zeros((N, spec.num_slots), np.float32)
        weights[:, 1 : 1 + count] = 1
        results.append(run(support.decoder(FAMILY), state, weights))
    assert support.errors(*results).max() < 2e-6
    assert support.errors(results[0], run(support.decoder(FAMILY), None, None)).min() > 1e-2


def test_targets_of_another_layout_are_refused():
    split = support.LoraSpec.from_hf_config(CONFIG, num_slots=1, dtype="float32", merged=False)
    with pytest.raises(SpecError, match=r"self_attn\.q_proj.*merged=True"):
        run(support.decoder(FAMILY), init_state(split), np.zeros((N, 1), np.float32))
    with pytest.raises(SpecError, match=r"self_attn\.q_proj.*merged=True"):
        models.merge_adapters(support.decoder(FAMILY), split, [])
    whole = support.spec_for(FAMILY)
    with pytest.raises(SpecError, match="row_weights"):
        run(support.decoder(FAMILY), init_state(whole), None)
