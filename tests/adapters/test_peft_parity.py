"""Adapters that PEFT itself wrote give PEFT's own deltas, and PEFT reads what we write."""

import warnings

import numpy as np
import pytest

from lorajax import AdapterError, LoraSpec, Target
from lorajax.adapters import adapter_from_tensors, load_adapter, save_adapter
from lorajax.runtime import infer_spec
from tests.adapters.support import BF16, module_delta, packed_delta

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VOCABULARY = ("embed_tokens", "lm_head")


def base_model(family="Llama", **fields):
    config = getattr(transformers, f"{family}Config")(
        **{"vocab_size": 32, "tie_word_embeddings": False, **fields},
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)


def train(model, **changes):
    """A PEFT model whose LoRA weights are all random, as if trained."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "task_type": "CAUSAL_LM"}
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{**options, **changes}))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return wrapped


def deltas(wrapped):
    """PEFT's `get_delta_weight` of each module, `[d_in, d_out]`, by (layer, module)."""
    found = {}
    for path, module in wrapped.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight"):
            _, _, layer, name = path.split(".", 3)
            found[int(layer), name] = module.get_delta_weight("default").detach().double().T.numpy()
    return found


def assert_parity(adapter, spec, wrapped, rtol=1e-6):
    want = deltas(wrapped)
    assert want
    for layer in range(spec.num_layers):
        for module, (target, g) in spec.module_slices.items():
            zero = np.zeros((target.d_in, target.slices[g]))
            value = want.get((layer, module), zero)
            got = module_delta(adapter, spec, module, layer)
            np.testing.assert_allclose(got, value, rtol=0, atol=rtol * max(1, np.abs(value).max()))
    assert {(p.split(".")[2], p.split(".", 3)[3]) for p in adapter.modules} == {
        (str(layer), module) for layer, module in want
    }


FORMS = [
    {},
    {"use_rslora": True, "r": 9},
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": r".*\.layers\.1\..*(q|up)_proj"},
    {"target_modules": "all-linear"},
    {"target_modules": "all-linear", "exclude_modules": ["k_proj", "1.mlp.up_proj"]},
    {"exclude_modules": r".*\.0\.self_attn\..*"},
    {"layers_to_transform": [1]},
    {"layers_to_transform": 0, "layers_pattern": "layers"},
    {"target_modules": ["model.layers.0.self_attn.q_proj", "1.mlp.down_proj", "o_proj"]},
    {"rank_pattern": {"q_proj": 12, "1.mlp.up_proj": 2}, "alpha_pattern": {"k_proj|q_proj": 5}},
    {
        "rank_pattern": {r"^model\.layers\.0\..*proj": 10},
        "alpha_pattern": {"mlp.up_proj": 32, "up_proj": 1},
        "use_rslora": True,
    },
    {"init_lora_weights": "gaussian"},
    {"init_lora_weights": "orthogonal"},
    {"init_lora_weights": False, "lora_dropout": 0.1, "lora_alpha": 3},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes", FORMS, ids=str)
@pytest.mark.parametrize("merged", [True, False])
def test_folders_that_peft_wrote(tmp_path, changes, merged):
    model = base_model()
    wrapped = train(model, **changes)
    wrapped.save_pretrained(tmp_path / "a")
    spec = LoraSpec.from_hf_config(model.config, num_slots=2, dtype="float32", merged=merged)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter = load_adapter(tmp_path / "a", spec)
    assert_parity(adapter, spec, wrapped)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3"])
def test_families(tmp_path, family):
    model = base_model(family)
    wrapped = train(model, target_modules="all-linear")
    wrapped.save_pretrained(tmp_path / "a")
    spec = LoraSpec.from_hf_config(model.config, num_slots=2, dtype="float32")
    assert_parity(load_adapter(tmp_path / "a", spec), spec, wrapped)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
def test_peft_reads_what_we_write(tmp_path, dtype):
    model = base_model()
    spec = LoraSpec.from_hf_config(model.config, num_slots=2, dtype="float32")
    rng, made = np.random.default_rng(0), {}
    for layer in range(2):
        for module, (target, g) in spec.module_slices.items():
            key, r = f"model.layers.{layer}.{module}", 6 if "q_proj" in module else 4
            made[f"{key}.lora_A.weight"] = rng.normal(size=(r, target.d_in)).astype(dtype)
            made[f"{key}.lora_B.weight"] = rng.normal(size=(target.slices[g], r)).astype(dtype)
    config = {
        "r": 4,
        "lora_alpha": 5,
        "rank_pattern": {"q_proj": 6},
        "target_modules": LINEAR,
        "use_rslora": True,
        "inference_mode": True,
    }
    folder = save_adapter(tmp_path / "a", config, made)
    wrapped = peft.PeftModel.from_pretrained(model, folder)
    adapter = load_adapter(folder, spec)
    assert_parity(adapter, spec, wrapped)
    config["peft_type"] = "LORA"
    assert adapter.digest == adapter_from_tensors(config, made, spec, name="x").digest
    wrapped.save_pretrained(tmp_path / "b")  # and back through PEFT
    again = load_adapter(tmp_path / "b", spec)
    assert again.modules == adapter.modules


@pytest.mark.filterwarnings("ignore")
def test_a_live_peft_model_in_memory():
    model = base_model()
    wrapped = train(model, alpha_pattern={"o_proj": 3})
    state = peft.get_peft_model_state_dict(wrapped)
    made = {k: v.detach().numpy() for k, v in state.items()}
    spec = LoraSpec.from_hf_config(model.config, num_slots=2, dtype="float32")
    config = wrapped.peft_config["default"].to_dict()
    adapter = adapter_from_tensors(config, made, spec, name="live")
    assert_parity(adapter, spec, wrapped)


@pytest.mark.filterwarnings("ignore")
def test_an_absent_module_is_zero_in_peft_too(tmp_path):
    model = base_model()
    spec = LoraSpec.from_hf_config(model.config, num_slots=2, dtype="float32")
    made = {
        "model.layers.0.self_attn.q_proj.lora_A.weight": np.ones((4, 32), np.float32),
        "model.layers.0.self_attn.q_proj.lora_B.weight": np.ones((32, 4), np.float32),
    }
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    folder = save_adapter(tmp_path / "a", config, made)
    theirs = deltas(peft.PeftModel.from_pretrained(model, folder))
    adapter = load_adapter(folder, spec)
    assert (1, "self_attn.v_proj") in theirs
    for (layer, module), value in theirs.items():
        np.testing.assert_allclose(module_delta(adapter, spec, module, layer), value, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_conv1d(tmp_path):
    """fan_in_fan_out: the base weight is transposed, the factors are not."""

    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    wrapped = train(model, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    wrapped.save_pretrained(tmp_path / "a")
    spec = LoraSpec(
        targets=(
            Target("attn.c_attn", 16, (16, 16, 16), ("attn.q", "attn.k", "attn.v")),
            Target("attn.c_proj", 16, 16),
            Target("mlp.c_proj", 64, 16),
        ),
        num_layers=2,
        num_slots=1,
        dtype="float32",
        layers="transformer.h",
        fused=(("attn.c_attn", ("attn.q", "attn.k", "attn.v")),),
    )
    adapter = load_adapter(tmp_path / "a", spec)
    for (layer, module), value in deltas(wrapped).items():
        value = value.T  # get_delta_weight gives the base's layout, [d_in, d_out] for a Conv1D
        parts = dict(spec.fused).get(module, (module,))
        got = np.concatenate([module_delta(adapter, spec, p, layer) for p in parts], axis=1)
        np.testing.assert_allclose(got, value, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["embed_tokens"], "use_dora": True}, "DoRA"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "pissa"),
    ],
)
def test_what_peft_can_do_beyond_us_is_refused_by_name(tmp_path, changes, word):

    model = base_model("Qwen2")
    train(model, **changes).save_pretrained(tmp_path / "a")
    spec = LoraSpec.from_hf_config(model.config, num_slots=2, dtype="float32")
    with pytest.raises(AdapterError, match=word):
        load_adapter(tmp_path / "a", spec)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], [*LINEAR, *VOCABULARY]])
