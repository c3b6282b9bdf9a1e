"""Every refusal names the adapter, what is wrong, and leaves nothing half done."""

import json

import ml_dtypes
import numpy as np
import pytest

from lorajax import AdapterError, LoraSpec, SpecError, Target
from lorajax.adapters import adapter_from_tensors, explain, load_adapter
from tests.adapters.support import FUSED, INNER, KV, Q, config, spec, tensors, write

P = "base_model.model.model.layers"


def refused(raw, made, lora_spec=None) -> str:
    with pytest.raises(AdapterError) as caught:
        adapter_from_tensors(raw, made, lora_spec or spec(), name="bad.one")
    text = str(caught.value)
    assert "'bad.one'" in text
    assert text.count(";") >= 2, "rule; got; do"
    return text


FIELDS = [
    ({"use_dora": True}, ["use_dora", "DoRA"]),
    ({"bias": "all"}, ["bias='all'"]),
    ({"bias": "lora_only", "use_rslora": True}, ["bias='lora_only'"]),
    ({"lora_bias": True}, ["lora_bias"]),
    ({"modules_to_save": ["classifier", "score"]}, ["modules_to_save", "classifier"]),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, ["target_parameters", "expert"]),
    ({"trainable_token_indices": {"embed_tokens": [1, 2]}}, ["trainable_token_indices"]),
    ({"layer_replication": [[0, 1], [0, 2]]}, ["layer_replication"]),
    ({"alora_invocation_tokens": [1, 2]}, ["alora_invocation_tokens", "aLoRA"]),
    ({"use_qalora": True}, ["use_qalora"]),
    ({"use_bdlora": {"nblocks": 2}}, ["use_bdlora"]),
    ({"kasa_config": {"beta": 1e-4}}, ["kasa_config", "KaSA"]),
    ({"velora_config": {"num_groups": 2}}, ["velora_config"]),
    ({"monteclora_config": {"n": 2}}, ["monteclora_config"]),
    ({"arrow_config": {"top_k": 2}}, ["arrow_config"]),
    ({"enable_lora": [True, False, True]}, ["enable_lora"]),
    ({"init_lora_weights": "pissa"}, ["init_lora_weights='pissa'", "base weight"]),
    ({"init_lora_weights": "pissa_niter_16"}, ["pissa_niter_16"]),
    ({"init_lora_weights": "olora"}, ["olora"]),
    ({"init_lora_weights": "corda"}, ["corda"]),
    ({"init_lora_weights": "loftq"}, ["loftq"]),
    ({"init_lora_weights": "lora_ga"}, ["lora_ga"]),
    ({"init_lora_weights": "brandnew"}, ["brandnew", "not known"]),
    ({"future_scaling": 3.0}, ["future_scaling=3.0", "does not know"]),
    ({"future_config": {"x": 1}}, ["future_config"]),
    ({"r": ...}, ["'r'", "integer > 0"]),
    ({"r": 0}, ["r=0"]),
    ({"r": -4}, ["r=-4"]),
    ({"r": 4.0}, ["r=4.0"]),
    ({"r": True}, ["r=True"]),
    ({"lora_alpha": ...}, ["'lora_alpha'"]),
    ({"lora_alpha": "16"}, ["lora_alpha='16'"]),
    ({"lora_alpha": float("nan")}, ["lora_alpha=nan", "finite"]),
    ({"lora_alpha": float("inf")}, ["lora_alpha=inf"]),
    ({"use_rslora": "yes"}, ["use_rslora='yes'"]),
    ({"rank_pattern": {"q_proj": 0}}, ["rank_pattern", "'q_proj': 0"]),
    ({"rank_pattern": {"(": 4}}, ["rank_pattern", "'('"]),
    ({"rank_pattern": [4]}, ["rank_pattern", "[4]"]),
    ({"alpha_pattern": {"q_proj": None}}, ["alpha_pattern", "None"]),
    ({"target_modules": "(q_proj"}, ["target_modules", "(q_proj", "regular expression"]),
    ({"target_modules": {"q_proj": 1}}, ["target_modules", "list of strings"]),
    ({"target_modules": ["q_proj", 3]}, ["target_modules"]),
    ({"exclude_modules": "["}, ["exclude_modules"]),
    ({"layers_to_transform": "0"}, ["layers_to_transform='0'"]),
    ({"layers_to_transform": [0, "1"]}, ["layers_to_transform"]),
    ({"layers_to_transform": [0], "layers_pattern": ["("]}, ["layers_pattern"]),
    ({"layers_to_transform": [0], "target_modules": ".*_proj"}, ["regular expression"]),
    ({"peft_type": "OFT"}, ["peft_type='OFT'"]),
    ({"peft_type": "lora"}, ["peft_type='lora'"]),
    ({"peft_type": ..., "lora_parameters": {"rank": 8}}, ["MLX"]),
    ({"peft_type": ..., "fine_tune_type": "lora"}, ["MLX"]),
    ({"peft_type": ..., "model_class": "X", "config": {"mh_adapter": True}}, ["adapter-transf"]),
    ({"peft_type": ...}, ["no peft_type", "lora_alpha"]),
]


