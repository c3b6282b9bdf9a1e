"""Adapters on the embedding and the head: alone in their rows, and merged."""

import dataclasses

import numpy as np
import pytest

from lorajax import AdapterManager, LoraSpec, models
from tests import hf
from tests.goldens.rows import LENGTHS, TOKENS
from tests.models import float64, support
from tests.models.test_base_rows import bits

ROWS = 5
TOK, LEN = TOKENS[:ROWS], LENGTHS[:ROWS]
MIXES = [{}, {"vocabulary": 1.0}, {"head": 1.0}, {"embedding": -0.5, "head": 2.0}, {}]
BASE = [0, 4]


def spoilt(adapter, target, part, at):
    """The adapter with a NaN in one entry."""
    packed = adapter.arrays[target]
    array = getattr(packed, part).copy()
    array[at] = np.nan
    arrays = {**adapter.arrays, target: dataclasses.replace(packed, **{part: array})}
    return dataclasses.replace(adapter, arrays=arrays)


# Of each two families, one has a tied head.
@pytest.mark.parametrize("family", support.cases("llama3", "qwen3", dtype="bfloat16"))
def test_a_broken_adapter_stays_alone(family):
    model, spec = support.decoder(family, "bfloat16"), support.spec_for(family, dtype="bfloat16")
    forms = {form: support.adapter(form, family, spec) for form in hf.VOCABULARY}
    plain = support.run(model, None, None, TOK, LEN)
    state, slots = support.resident(spec, forms)
    weights = support.weights_of(MIXES, slots, spec.num_slots)
    sound = support.run(model, state, weights, TOK, LEN)
    assert np.isfinite(sound).all()
    np.testing.assert_array_equal(bits(sound[BASE]), bits(plain[BASE]))
    assert all((sound[i] != plain[i]).any() for i in range(ROWS) if i not in BASE)
    for target, part in ((hf.EMBEDDING, "A"), (hf.EMBEDDING, "B"), (hf.HEAD, "A"), (hf.HEAD, "B")):
        # Of A of the embedding, the column of the row's first token.
        at = (0, 0, 0, 0, TOK[1, 0]) if part == "A" and target == hf.EMBEDDING else 0
        broken = {**forms, "vocabulary": spoilt(forms["vocabulary"], target, part, at)}
        state, _ = support.resident(spec, broken)
        got = support.run(model, state, weights, TOK, LEN)
        assert np.isnan(got[1]).any(axis=-1).all()
        others = [0, 2, 3, 4]
        np.testing.assert_array_equal(bits(got[others]), bits(sound[others]))


@pytest.mark.parametrize("family", support.cases("qwen2", "qwen3"))
def test_mixes_equal_merged_weights(family):
    config, model, spec = hf.BASES[family], support.decoder(family), support.spec_for(family)
    forms = {form: support.adapter(form, family, spec) for form in hf.VOCABULARY}
    state, slots = support.resident(spec, forms)
    weights = support.weights_of(MIXES, slots, spec.num_slots)
    got = support.run(model, state, weights, TOK, LEN)
    tensors = hf.base_tensors(config)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    for row, mix in enumerate(MIXES):
        summed = float64.merged({**tensors, "lm_head.weight": head}, {})
        for form, weight in mix.items():
            deltas = hf.dense_deltas(form, config)
            summed = float64.merged(summed, {m: weight * d for m, d in deltas.items()})
        steps = range(LEN[row], LEN[row] + got.shape[1])
        text = TOK[row][: steps[-1]]
        want = float64.logits(config, summed, text)[np.array(steps) - 1]
        assert support.errors(got[row], want).max() < 1e-5
        ours = models.merge_adapters(model, spec, [(forms[f], w) for f, w in mix.items()])
        again = support.run(ours, None, None, TOK, LEN)[row]
        assert support.errors(again, want).max() < 1e-5


@support.together("llama3")
@pytest.mark.parametrize("form", ["embedding", "head"])
def test_a_state_of_one_target(form, compiles):
    """Adapters of nothing else: served, evicted and served again without a compile."""
    family = "llama3"
    spec = LoraSpec.from_hf_config(
        hf.BASES[family],
        num_slots=2,
        dtype="float32",
        targets=("embed_tokens" if form == "embedding" else "lm_head",),
    )
    model = support.decoder(family)
    adapters = {f"{form}{i}": support.adapter(form, family, spec, seed=i) for i in range(3)}
    whole = support.spec_for(family)
    manager = AdapterManager(spec, sources=adapters)

    def serve(name):
        with manager.lease([name, None]) as lease:
            return support.run(
                model, manager.state, np.asarray(lease.row_weights), TOK[:2], LEN[:2]
            )

    first = serve(f"{form}0")
    with compiles.none():
        results = {name: serve(name) for name in [*adapters, *adapters]}
    np.testing.assert_array_equal(results[f"{form}0"], first)
    assert manager.stats.evictions > 0
    plain = support.run(model, None, None, TOK[:2], LEN[:2])
    for i, got in enumerate(results.values()):
        state, slots = support.resident(whole, {"x": support.adapter(form, family, whole, seed=i)})
        weights = support.weights_of([{"x": 1.0}, {}], slots, whole.num_slots)
        want = support.run(model, state, weights, TOK[:2], LEN[:2])
        assert support.errors(got, want).max() < 1e-6
        assert support.errors(got[0], plain[0]).min() > 1e-3
        np.testing.assert_array_equal(bits(got[1]), bits(plain[1]))
