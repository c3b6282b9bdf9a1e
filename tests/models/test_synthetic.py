"""The synthetic files are what they claim: PEFT reads them and agrees with `delta`."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from lorajax.models import synthetic

BASE = synthetic.SyntheticBase(hidden_size=32, intermediate_size=48, vocab_size=64)
PLAIN = [r for r in synthetic.RECIPES if not set(r.modules) & set(synthetic.FUSED)]
FUSED = [r for r in synthetic.RECIPES if set(r.modules) & set(synthetic.FUSED)]


def test_files_hold_the_tensors_and_equal_seeds_give_equal_files(tmp_path):
    recipe = synthetic.RECIPES[5]
    one, two = (synthetic.make_adapter(BASE, recipe, seed=7) for _ in range(2))
    other = synthetic.make_adapter(BASE, recipe, seed=8)
    synthetic.write_adapter(tmp_path, one)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert stored.keys() == two.tensors.keys()
    for key, value in stored.items():
        assert value.dtype == np.float16
        np.testing.assert_array_equal(value, two.tensors[key])
        assert not np.array_equal(value, other.tensors[key])
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == recipe.rank


def test_recipes_span_the_forms():
    ranks = {synthetic.make_adapter(BASE, r).max_rank for r in synthetic.RECIPES}
    assert min(ranks) == 1
    assert max(ranks) == 64
    assert len({r.name for r in synthetic.RECIPES}) >= 8
    assert FUSED
    assert any(r.rslora for r in PLAIN)
    assert any(r.rank_pattern and r.alpha_pattern for r in PLAIN)


@pytest.mark.parametrize("recipe", synthetic.RECIPES, ids=lambda r: r.name)
def test_delta_has_the_strength_asked_for(recipe):
    for path, delta in synthetic.make_adapter(BASE, recipe, strength=0.5).delta(BASE).items():
        weight = BASE.tensors()[f"{path}.weight"]
        assert delta.shape == weight.shape
        assert 0.1 < delta.std() / weight.std() < 1.5


def _logits(model, ids):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.numpy()


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", PLAIN, ids=lambda r: r.name)
def test_peft_loads_it_and_agrees_with_the_truth(tmp_path, recipe):
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    adapter = synthetic.make_adapter(BASE, recipe)
    base = synthetic.write_base(tmp_path / "base", BASE)
    merged = synthetic.write_base(
        tmp_path / "merged", BASE, synthetic.merged_tensors(BASE, [(adapter, 1.0)])
    )
    folder = synthetic.write_adapter(tmp_path / "adapter", adapter)
    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = np.random.default_rng(0).integers(0, BASE.vocab_size, (2, 9))
    plain, want = _logits(load(base), ids), _logits(load(merged), ids)
    got = _logits(peft.PeftModel.from_pretrained(load(base), folder), ids)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert (plain.argmax(-1) != want.argmax(-1)).any()


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", FUSED, ids=lambda r: r.name)
def test_peft_loads_fused_names_on_a_base_with_fused_modules(tmp_path, recipe):
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    adapter = synthetic.make_adapter(BASE, recipe)
    folder = synthetic.write_adapter(tmp_path / "adapter", adapter)
    sizes = {k: v for k, v in BASE.config().items() if k in transformers.Phi3Config().to_dict()}
    sizes |= {"pad_token_id": 0, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes))
    before = {k: v.numpy().copy() for k, v in model.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(model, folder).merge_and_unload().state_dict()
    delta = adapter.delta(BASE)
    for layer in range(BASE.num_hidden_layers):
        for fused, parts in synthetic.FUSED.items():
            key = f"model.layers.{layer}.{fused}"
            want = np.concatenate([delta[f"model.layers.{layer}.{p}"] for p in parts])
            got = merged[f"{key}.weight"].numpy() - before[f"{key}.weight"]
            np.testing.assert_allclose(got, want, atol=1e-5)