def test_what_peft_saves_outside_of_the_layers(tmp_path, tied, targets):
    """With the base's own weights, which PEFT adds; the smallest spec is inferred."""
    model = base_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "base")
    changes = {"rank_pattern": {"embed_tokens": 9}, "alpha_pattern": {"lm_head": 3}}
    wrapped = train(model, target_modules=targets, use_rslora=True, **changes)
    wrapped.save_pretrained(tmp_path / "a")
    spec = infer_spec(tmp_path / "base", [tmp_path / "a"], num_slots=2, dtype="float32")
    adapter = load_adapter(tmp_path / "a", spec)
    for path, module in wrapped.base_model.model.named_modules():
        if path in spec.outside:
            delta = module.get_delta_weight("default").detach().double().numpy()
            got = packed_delta(adapter, spec.target(path), 0)
            want = delta if path == "model.embed_tokens" else delta.T
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert {m for m in adapter.modules if "layers" not in m} == set(spec.outside)
    assert len(spec.outside) == len({*targets} & {*VOCABULARY})

    other = base_model(tie_word_embeddings=tied, vocab_size=33)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(AdapterError, match=r"= 33, the base model's vocabulary"):
        load_adapter(
            tmp_path / "a",
            LoraSpec.from_hf_config(
                tmp_path / "other", num_slots=2, targets=(*LINEAR, *VOCABULARY)
            ),
        )


@pytest.mark.filterwarnings("ignore")
def test_factors_that_peft_ties_are_refused(tmp_path):
    model = base_model(tie_word_embeddings=True)
    wrapped = train(model, target_modules=["embed_tokens"], ensure_weight_tying=True)
    wrapped.save_pretrained(tmp_path / "a")
    spec = LoraSpec.from_hf_config(model.config, num_slots=2, targets=VOCABULARY)
    with pytest.raises(AdapterError, match="ensure_weight_tying must be false"):
        load_adapter(tmp_path / "a", spec)
