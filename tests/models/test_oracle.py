"""Live: transformers and peft make the goldens again, and ours agrees with them."""

import numpy as np
import pytest

from tests import hf
from tests.goldens.rows import ROWS
from tests.models import support
from tests.models.test_goldens import FORMS, golden

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # peft calls what transformers deprecates
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def oracle():
    for name in ("torch", "transformers", "peft"):
        pytest.importorskip(name)
    from tests.goldens import make_goldens  # needs the extra

    return make_goldens


@pytest.fixture(scope="module", params=list(hf.BASES))
def live(request, oracle):
    """A family, and the logits of the oracle made now."""
    return request.param, oracle.compute(request.param)


def test_goldens_are_what_the_libraries_say(live):
    family, want = live
    assert support.errors(golden(family), want).max() < 1e-6


def test_served_files_equal_the_libraries(live, tmp_path):
    """Base and adapters from their files, and every row of the batch from one step."""
    family, want = live
    config = hf.BASES[family]
    base = hf.write_base(tmp_path / "base", config, hf.base_tensors(config), shards=2)
    spec = support.spec_for(family)
    adapters = {
        form: support.load_adapter(hf.write_adapter(tmp_path / form, form, config), spec)
        for form in FORMS
    }
    state, slots = support.resident(spec, adapters)
    weights = support.weights_of(ROWS, slots, spec.num_slots)
    got = support.run(support.models.load_model(base), state, weights)
    assert support.errors(got, want).max() <= 1e-5


@pytest.mark.parametrize("family", hf.BASES)
def test_configs_are_read_as_transformers_reads_them(family, oracle, tmp_path):
    """Also as transformers 5 writes them again; the rotary frequencies to 3e-7."""
    transformers = pytest.importorskip("transformers")
    base = hf.write_base(tmp_path, hf.BASES[family], {})
    theirs = transformers.AutoConfig.from_pretrained(base)
    ours = support.models.ModelConfig.from_hf(base)
    theirs.save_pretrained(tmp_path / "again")
    assert support.models.ModelConfig.from_hf(tmp_path / "again") == ours
    assert support.models.ModelConfig.from_hf(theirs) == ours

    model = transformers.AutoModelForCausalLM.from_config(theirs)
    want = model.model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(ours.rope.frequencies(ours.head_dim), want, rtol=3e-7)
    types = [layer.self_attn for layer in model.model.layers]
    windows = [getattr(t, "sliding_window", None) for t in types]
    if family.startswith("qwen"):
        assert tuple(windows) == ours.windows


def test_real_sizes_have_their_frequencies(oracle):
    transformers = pytest.importorskip("transformers")
    for rope in (
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ):
        fields = {**hf.BASES["llama_bias"], "head_dim": 128, "rope_parameters": rope}
        fields["max_position_embeddings"] = 131072
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
        ours = support.models.ModelConfig.from_hf(fields).rope.frequencies(128)
        want = model.model.rotary_emb.inv_freq.numpy()
        assert (ours == want).mean() > 0.9
        np.testing.assert_allclose(ours, want, rtol=3e-7)
