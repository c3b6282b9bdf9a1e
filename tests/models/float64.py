"""A decoder in float64 NumPy, written from the papers' formulas: the reference of bfloat16."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def merged(
    tensors: Mapping[str, np.ndarray], deltas: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Base tensors in float64 with `[d_out, d_in]` deltas added to modules."""
    out = {name: t.astype(np.float64) for name, t in tensors.items()}
    for module, delta in deltas.items():
        out[f"{module}.weight"] = out[f"{module}.weight"] + delta
    return out


def logits(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], tokens: np.ndarray
) -> np.ndarray:
    """`f64[Q, V]` of one sequence; default rope, no window."""
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    Q, eps = len(tokens), config["rms_norm_eps"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        return x / scale * tensors[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)

    def rotate(x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angle = np.arange(Q)[:, None] * theta ** (-np.arange(half) / half)
        turned = np.exp(1j * angle)[:, None] * (x[..., :half] + 1j * x[..., half:])
        return np.concatenate([turned.real, turned.imag], axis=-1)

    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer, attn = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        h = norm(x, f"{layer}.input_layernorm")
        q = linear(h, f"{attn}.q_proj").reshape(Q, heads, -1)
        k, v = (linear(h, f"{attn}.{p}_proj").reshape(Q, kv, -1) for p in "kv")
        if f"{attn}.q_norm.weight" in tensors:
            q, k = norm(q, f"{attn}.q_norm"), norm(k, f"{attn}.k_norm")
        k, v = (np.repeat(t, heads // kv, axis=1) for t in (rotate(k), v))
        scores = np.einsum("qhd,chd->hqc", rotate(q), k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(Q, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hqc,chd->qhd", weights, v).reshape(Q, -1)
        x = x + linear(out, f"{attn}.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(h, f"{layer}.mlp.gate_proj")
        inner = gate / (1 + np.exp(-gate)) * linear(h, f"{layer}.mlp.up_proj")
        x = x + linear(inner, f"{layer}.mlp.down_proj")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T