@pytest.mark.parametrize(("changes", "words"), FIELDS, ids=lambda x: str(x)[:40])
def test_a_field_that_cannot_be_served(changes, words):
    text = refused(config(**changes), tensors())
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": None},
        {"bias": ...},
        {"init_lora_weights": True},
        {"init_lora_weights": False},
        {"init_lora_weights": None},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "mica"},
        {"use_dora": False, "lora_bias": False, "use_qalora": False, "use_bdlora": None},
        {"modules_to_save": [], "target_parameters": None, "layer_replication": None},
        {"enable_lora": None, "merge_weights": False},
        {"future_flag": False, "future_list": [], "future_config": None, "future_rate": 0.0},
        {"rank_pattern": None, "alpha_pattern": None},
        {"megatron_core": "megatron.core", "megatron_config": None, "qalora_group_size": 16},
        {"task_type": "CAUSAL_LM", "inference_mode": True, "peft_version": "0.99.0"},
        {"auto_mapping": {"base_model_class": "X"}, "revision": "main", "lora_dropout": 0.1},
        {"ensure_weight_tying": True, "layers_pattern": None, "base_model_name_or_path": ""},
    ],
    ids=str,
)
def test_defaults_and_notes_of_training_are_no_reason(changes):
    adapter = adapter_from_tensors(config(**changes), tensors(), spec(), name="x")
    assert {scale for _, scale in adapter.modules.values()} == {2.0}


def extra(name, shape=(4, 32), dtype=np.float32):
    return {**tensors(), name: np.ones(shape, dtype)}


TENSORS = [
    (f"{P}.0.self_attn.q_proj.lora_magnitude_vector", (Q,), ["DoRA"]),
    (f"{P}.0.self_attn.q_proj.lora_magnitude_vector.weight", (Q,), ["DoRA"]),
    (f"{P}.0.self_attn.q_proj.lora_B.bias", (Q,), ["lora_bias"]),
    (f"{P}.0.self_attn.q_proj.base_layer.bias", (Q,), ["bias='none'"]),
    (f"{P}.0.self_attn.q_proj.bias", (Q,), ["bias='none'"]),
    ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 99), ["embedding"]),
    ("base_model.model.lm_head.weight", (128320, 1), ["vocabulary", "[128320, 1]"]),
    ("base_model.model.model.embed_tokens.weight", (99, 32), ["full weight", "[99, 32]"]),
    ("base_model.model.model.embed_tokens.base_layer.weight", (99, 32), ["full weight"]),
    ("base_model.model.score.modules_to_save.weight", (2, 32), ["modules_to_save"]),
    (
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
        (2, 32),
        ["token"],
    ),
    (
        f"{P}.0.self_attn.q_proj.base_layer.weight",
        (Q + 1, 32),
        [f"[{Q + 1}, 32]", f"base: [{Q}, 32]"],
    ),
    (f"{P}.0.self_attn.q_proj.lora_diag", (4,), ["lora_A or lora_B"]),
    ("prompt_embeddings", (20, 32), ["lora_A or lora_B"]),
]


