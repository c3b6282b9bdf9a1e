"""Small bases and PEFT adapters with random weights, in the files' true Hugging Face form.

For the demo, the benchmarks and the tests: nothing to download. The truth about an adapter is kept
beside its files (`SyntheticAdapter.delta`), made from the raw A, B and alpha, so that a check
against it does not go through the loader.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

#: Modules of a Llama layer, in the order of the products.
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
#: Fused modules of Phi-3's naming and their parts.
FUSED = {"self_attn.qkv_proj": ATTENTION[:3], "mlp.gate_up_proj": MLP[:2]}

_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class SyntheticBase:
    """Sizes of a base with Llama's architecture; the defaults compile in seconds on a CPU."""

    hidden_size: int = 64
    intermediate_size: int = 160
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    vocab_size: int = 256
    max_position_embeddings: int = 256
    eos_token_id: int = 2
    seed: int = 0

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """`(d_out, d_in)` of each linear module below a layer, fused ones included."""
        d, inner = self.hidden_size, self.intermediate_size
        kv = self.num_key_value_heads * (d // self.num_attention_heads)
        shapes = dict(zip(ATTENTION, ((d, d), (kv, d), (kv, d), (d, d)), strict=True))
        shapes |= dict(zip(MLP, ((inner, d), (inner, d), (d, inner)), strict=True))
        fused = {m: (sum(shapes[p][0] for p in parts), d) for m, parts in FUSED.items()}
        return shapes | fused

    def config(self) -> dict[str, Any]:
        """The `config.json`, in the spelling of transformers 5."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "dtype": "float32",
            "eos_token_id": self.eos_token_id,
            "head_dim": self.hidden_size // self.num_attention_heads,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "pad_token_id": None,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
            "transformers_version": "5.0.0",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }

    def tensors(self) -> dict[str, np.ndarray]:
        """`f32` weights under their Hugging Face names, of the seed; products keep the variance."""
        rng = np.random.default_rng(self.seed)

        def normal(d_out: int, d_in: int, std: float) -> np.ndarray:
            return (std * rng.standard_normal((d_out, d_in))).astype(np.float32)

        d = self.hidden_size
        out = {"model.embed_tokens.weight": normal(self.vocab_size, d, 1.0)}
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            for module in (*ATTENTION, *MLP):
                d_out, d_in = self.shapes[module]
                out[f"{prefix}{module}.weight"] = normal(d_out, d_in, d_in**-0.5)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                out[f"{prefix}{norm}.weight"] = (1 + 0.1 * rng.standard_normal(d)).astype(
                    np.float32
                )
        out["model.norm.weight"] = (1 + 0.1 * rng.standard_normal(d)).astype(np.float32)
        out["lm_head.weight"] = normal(self.vocab_size, d, 2 * d**-0.5)
        return out


@dataclass(frozen=True)
class AdapterRecipe:
    """What an adapter of `make_adapter` is like.

    Attributes:
        name: Of its folder.
        rank: `r` of the config.
        modules: Modules below the layer; keys of `FUSED` for fused files.
        alpha: `lora_alpha` of the config.
        rslora: Scale alpha / √r in place of alpha / r.
        rank_pattern: Module name to rank.
        alpha_pattern: Module name to alpha.
        dtype: Element type of the file.
        about: A word or two for people.
    """

    name: str
    rank: int
    modules: tuple[str, ...] = (*ATTENTION, *MLP)
    alpha: int = 16
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    about: str = "all linear"


#: Ten adapters as people really train them: ranks 1 to 64 in every common form.
RECIPES = (
    AdapterRecipe("chat", 8, (ATTENTION[0], ATTENTION[2]), about="q and v only"),
    AdapterRecipe("tone", 1, alpha=4, about="rank 1"),
    AdapterRecipe("sql", 16, alpha=32),
    AdapterRecipe("law", 32, rslora=True, about="rsLoRA"),
    AdapterRecipe(
        "code",
        8,
        rank_pattern={"q_proj": 24, "down_proj": 4},
        alpha_pattern={"gate_proj": 40, "down_proj": 8},
        about="patterns",
    ),
    AdapterRecipe("med", 16, ATTENTION, dtype="float16", about="float16"),
    AdapterRecipe("phi", 12, (*FUSED, ATTENTION[3], MLP[2]), about="fused names"),
    AdapterRecipe("poet", 4, MLP, alpha=8, about="MLP only"),
    AdapterRecipe("wiki", 48, MLP, alpha=48, about="MLP only"),
    AdapterRecipe("deep", 64, alpha=128),
)


@dataclass(frozen=True)
class SyntheticAdapter:
    """An adapter's files, and the truth about them.

    Attributes:
        recipe: What it is like.
        config: `adapter_config.json`.
        tensors: `adapter_model.safetensors`: A `[r, d_in]`, B `[d_out, r]` of each module.
        scales: Scale of each module path ("model.layers.0.self_attn.q_proj").
    """

    recipe: AdapterRecipe
    config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    scales: Mapping[str, float]

    @property
    def max_rank(self) -> int:
        """Largest rank of a module."""
        return max(t.shape[0] for key, t in self.tensors.items() if ".lora_A." in key)

    def delta(self, base: SyntheticBase) -> dict[str, np.ndarray]:
        """`f64[d_out, d_in]` of `scale B A` by split module path: what the adapter adds to W."""
        out: dict[str, np.ndarray] = {}
        for path, scale in self.scales.items():
            A = self.tensors[f"base_model.model.{path}.lora_A.weight"].astype(np.float64)
            B = self.tensors[f"base_model.model.{path}.lora_B.weight"].astype(np.float64)
            layer, module = _split_path(path)
            product, row = scale * (B @ A), 0
            for part in FUSED.get(module, (module,)):
                d_out = base.shapes[part][0]
                out[f"{layer}.{part}"] = product[row : row + d_out]
                row += d_out
        return out


def make_adapter(
    base: SyntheticBase, recipe: AdapterRecipe, *, seed: int = 0, strength: float = 0.5
) -> SyntheticAdapter:
    """Draws an adapter.

    Args:
        base: What it is for.
        recipe: What it is like.
        seed: Equal seeds give equal weights.
        strength: Standard deviation of `scale B A` over that of the base weight: 0.5 changes most
            greedy tokens and keeps activations in range.
    """
    rng = np.random.default_rng([seed, *recipe.name.encode()])
    tensors, scales = {}, {}
    for layer in range(base.num_hidden_layers):
        for module in recipe.modules:
            path, short = f"model.layers.{layer}.{module}", module.split(".")[-1]
            rank = recipe.rank_pattern.get(short, recipe.rank)
            alpha = recipe.alpha_pattern.get(short, recipe.alpha)
            scale = alpha / (math.sqrt(rank) if recipe.rslora else rank)
            d_out, d_in = base.shapes[module]
            A = rng.standard_normal((rank, d_in)) * d_in**-0.5
            B = rng.standard_normal((d_out, rank)) * strength / (scale * math.sqrt(rank))
            scales[path] = scale
            for key, value in (("lora_A", A), ("lora_B", B)):
                tensors[f"base_model.model.{path}.{key}.weight"] = value.astype(recipe.dtype)
    return SyntheticAdapter(recipe, _peft_config(recipe), tensors, scales)


def _peft_config(recipe: AdapterRecipe) -> dict[str, Any]:
    """The keys that PEFT 0.18 writes for a LoRA of this recipe."""
    unset = (
        "alora_invocation_tokens arrow_config auto_mapping corda_config eva_config exclude_modules "
        "layer_replication layers_pattern layers_to_transform megatron_config modules_to_save "
        "revision target_parameters trainable_token_indices base_model_name_or_path"
    )
    return dict.fromkeys(unset.split()) | {
        "alpha_pattern": dict(recipe.alpha_pattern),
        "bias": "none",
        "ensure_weight_tying": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "loftq_config": {},
        "lora_alpha": recipe.alpha,
        "lora_bias": False,
        "lora_dropout": 0.0,
        "megatron_core": "megatron.core",
        "peft_type": "LORA",
        "peft_version": "0.18.0",
        "qalora_group_size": 16,
        "r": recipe.rank,
        "rank_pattern": dict(recipe.rank_pattern),
        "target_modules": sorted(module.split(".")[-1] for module in recipe.modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": recipe.rslora,
    }


def write_base(
    path: str | Path, base: SyntheticBase, tensors: Mapping[str, np.ndarray] | None = None
) -> Path:
    """Writes `config.json`, `generation_config.json` and `model.safetensors`.

    Args:
        path: Folder; made if it is not there.
        base: Sizes and seed.
        tensors: Other weights, for example `merged_tensors`, in place of the base's own.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    generation = {"bos_token_id": 1, "eos_token_id": base.eos_token_id, "do_sample": False}
    _write_json(path / "config.json", base.config())
    _write_json(path / "generation_config.json", generation)
    weights = dict(base.tensors() if tensors is None else tensors)
    save_file(weights, path / "model.safetensors", metadata=_METADATA)
    return path


def write_adapter(path: str | Path, adapter: SyntheticAdapter) -> Path:
    """Writes `adapter_config.json` and `adapter_model.safetensors` into a folder."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "adapter_config.json", adapter.config)
    save_file(dict(adapter.tensors), path / "adapter_model.safetensors", metadata=_METADATA)
    return path


def merged_tensors(
    base: SyntheticBase,
    weights: Sequence[tuple[SyntheticAdapter, float]],
    tensors: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """`f32` weights of the base with adapters merged in: `W + Σ w_i s_i B_i A_i`, summed in f64.

    Args:
        base: Sizes and seed.
        weights: Adapters and their weights; none gives the base.
        tensors: The base's own tensors, if they are at hand already.
    """
    merged = dict(base.tensors() if tensors is None else tensors)
    total: dict[str, np.ndarray] = {}
    for adapter, weight in weights:
        for path, delta in adapter.delta(base).items():
            total[path] = total.get(path, 0.0) + weight * delta
    for path, delta in total.items():
        key = f"{path}.weight"
        merged[key] = (merged[key].astype(np.float64) + delta).astype(np.float32)
    return merged


def _split_path(path: str) -> tuple[str, str]:
    """("model.layers.0", "self_attn.q_proj") of "model.layers.0.self_attn.q_proj"."""
    words = path.split(".")
    return ".".join(words[:3]), ".".join(words[3:])


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
