"""Small adapters in PEFT form, and float64 deltas to compare with."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy

from lorajax import Adapter, LoraSpec, Target

HIDDEN, INNER, Q, KV, LAYERS = 32, 48, 40, 16, 2
#: Width in and out of each linear module of the small model.
SIZES = {
    "self_attn.q_proj": (HIDDEN, Q),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (Q, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BF16 = np.dtype(ml_dtypes.bfloat16)

Tensors = dict[str, np.ndarray]


def spec(merged: bool = True, **changes) -> LoraSpec:
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": 5,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": LAYERS,
        "torch_dtype": "float32",
    }
    made = LoraSpec.from_hf_config(config, num_slots=4, slot_rank=8, merged=merged)
    return LoraSpec(**{**vars(made), **changes})


def sizes(module: str) -> tuple[int, int]:
    if module in FUSED:
        parts = [SIZES[p] for p in FUSED[module]]
        return parts[0][0], sum(p[1] for p in parts)
    return SIZES[module]


def config(**changes) -> dict:
    base = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ALL, "bias": "none"}
    merged = {**base, **changes}
    return {k: v for k, v in merged.items() if v is not ...}


def tensors(
    modules: Sequence[str] = tuple(SIZES),
    *,
    r: int | Mapping[str, int] = 4,
    layers: Sequence[int] = range(LAYERS),
    prefix: str = "base_model.model.model.layers",
    dtype: np.dtype | type = np.float32,
    widths: Mapping[str, tuple[int, int]] | None = None,
) -> Tensors:
    rng, made = np.random.default_rng(7), {}
    for layer in layers:
        for module in modules:
            d_in, d_out = (widths or {}).get(module) or sizes(module)
            rank = r if isinstance(r, int) else r.get(module, 4)
            key = f"{prefix}.{layer}.{module}"
            made[f"{key}.lora_A.weight"] = rng.normal(size=(rank, d_in)).astype(dtype)
            made[f"{key}.lora_B.weight"] = rng.normal(size=(d_out, rank)).astype(dtype)
    return made


def write(folder: Path, raw: Mapping | str, files: Tensors | bytes | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = raw if isinstance(raw, str) else json.dumps(raw)
    (folder / "adapter_config.json").write_text(text)
    if isinstance(files, bytes):
        (folder / "adapter_model.safetensors").write_bytes(files)
    elif files is not None:
        safetensors.numpy.save_file(files, folder / "adapter_model.safetensors")
    return folder


def scale_of(alpha: float, r: int, rslora: bool = False) -> float:
    return alpha / (math.sqrt(r) if rslora else r)


def delta(made: Tensors, path: str, scale: float) -> np.ndarray:
    """`scale * (B A)ᵀ` of one module in float64, `[d_in, d_out]`: the definition of LoRA."""
    A, B = (made[f"{path}.lora_{f}.weight"].astype(np.float64) for f in "AB")
    return scale * (B @ A).T


def packed_delta(adapter: Adapter, target: Target, layer: int) -> np.ndarray:
    """What the slot arrays mean (design of the arrays), in float64: `[d_in, d_out]`."""
    packed = adapter.arrays.get(target.name)
    parts, start = [], 0
    for g, width in enumerate(target.slices):
        total = np.zeros((target.d_in, width))
        for slot in range(adapter.num_slots if packed is not None else 0):
            A = packed.A[slot, layer, g].astype(np.float64)
            B = packed.B[slot, layer, :, start : start + width].astype(np.float64)
            scale = packed.scale[slot, layer, g].astype(np.float64)
            total += np.einsum("ri,r,ro->io", A, scale, B)
        parts.append(total)
        start += width
    return np.concatenate(parts, axis=1)


def module_delta(adapter: Adapter, spec: LoraSpec, module: str, layer: int) -> np.ndarray:
    target, g = spec.module_slices[module]
    start = sum(target.slices[:g])
    return packed_delta(adapter, target, layer)[:, start : start + target.slices[g]]


def expected(
    made: Tensors,
    spec: LoraSpec,
    scales: Mapping[str, float] | float,
    prefix: str = "base_model.model.model.layers",
    fused: Mapping[str, Sequence[str]] = FUSED,
) -> dict[tuple[int, str], np.ndarray]:
    """Float64 delta of each module of the spec in each layer; zeros where the file has none."""
    found = {}
    for layer in range(spec.num_layers):
        for module, (target, g) in spec.module_slices.items():
            zero = np.zeros((target.d_in, target.slices[g]))
            found[layer, module] = zero
        for module in {k.split(".lora_")[0] for k in made}:
            head = f"{prefix}.{layer}."
            if not module.startswith(head):
                continue
            short = module.removeprefix(head)
            scale = scales if isinstance(scales, int | float) else scales[short]
            whole, start = delta(made, module, scale), 0
            for part in fused.get(short, (short,)):
                width = found[layer, part].shape[1]
                found[layer, part] = whole[:, start : start + width]
                start += width
    return found


def assert_deltas(adapter: Adapter, spec: LoraSpec, want: Mapping, rtol: float = 1e-6) -> None:
    for (layer, module), value in want.items():
        got = module_delta(adapter, spec, module, layer)
        bound = rtol * max(1.0, np.abs(value).max())
        np.testing.assert_allclose(got, value, rtol=0, atol=bound, err_msg=f"{layer} {module}")