@pytest.mark.parametrize(("name", "shape", "words"), TENSORS, ids=lambda x: str(x)[-40:])
def test_a_tensor_that_is_no_lora_factor(name, shape, words):
    text = refused(config(), extra(name, shape))
    for word in [name, *words]:
        assert word in text


def test_full_weights_of_another_vocabulary():
    known = spec(vocab_size=128256)
    for tensor in ("base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"):
        with pytest.raises(AdapterError) as error:
            adapter_from_tensors(config(), extra(tensor, (128320, 32)), known, name="a")
        for word in (tensor, "[128320, 32]", "a vocabulary of 128256"):
            assert word in str(error.value)


@pytest.mark.parametrize("vocab_size", [None, 100])
def test_added_tokens(tmp_path, vocab_size):
    folder = write(tmp_path / "a", config(), tensors())
    listed = {"<pad>": 7, "<last>": 99}
    (folder / "added_tokens.json").write_text(json.dumps(listed))
    load_adapter(folder, spec(vocab_size=vocab_size))  # the base has them all
    (folder / "added_tokens.json").write_text(json.dumps(listed | {"<tool>": 100}))
    if vocab_size is None:
        load_adapter(folder, spec())
        return
    with pytest.raises(
        AdapterError, match=r"100 of the base.*'<tool>' with id 100 in added_tokens"
    ):
        load_adapter(folder, spec(vocab_size=vocab_size))
    assert explain(folder, spec(vocab_size=vocab_size)).problems
    (folder / "added_tokens.json").write_text("[]")
    with pytest.raises(AdapterError, match=r"added_tokens.json must hold one JSON object"):
        load_adapter(folder, spec())


def pair(path, r=4, d_in=32, d_out=Q):
    return {
        f"{path}.lora_A.weight": np.ones((r, d_in), np.float32),
        f"{path}.lora_B.weight": np.ones((d_out, r), np.float32),
    }


@pytest.mark.parametrize(
    "path",
    [
        "base_model.model.lm_head",
        f"{P}.0.self_attn.z_proj",
        f"{P}.0.mlp.experts.3.up_proj",
        f"{P}.0.mlp.experts",
        f"{P}.0.mlp.experts.base_layer",
        "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj",
        "base_model.model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
        "base_model.model.model.visual.blocks.0.self_attn.q_proj",
        "base_model.model.model.encoder.layers.0.self_attn.q_proj",
        "base_model.model.audio_tower.layers.0.self_attn.q_proj",
        "base_model.model.talker.model.layers.0.self_attn.q_proj",
        "base_model.model.q_proj",
        "base_model.model.model.layers.x.self_attn.q_proj",
    ],
)
def test_a_module_that_the_spec_does_not_have(path):
    text = refused(config(target_modules=None), {**tensors(), **pair(path)})
    assert path in text
    assert "[4, 32]" in text
    assert "'model.layers.0.self_attn.q_proj'" in text, "a sample of the other side"


def test_nothing_applied_shows_samples_of_both_sides():
    made = tensors(prefix="base_model.model.transformer.h")
    text = refused(config(), made)
    assert "base_model.model.transformer.h.0" in text
    assert "'model.layers.0.self_attn.q_proj'" in text


def test_a_layer_beyond_the_model():
    text = refused(config(), tensors(layers=[0, 1, 2]))
    assert f"{P}.2.mlp.down_proj.lora_A.weight" in text
    assert "below the base model's 2" in text


