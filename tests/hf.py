"""Tiny bases and PEFT adapters in true Hugging Face form, drawn from seeds.

Weights come from the raw bits of PCG64, which no NumPy version changes, so the goldens can be made
with torch and tested without it.
"""

import fnmatch
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
#: Modules outside of the layers, by their paths.
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"

_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_V4 = {"torch_dtype": "float32", "rope_theta": 10000.0}
_V5 = {"dtype": "float32", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def _llama(**fields: Any) -> dict[str, Any]:
    return {**_COMMON, **fields}


def _other(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    names = {"model_type": model_type, "architectures": [architecture]}
    return {**_COMMON, **_V5, **names, **fields}


#: `config.json` of every tiny base, in both spellings.
BASES: Mapping[str, dict[str, Any]] = {
    "llama2": _llama(**_V4, num_key_value_heads=4),
    "llama3": _llama(
        torch_dtype="float32",
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        tie_word_embeddings=True,
        hidden_size=64,
    ),
    "llama_bias": _llama(
        dtype="float32",
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        attention_bias=True,
        mlp_bias=True,
    ),
    "mistral": _other("mistral", "MistralForCausalLM", sliding_window=None, head_dim=16),
    "mistral_window": _other("mistral", "MistralForCausalLM", sliding_window=4),
    "qwen2": _other("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True, sliding_window=4),
    "qwen2_window": _other(
        "qwen2",
        "Qwen2ForCausalLM",
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "qwen3": _other("qwen3", "Qwen3ForCausalLM", head_dim=20, attention_bias=False),
}


def uniform(name: str, shape: tuple[int, ...], std: float, seed: int = 0) -> np.ndarray:
    """`f32` uniform numbers of that standard deviation, a function of name and seed alone."""
    bits = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(int(np.prod(shape)))
    unit = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    return (unit * (std * 3**0.5)).astype(np.float32).reshape(shape)


def module_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """`(d_out, d_in)` of each linear module below a layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
    return {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def base_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of `model.safetensors`, float32."""
    hidden, vocab, kind = config["hidden_size"], config["vocab_size"], config["model_type"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if kind == "qwen3":
            for norm in ("q_norm", "k_norm"):
                shapes[f"{layer}.self_attn.{norm}.weight"] = (config["head_dim"],)
        for module, (d_out, d_in) in module_shapes(config).items():
            shapes[f"{layer}.{module}.weight"] = (d_out, d_in)
            biased = config.get("mlp_bias" if module.startswith("mlp") else "attention_bias")
            if biased or (kind == "qwen2" and module.endswith(("q_proj", "k_proj", "v_proj"))):
                shapes[f"{layer}.{module}.bias"] = (d_out,)
    return {name: _tensor(name, shape, seed) for name, shape in shapes.items()}


def _tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if name.endswith("norm.weight"):
        return 1 + uniform(name, shape, 0.2, seed)
    if name.endswith("embed_tokens.weight"):
        return uniform(name, shape, 1.0, seed)
    return uniform(name, shape, shape[-1] ** -0.5 if len(shape) == 2 else 0.3, seed)


#: `adapter_config.json` of every adapter form (besides the common fields), with the dtype of its
#: tensors. "split" is for PEFT what "fused" is: its bases have no fused modules.
FORMS: Mapping[str, tuple[dict[str, Any], Any]] = {
    "plain": ({"r": 8, "lora_alpha": 16, "target_modules": list(ATTENTION)}, np.float32),
    "qv": ({"r": 4, "lora_alpha": 6.5, "target_modules": ["v_proj", "q_proj"]}, np.float32),
    "all_linear": ({"r": 16, "lora_alpha": 8, "target_modules": "all-linear"}, np.float32),
    "rslora": (
        {"r": 16, "lora_alpha": 4, "use_rslora": True, "target_modules": list(LINEAR)},
        np.float32,
    ),
    "patterns": (
        {
            "r": 8,
            "lora_alpha": 8,
            "target_modules": list(LINEAR),
            "rank_pattern": {"q_proj": 4, r"model.layers.1.mlp.down_proj": 20, "up_proj": 2},
            "alpha_pattern": {"v_proj": 24, "layers.0.self_attn.q_proj": 3},
        },
        np.float32,
    ),
    "regex": (
        {
            "r": 8,
            "lora_alpha": 12,
            "target_modules": r"model\.layers\.\d+\.(self_attn\.(q|o)_proj|mlp\.down_proj)",
        },
        np.float32,
    ),
    "layers": (
        {"r": 8, "lora_alpha": 8, "target_modules": list(LINEAR), "layers_to_transform": [1]},
        np.float32,
    ),
    "float16": (
        {"r": 40, "lora_alpha": 20, "target_modules": ["self_attn.o_proj", "up_proj"]},
        np.float16,
    ),
    "bfloat16": (
        {"r": 8, "lora_alpha": 8, "target_modules": ["k_proj", "gate_proj"]},
        ml_dtypes.bfloat16,
    ),
    "exclude": (
        {
            "r": 8,
            "lora_alpha": 8,
            "target_modules": list(LINEAR),
            "exclude_modules": ["o_proj", "layers.0.mlp.up_proj"],
        },
        np.float32,
    ),
    "embedding": ({"r": 8, "lora_alpha": 12, "target_modules": ["embed_tokens"]}, np.float32),
    "head": (
        {"r": 24, "lora_alpha": 6, "use_rslora": True, "target_modules": ["lm_head"]},
        np.float32,
    ),
    "vocabulary": (
        {
            "r": 8,
            "lora_alpha": 8,
            "target_modules": [*LINEAR, "embed_tokens", "lm_head"],
            "rank_pattern": {"embed_tokens": 4, "lm_head": 20},
            "alpha_pattern": {"model.embed_tokens": 5, "lm_head": 30},
        },
        ml_dtypes.bfloat16,
    ),
    "split": (
        {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
        },
        "fused",
    ),
    "fused": (
        {"r": 8, "lora_alpha": 16, "target_modules": ["qkv_proj", "gate_up_proj"]},
        "fused",
    ),
}
#: Forms that touch what is outside of the layers.
VOCABULARY = ("embedding", "head", "vocabulary")
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
#: For each form, its rank in the modules ("layer.module") that match a pattern; the first decides.
_TOUCHED: Mapping[str, dict[str, int]] = {
    "plain": {"*.self_attn.*": 8},
    "qv": {"*.q_proj": 4, "*.v_proj": 4},
    "all_linear": {"*": 16},
    "rslora": {"*": 16},
    "patterns": {"*.q_proj": 4, "1.mlp.down_proj": 20, "*.up_proj": 2, "*": 8},
    "regex": {"*.q_proj": 8, "*.o_proj": 8, "*.down_proj": 8},
    "layers": {"1.*": 8},
    "float16": {"*.o_proj": 40, "*.up_proj": 40},
    "bfloat16": {"*.k_proj": 8, "*.gate_proj": 8},
    "exclude": {"*.o_proj": 0, "0.mlp.up_proj": 0, "*": 8},
    "embedding": {},
    "head": {},
    "vocabulary": {"*": 8},
}
_OUTSIDE: Mapping[str, dict[str, int]] = {
    "embedding": {EMBEDDING: 8},
    "head": {HEAD: 24},
    "vocabulary": {EMBEDDING: 4, HEAD: 20},
}


def adapter_config(form: str) -> dict[str, Any]:
    """The `adapter_config.json` of a form."""
    common = {
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
    }
    return {**common, **FORMS[form][0]}


def adapter_tensors(form: str, config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of `adapter_model.safetensors` of a form for a base."""
    shapes, dtype = module_shapes(config), FORMS[form][1]
    if dtype == "fused":
        return _fused(form, config, seed)
    tensors: dict[str, np.ndarray] = {}
    for i in range(config["num_hidden_layers"]):
        for module, shape in shapes.items():
            ranks = [r for p, r in _TOUCHED[form].items() if fnmatch.fnmatch(f"{i}.{module}", p)]
            if ranks and ranks[0]:
                pair = _pair(f"{form}.{i}.{module}", shape, ranks[0], seed)
                tensors |= _named(i, module, *(t.astype(dtype) for t in pair))
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    for module, rank in _OUTSIDE.get(form, {}).items():
        shape = (hidden, vocab) if module == EMBEDDING else (vocab, hidden)
        A, B = (t.astype(dtype) for t in _pair(f"{form}.{module}", shape, rank, seed))
        if module == EMBEDDING:
            A *= np.asarray(vocab**0.5, dtype)  # one entry of A counts, not a sum over all
        keys = ("embedding_A", "embedding_B") if module == EMBEDDING else ("A.weight", "B.weight")
        tensors |= {f"base_model.model.{module}.lora_{keys[0]}": A}
        tensors |= {f"base_model.model.{module}.lora_{keys[1]}": B}
    return tensors


def _fused(form: str, config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    shapes, tensors = module_shapes(config), {}
    for i in range(config["num_hidden_layers"]):
        for module, parts in _FUSED.items():
            widths, d_in = [shapes[p][0] for p in parts], config["hidden_size"]
            A, B = _pair(f"fused.{i}.{module}", (sum(widths), d_in), 8, seed)
            if form == "fused":
                tensors |= _named(i, module, A, B)
                continue
            for part, b in zip(parts, np.split(B, np.cumsum(widths)[:-1]), strict=True):
                tensors |= _named(i, part, A.copy(), b.copy())
    return tensors


def _pair(name: str, shape: tuple[int, int], rank: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    d_out, d_in = shape
    A = uniform(name + ".A", (rank, d_in), d_in**-0.5, seed)
    return A, uniform(name + ".B", (d_out, rank), 0.5 * rank**-0.5, seed)


def _named(layer: int, module: str, A: np.ndarray, B: np.ndarray) -> dict[str, np.ndarray]:
    base = f"base_model.model.model.layers.{layer}.{module}"
    return {f"{base}.lora_A.weight": A, f"{base}.lora_B.weight": B}


def dense_deltas(form: str, config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """`s B A` of every module ("model.layers.0.mlp.up_proj"), float64: an oracle without torch.

    That of the embedding is transposed, as its weight is.
    """
    cfg, deltas = adapter_config(form), {}
    tensors = adapter_tensors(form, config, seed)
    for key, A in tensors.items():
        if not key.endswith((".lora_A.weight", ".lora_embedding_A")):
            continue
        module = key.removeprefix("base_model.model.").split(".lora_")[0]
        B = tensors[key.replace("_A", "_B")].astype(np.float64)
        patterns = cfg.get("alpha_pattern", {}).items()
        alphas = [a for p, a in patterns if re.search(rf"(^|\.){p}$", module)]
        alpha = alphas[0] if alphas else cfg["lora_alpha"]
        rank = A.shape[0]
        scale = alpha / (rank**0.5 if cfg.get("use_rslora") else rank)
        delta = scale * (B @ A.astype(np.float64))
        deltas[module] = delta.T if module == EMBEDDING else delta
    return deltas


def write_base(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], shards: int = 1
) -> Path:
    """Writes a model folder; with `shards` > 1 as transformers shards it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        names = list(tensors)[i::shards]
        save_file({n: tensors[n] for n in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    size = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_adapter(folder: Path, form: str, config: Mapping[str, Any], seed: int = 0) -> Path:
    """Writes a PEFT adapter folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(form)))
    tensors = adapter_tensors(form, config, seed)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
