"""Configs that real adapters were published with: each is served exactly, or refused by name.

The collection is not part of the repository; what it teaches also stands in the other tests of this
folder, and in `OWN` below.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lorajax import AdapterError, LoraSpec, Target
from lorajax.adapters import adapter_from_tensors, explain, load_adapter
from tests.adapters.support import assert_deltas, expected, tensors, write

FOLDER = Path(__file__).parents[3] / "shared" / "reference" / "adapter_configs"
FILES = sorted(FOLDER.glob("**/*.json"))
real = pytest.mark.skipif(not FILES, reason=f"no collection of real configs at {FOLDER}")

D = 16  # width of every module of the small models below
ATTENTION = [f"self_attn.{m}_proj" for m in "qkvo"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
DECODER = [f"{b}.{m}" for b in ("self_attn", "encoder_attn") for m in ("q_proj", "v_proj")]

#: Small models with the true module names: (layer list in the file, modules, number of layers).
MODELS = {
    "llama": ("model.layers", ATTENTION + MLP, 2),
    "llama-32": ("model.layers", ATTENTION + MLP, 32),
    "wrapped": ("model.language_model.layers", ATTENTION + MLP, 2),
    "wrapped-old": ("language_model.model.layers", ATTENTION + MLP, 2),
    "phi-2": ("model.layers", [*ATTENTION[:3], "self_attn.dense", "mlp.fc1", "mlp.fc2"], 2),
    "phi-1.5": ("transformer.h", ["mixer.Wqkv", "mixer.out_proj", "mlp.fc1", "mlp.fc2"], 2),
    "phi-3": (
        "model.layers",
        ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"],
        2,
    ),
    "neox": ("gpt_neox.layers", ["attention.query_key_value", "attention.dense"], 2),
    "glm": (
        "transformer.encoder.layers",
        [
            "self_attention.query_key_value",
            "self_attention.dense",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        ],
        2,
    ),
    "chatglm": ("transformer.layers", ["attention.query_key_value", "attention.dense"], 2),
    "gpt2": ("transformer.h", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"], 2),
    "gated-delta": (
        "model.layers",
        [f"linear_attn.in_proj_{m}" for m in ("qkv", "z", "a", "b")]
        + ["linear_attn.out_proj", *ATTENTION, *MLP],
        2,
    ),
    "mamba-moe": ("backbone.layers", [f"mixer.{m}_proj" for m in ("in", "out", "q", "up")], 2),
    "clip-text": (
        "text_model.encoder.layers",
        [*ATTENTION[:3], "self_attn.out_proj", "mlp.fc1", "mlp.fc2"],
        2,
    ),
    "seq2seq": ("model.decoder.layers", [*DECODER, "self_attn.out_proj", "self_attn.k_proj"], 2),
    "image": (
        "transformer_blocks",
        [f"attn.{m}" for m in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "to_add_out")]
        + ["ff.linear_in", "ff.linear_out"],
        2,
    ),
}
MODEL_OF = {
    "004": "gated-delta",
    "007": "phi-2",
    "008": "neox",
    "013": "clip-text",
    "014": "clip-text",
    "019": "phi-1.5",
    "025": "glm",
    "028": "llama-32",
    "029": "seq2seq",
    "032": "phi-1.5",
    "034": "mamba-moe",
    "035": "phi-3",
    "043": "gpt2",
    "062": "gated-delta",
    "064": "gpt2",
    "067": "gpt2",
    "070": "chatglm",
    "085": "wrapped-old",
    "097": "image",
    "107": "wrapped",
    "109": "seq2seq",
    "121": "neox",
    "layers_to_transform": "llama-32",
}
#: What the refusal must name; a method other than LoRA must be named by itself.
REFUSED = {
    "005": "MLX",
    "023": "MLX",
    "053": "MLX",
    "056": "modules_to_save",
    "058": "modules_to_save",
    "065": "MLX",
    "071": "modules_to_save",
    "073": "MLX",
    "074": "MLX",
    "079": "PREFIX_TUNING",
    "082": "adapter-transformers",
    "086": "PROMPT_TUNING",
    "088": "kasa_config",
    "092": "OFT",
    "094": "TRAINABLE_TOKENS",
    "095": "VERA",
    "098": "DELORA",
    "100": "GRALORA",
    "101": "IA3",
    "103": "LOKR",
    "106": "use_dora",
    "112": "MLX",
    "122": "modules_to_save",
    "124": "MLX",
    "128": "MLX",
    "anchored_regex_wrapper": "lora_alpha",
    "bias_lora_only_rslora": "bias='lora_only'",
    "layer_replication": "layer_replication",
    "modules_to_save_resized_vocab": "modules_to_save",
    "regex_inside_list": "without 'r'",
    "rslora_embeddings": "without 'lora_alpha'",
    "target_parameters": "target_parameters",
    "trainable_token_indices": "trainable_token_indices",
    "distilbert-qv-classifier": "classifier.weight",
    "gpt2-c-attn": "score.weight",
    "gpt2-style-r": "decoder.block.0.layer.0.SelfAttention.q.lora_A.weight",
    "not-lora-prompt-tuning": "prompt_embeddings",
    "privacy-filter-qkvo-score": "score.bias",
}


def key_of(file: Path) -> str:
    return file.name[:3] if file.name[:3].isdecimal() else file.stem


def targeted(raw: dict, path: str) -> bool:
    """The rule of the file format in its plainest form."""
    names, layers = raw.get("target_modules"), raw.get("layers_to_transform")
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    hit = names is None or any(path == n or path.endswith("." + n) for n in names)
    return hit and (layers is None or int(re.search(r"\.(\d+)\.", path)[1]) in layers)


def hand_spec(layers: str, modules: dict[str, tuple[int, int]], num_layers: int) -> LoraSpec:
    return LoraSpec(
        targets=tuple(Target(m, *modules[m]) for m in modules),
        num_layers=num_layers,
        num_slots=8,
        slot_rank=8,
        dtype="float32",
        layers=layers,
    )


def fitting(raw: dict, model: str):
    """A spec of the model, and random tensors for what the config targets in it."""
    layers, modules, count = MODELS[model]
    widths = dict.fromkeys(modules, (D, D))
    r = raw.get("r") or 8
    prefix = f"base_model.model.{layers}"
    made = tensors(modules, r=r, layers=range(count), prefix=prefix, widths=widths)
    made = {
        k: v
        for k, v in made.items()
        if targeted(raw, k.removeprefix("base_model.model.").split(".lora_")[0])
    }
    return hand_spec(layers, widths, count), made, prefix


def serve(tmp_path, raw, spec, made, prefix):
    folder = write(tmp_path / "real", raw, made)
    adapter = load_adapter(folder, spec)
    assert explain(folder, spec).problems == ()
    r, alpha = raw["r"], raw["lora_alpha"]
    scale = alpha / r**0.5 if raw.get("use_rslora") else alpha / r
    assert len(adapter.modules) == len(made) // 2 > 0
    assert_deltas(adapter, spec, expected(made, spec, scale, prefix, {}))


def refuse(tmp_path, raw, spec, made, word):
    folder = write(tmp_path / "real", raw, made)
    with pytest.raises(AdapterError) as caught:
        load_adapter(folder, spec)
    assert word in str(caught.value)
    assert word in " ".join(explain(folder, spec).problems)


@real
@pytest.mark.filterwarnings("ignore:.*must match a module:UserWarning")
@pytest.mark.parametrize(
    "file", [f for f in FILES if f.parent.name != "tensor_names"], ids=lambda f: f.stem
)
def test_config(tmp_path, file):
    raw, key = json.loads(file.read_text()), key_of(file)
    spec, made, prefix = fitting(raw, MODEL_OF.get(key, "llama"))
    assert made or key in REFUSED, "the model must fit the config"
    if key in REFUSED:
        refuse(tmp_path, raw, spec, made or tensors(), REFUSED[key])
    else:
        serve(tmp_path, raw, spec, made, prefix)


@real
@pytest.mark.parametrize(
    "file", [f for f in FILES if f.parent.name == "tensor_names"], ids=lambda f: f.stem
)
def test_tensor_names(tmp_path, file):
    """Files with the names, dtypes and shapes of real ones; features are 16 times fewer."""
    rng, made = np.random.default_rng(0), {}
    for name, (dtype, shape) in json.loads(file.read_text())["tensors"].items():
        shape = [n // 16 if n >= 128 else n for n in shape]
        made[name] = rng.normal(size=shape).astype({"F16": np.float16}.get(dtype, np.float32))
    lists = [m for k in made if (m := re.match(r"base_model\.model\.(.+?)\.\d+\.", k))]
    layers = (lists or [{1: "model.layers"}])[-1][1]
    prefix, widths, r = f"base_model.model.{layers}", {}, 8
    for name, value in made.items():
        found = re.fullmatch(rf"{re.escape(prefix)}\.\d+\.(.+)\.lora_([AB])\.weight", name)
        if found and found[2] == "A":
            r = value.shape[0]
            widths[found[1]] = (value.shape[1], made[name.replace("lora_A", "lora_B")].shape[0])
    numbers = {int(n) for k in made for n in re.findall(rf"^{re.escape(prefix)}\.(\d+)\.", k)}
    spec = hand_spec(layers, widths or {"mlp.up_proj": (D, D)}, max(numbers, default=0) + 1)
    raw = {"peft_type": "LORA", "r": r, "lora_alpha": 32, "target_modules": sorted(widths)}
    if file.stem in REFUSED:
        if file.stem == "gpt2-style-r":  # an encoder-decoder: one of its two lists is not served
            raw["target_modules"] = ["q", "v"]
        refuse(tmp_path, raw, spec, made, REFUSED[file.stem])
    else:
        serve(tmp_path, raw, spec, made, prefix)


@real
def test_the_tables_speak_of_files_that_exist():
    assert set(REFUSED) | set(MODEL_OF) <= {key_of(f) for f in FILES}


#: Configs of our own making that teach what the collection teaches: (config, model, refusal).
OWN = {
    "2023, few keys": (
        {"bias": "none", "enable_lora": None, "merge_weights": False, "fan_in_fan_out": False},
        "llama",
        None,
    ),
    "attention only, rank 1": (
        {"r": 1, "lora_alpha": 32, "target_modules": ["o_proj"]},
        "llama",
        None,
    ),
    "whole paths of one layer": (
        {"target_modules": [f"model.layers.31.{m}" for m in ATTENTION], "r": 2},
        "llama-32",
        None,
    ),
    "paths and names mixed": (
        {"target_modules": ["1.mlp.down_proj", "o_proj", "layers.0.mlp.up_proj", "o_proj"]},
        "llama",
        None,
    ),
    "regex without anchors": (
        {"target_modules": r"(.*(language_model).*(up_proj|q_proj).*$|.*(other_proj).*$)"},
        "wrapped-old",
        None,
    ),
    "regex of the text part": (
        {"target_modules": r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)"},
        "wrapped",
        None,
    ),
    "towers excluded": ({"exclude_modules": r".*(audio_tower|vision_tower).*"}, "llama", None),
    "fused names": ({"target_modules": ["qkv_proj", "gate_up_proj"]}, "phi-3", None),
    "one name in two blocks": (
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
        "gpt2",
        None,
    ),
    "names null, rank-stabilised": (
        {"target_modules": None, "r": 64, "lora_alpha": 64, "use_rslora": True},
        "llama",
        None,
    ),
    "names of a number": ({"target_modules": ["to_out.0", "linear_in"]}, "image", None),
    "float alpha, newest keys": (
        {
            "lora_alpha": 16.0,
            "task_type": "SEQ_2_SEQ_LM",
            "auto_mapping": {"base_model_class": "LlamaModel"},
            "base_model_name_or_path": "",
            "exclude_modules": [],
            "monteclora_config": None,
            "use_bdlora": None,
            "ensure_weight_tying": False,
            "qalora_group_size": 16,
            "megatron_core": "megatron.core",
        },
        "llama",
        None,
    ),
    "another tool": ({"peft_type": None, "lora_parameters": {"rank": 8}}, "llama", "MLX"),
    "another method": ({"peft_type": "GRALORA", "alpha": 64}, "llama", "GRALORA"),
    "a classifier": ({"modules_to_save": ["score"]}, "llama", "modules_to_save"),
    "regex in a list": ({"target_modules": [r".*\.1.*q_proj"]}, "llama", "PEFT would ignore"),
}


@pytest.mark.parametrize("case", OWN)
def test_own_config(tmp_path, case):
    changes, model, word = OWN[case]
    raw = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        **changes,
    }
    spec, made, prefix = fitting(raw, model)
    if word is None:
        serve(tmp_path, raw, spec, made, prefix)
    else:
        _, everything, _ = fitting({"r": raw["r"]}, model)
        refuse(tmp_path, raw, spec, made or everything, word)


def test_a_real_file_with_text_and_vision_is_not_half_served(tmp_path):
    layers, modules, _ = MODELS["llama"]
    widths = dict.fromkeys(modules, (D, D))
    text = tensors(modules, prefix="base_model.model.model.language_model.layers", widths=widths)
    tower = tensors(
        ["self_attn.q_proj"],
        prefix="base_model.model.model.vision_tower.vision_model.encoder.layers",
        widths=widths,
    )
    raw = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", *modules]}
    spec = hand_spec(layers, widths, 2)
    adapter_from_tensors(raw, text, spec, name="text")
    with pytest.raises(AdapterError, match="vision_tower"):
        adapter_from_tensors(raw, {**text, **tower}, spec, name="both")