def test_a_tensor_that_the_config_does_not_target():
    text = refused(config(target_modules=["q_proj"]), tensors())
    assert f"{P}.0.self_attn.k_proj.lora_A.weight" in text
    assert "PEFT would ignore it" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": [r".*\.1.*q_proj"]},  # a regex in a list is a literal name
        {"target_modules": "q_proj"},  # a string must match the whole path
        {"target_modules": []},
        {"layers_to_transform": [1]},
        {"layers_to_transform": [0], "layers_pattern": "h"},
        {"exclude_modules": ["q_proj"]},
        {"exclude_modules": r".*q_proj"},
    ],
    ids=str,
)
def test_forms_that_do_not_reach_a_tensor(changes):
    made = tensors(["self_attn.q_proj"], layers=[0])
    assert "PEFT would ignore it" in refused(config(**changes), made)


@pytest.mark.parametrize("factor", ["A", "B"])
def test_a_factor_without_the_other(factor):
    made = tensors()
    other = "B" if factor == "A" else "A"
    del made[f"{P}.1.mlp.up_proj.lora_{other}.weight"]
    text = refused(config(), made)
    assert f"{P}.1.mlp.up_proj.lora_{factor}.weight" in text
    assert f"without lora_{other}" in text


def test_the_rank_must_be_the_resolved_one():
    text = refused(config(r=8), tensors())
    assert "rank 4, for r=8" in text
    assert "and 9 more" in text, "five examples of the fourteen modules"
    text = refused(config(rank_pattern={"q_proj": 6}), tensors())
    assert "self_attn.q_proj" in text
    assert "for r=6" in text


def test_a_rank_that_all_slots_cannot_hold():
    """The largest module rank counts, not r."""
    text = refused(config(rank_pattern={"v_proj": 40}), tensors(r={"self_attn.v_proj": 40}))
    assert "at most 32" in text
    assert "rank 40" in text
    adapter_from_tensors(config(r=32), tensors(r=32), spec(), name="x")


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("self_attn.q_proj.lora_A", (4, 31), ["d_in = 32", "[4, 31]"]),
        ("self_attn.q_proj.lora_B", (Q + 8, 4), [f"d_out = {Q}", f"[{Q + 8}, 4]"]),
        ("mlp.down_proj.lora_A", (4, INNER + 1), [f"d_in = {INNER}"]),
        ("mlp.up_proj.lora_B", (INNER, 5), ["one r > 0", f"[{INNER}, 5]"]),
        ("mlp.up_proj.lora_B", (INNER, 4, 1), ["lora_B [d_out, r]"]),
        ("mlp.up_proj.lora_A", (4,), ["lora_A [r, d_in]"]),
        ("mlp.up_proj.lora_A", (0, 32), ["one r > 0"]),
    ],
)
def test_shapes(name, shape, words):
    made = tensors()
    made[f"{P}.1.{name}.weight"] = np.ones(shape, np.float32)
    text = refused(config(), made)
    for word in [name.rpartition(".")[0], *words]:
        assert word in text


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize(
    ("module", "height"),
    [
        ("self_attn.qkv_proj", Q + KV),
        ("self_attn.qkv_proj", Q + KV + 1),
        ("self_attn.qkv_proj", 3 * KV),
        ("mlp.gate_up_proj", INNER),
        ("mlp.gate_up_proj", 1),
    ],
)
def test_a_fused_b_is_never_broadcast(merged, module, height):
    made = tensors([module], widths={module: (32, height)})
    short = module.rpartition(".")[2]
    text = refused(config(target_modules=[short]), made, spec(merged=merged))
    assert module in text
    assert f"[{height}, 4]" in text


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("fused", list(FUSED))
def test_a_fused_module_and_its_part(merged, fused):
    part = FUSED[fused][-1]
    text = refused(config(target_modules=None), tensors([fused, part]), spec(merged=merged))
    assert "fused or split" in text
    assert f"{P}.0.{fused}.lora_A.weight" in text
    assert f"{P}.0.{part}.lora_A.weight" in text


