"""Configs in both spellings, and refusals by name."""

import json

import numpy as np
import pytest

from lorajax import LoraSpec, ModelError, models
from lorajax.models.decoder import TARGETS
from lorajax.models.load import leaves
from tests import hf

LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(family="llama2", **fields):
    return models.ModelConfig.from_hf({**hf.BASES[family], **fields})


def test_both_spellings_are_one_config():
    sizes = {k: v for k, v in hf.BASES["llama2"].items() if k not in ("torch_dtype", "rope_theta")}
    old = {**sizes, "torch_dtype": "float16", "rope_theta": 5e5, "rope_scaling": LLAMA31}
    new = {**sizes, "dtype": "float16", "rope_parameters": {**LLAMA31, "rope_theta": 5e5}}
    oldest = {**old, "torch_dtype": "torch.float16"}
    assert len({models.ModelConfig.from_hf(c) for c in (old, new, oldest)}) == 1
    assert models.ModelConfig.from_hf(new).rope.theta == 5e5
    linear = [
        read(rope_scaling={"type": "linear", "factor": 2}),
        read(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    ]
    assert linear[0] == linear[1] != read()


def test_files_and_mappings_are_alike(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf.BASES["qwen3"]))
    want = read("qwen3")
    assert models.ModelConfig.from_hf(tmp_path) == want
    assert models.ModelConfig.from_hf(str(tmp_path / "config.json")) == want
    with pytest.raises(ModelError, match=r"readable JSON.*none"):
        models.ModelConfig.from_hf(tmp_path / "none")


def test_absent_fields_mean_what_transformers_means():
    llama = {k: v for k, v in hf.BASES["llama2"].items() if k != "num_key_value_heads"}
    config = models.ModelConfig.from_hf(llama)
    assert (config.num_kv_heads, config.head_dim, config.tied) == (4, 12, False)
    mistral = {k: v for k, v in hf.BASES["mistral"].items() if k != "sliding_window"}
    assert models.ModelConfig.from_hf(mistral).windows == (4096, 4096)
    assert read("mistral").windows == (None, None)
    assert read("qwen2").windows == (None, None)
    assert read("qwen2_window").windows == (None, 5)
    assert read("qwen2_window", layer_types=None).windows == (None, 5)
    assert read("qwen2_window", layer_types=["sliding_attention"] * 2).windows == (5, 5)


@pytest.mark.parametrize(
    ("family", "qkv", "o", "mlp", "norm"),
    [
        ("llama2", False, False, False, False),
        ("llama_bias", True, True, True, False),
        ("mistral", False, False, False, False),
        ("qwen2", True, False, False, False),
        ("qwen3", False, False, False, True),
    ],
)
def test_layout_of_families(family, qkv, o, mlp, norm):
    c = read(family)
    assert (c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm) == (qkv, o, mlp, norm)


@pytest.mark.parametrize("family", hf.BASES)
def test_products_have_the_shapes_of_the_spec(family):
    """The spec and the decoder read sizes apart; every target must fit its product."""
    targets = (*hf.LINEAR, "embed_tokens", "lm_head")
    spec = LoraSpec.from_hf_config(hf.BASES[family], num_slots=1, targets=targets)
    found = leaves(read(family))
    shapes = {x.names[0]: x.shape for x in found}
    assert [t.name for t in spec.targets] == list(TARGETS)
    *layered, embed, head = spec.targets
    assert shapes["model.embed_tokens.weight"] == (embed.d_in, *embed.slices)
    tied = (embed.slices[0], embed.d_in)
    assert shapes.get("lm_head.weight", tied) == (head.d_in, *head.slices)
    products = [x for x in found if x.transposed and "layers.1." in x.names[0]]
    for target, leaf in zip(layered, products, strict=True):
        assert leaf.shape == (target.d_in, sum(target.slices))
        assert leaf.widths == target.slices
        assert leaf.names == tuple(f"model.layers.1.{m}.weight" for m in target.modules)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama2", {"model_type": "gemma2"}, "model_type.*gemma2"),
        ("llama2", {"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ("llama2", {"hidden_size": None}, "hidden_size"),
        ("llama2", {"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size.*48"),
        ("llama2", {"num_key_value_heads": 3}, "num_key_value_heads.*3"),
        ("llama2", {"head_dim": 13}, "head_dim.*13"),
        ("llama2", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type.*yarn"),
        ("llama2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type.*dynamic"),
        ("mistral", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type.*longrope"),
        ("llama2", {"rope_scaling": {"rope_type": "linear"}}, "linear.*factor"),
        ("llama2", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ("llama2", {"rope_scaling": {**LLAMA31, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ("qwen2", {"rope_scaling": {"type": "default", "mrope_section": [8]}}, "mrope_section"),
        ("qwen2", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor.*0.5"),
        ("mistral", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary.*0.25"),
        ("llama2", {"quantization_config": {"quant_method": "awq"}}, "quantization_config.*awq"),
        ("llama2", {"sliding_window": 8}, "sliding_window.*8"),
        ("llama2", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("mistral", {"sliding_window": 0}, "sliding_window.*0"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("qwen2_window", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked"),
        ("qwen2_window", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3", {"head_dim": None}, "head_dim"),
        ("qwen3", {"is_causal": False}, "is_causal"),
        ("mistral", {"dtype": "float8_e4m3fn"}, "dtype.*float8"),
    ],
)
def test_refusals_name_field_and_value(family, fields, message):
    with pytest.raises(ModelError, match=message) as error:
        read(family, **fields)
    assert str(error.value).count(";") >= 2, "rule; got; do"


def test_llama3_frequencies():
    """Equation of the llama3 rope scaling in float64, on the sizes of Llama 3.1 8B."""
    rope = read(rope_theta=5e5, rope_scaling=LLAMA31, max_position_embeddings=131072).rope
    got = rope.frequencies(128)
    plain = 5e5 ** (-np.arange(0, 128, 2) / 128)
    wavelength = 2 * np.pi / plain
    smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    want = (1 - smooth) * plain / 8 + smooth * plain
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=5e-7)
    np.testing.assert_allclose(got[-10:], plain[-10:] / 8, rtol=3e-7)