@pytest.mark.parametrize(
    "other", ["base_model.model.language_model.model.layers", "model.layers", "model.layers.0"]
)
def test_a_module_twice(other):
    made = {**tensors(), **tensors(["mlp.up_proj"], layers=[0], prefix=other.removesuffix(".0"))}
    if other.endswith(".0"):
        made = {**tensors(), **pair(f"{P}.00.self_attn.q_proj")}
    assert "in the file once" in refused(config(), made)


def test_two_adapters_in_one_file():
    one = {k.replace(".weight", ".one.weight"): v for k, v in tensors().items()}
    assert "save one adapter in a file" in refused(config(), {**tensors(), **one})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("factor", ["A", "B"])
def test_values_that_are_not_finite(value, dtype, factor):
    made = tensors(dtype=dtype)
    name = f"{P}.1.mlp.down_proj.lora_{factor}.weight"
    made[name][-1, -1] = value
    text = refused(config(), made)
    assert name in text
    assert "1 NaN or infinite" in text
    assert "q_proj" not in text


def test_values_too_large_for_the_slots():
    made = tensors()
    name = f"{P}.0.mlp.down_proj.lora_B.weight"
    made[name][0, 0] = 1e5
    assert adapter_from_tensors(config(), made, spec(), name="x").rank == 4
    text = refused(config(), made, spec(dtype="float16"))
    assert name in text
    assert "1e+05" in text
    assert "float16" in text


@pytest.mark.parametrize("dtype", [np.int8, np.int32, ml_dtypes.float8_e4m3fn, np.complex64, bool])
def test_dtypes_that_are_not_plain_floats(dtype):
    made = tensors()
    name = f"{P}.0.mlp.down_proj.lora_B.weight"
    made[name] = np.ones(made[name].shape, dtype)
    text = refused(config(), made)
    assert name in text
    assert np.dtype(dtype).name in text


def test_values_that_are_no_arrays():
    assert "list" in refused(config(), {**tensors(), "x.lora_A.weight": [[1.0]]})


def test_no_tensors_at_all():
    assert "no tensors" in refused(config(), {})


def test_slots_of_a_dtype_that_cannot_hold_weights():
    with pytest.raises(SpecError, match="int8"):
        adapter_from_tensors(config(), tensors(), spec(dtype="int8"), name="x")


def test_all_reasons_are_told_at_once():
    made = {**tensors(), **pair("base_model.model.lm_head")}
    made[f"{P}.0.self_attn.q_proj.lora_magnitude_vector"] = np.ones(Q, np.float32)
    text = refused(config(use_dora=True, lora_alpha=...), made)
    for word in ("refused for", "use_dora", "lora_alpha", "magnitude", "lm_head"):
        assert word in text


def test_many_tensors_of_one_kind_are_counted():
    lora_spec = LoraSpec((Target("mlp.up_proj", 32, INNER),), num_layers=2, num_slots=1)
    text = refused(config(), tensors(), lora_spec)
    assert "and 7 more" in text
    assert text.count("lora_A.weight") == 5


@pytest.mark.parametrize(
    "name", ["", "a/b", "../x", "a..b", ".x", "-x", "a b", "ä", "x" * 129, "a\n"]
)
def test_names_are_from_a_small_alphabet(tmp_path, name):
    with pytest.raises(AdapterError, match="adapter name"):
        adapter_from_tensors(config(), tensors(), spec(), name=name)
    folder = write(tmp_path / "ok", config(), tensors())
    with pytest.raises(AdapterError, match="adapter name"):
        load_adapter(folder, spec(), name=name)


@pytest.mark.parametrize("name", ["a", "sql-v1.2_x", "0", "x" * 128])
def test_good_names(name):
    assert adapter_from_tensors(config(), tensors(), spec(), name=name).name == name
