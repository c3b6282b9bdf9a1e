"""Targets of the Hugging Face decoder families, read from a `config.json`."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lorajax.errors import SpecError
from lorajax.target import Target

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")

#: Families with Llama's module names and its order of products, and the fields whose default in
#: transformers differs from the obvious one, so that they may not be absent.
LLAMA_LIKE: Mapping[str, tuple[str, ...]] = {
    "llama": (),
    "mistral": ("num_key_value_heads",),
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"),
}

#: Modules of every layer, and those outside of the layers, which are adapted on request.
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")
#: Paths of the latter.
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"

_FUSED = (
    ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
)


@dataclass(frozen=True)
class Family:
    """What a spec takes from a model's config."""

    targets: tuple[Target, ...]
    num_layers: int
    dtype: str
    fused: tuple[tuple[str, tuple[str, ...]], ...]
    vocab_size: int | None


def targets_for(modules: Iterable[str]) -> tuple[str, ...]:
    """Targets that serve these modules: all linear ones, and of `VOCABULARY` those among them."""
    last = {module.rpartition(".")[2] for module in modules}
    return (*LINEAR, *(v for v in VOCABULARY if v in last))


def model_folder(config: object) -> str | None:
    """The folder of a config that was given by its path; arguments as `load_config`."""
    if not isinstance(config, str | Path):
        return None
    path = Path(config)
    return str(path if path.is_dir() else path.parent)


def load_config(config: object) -> Mapping[str, Any]:
    """A model config as a mapping.

    Args:
        config: A folder with a `config.json`, the path of one, a mapping, or an object with a
            `to_dict` method.

    Raises:
        SpecError: It is none of these, or the file cannot be read.
    """
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    if to_dict is not None:
        return to_dict()
    if not isinstance(config, str | Path):
        raise SpecError(
            "config must be a model folder, a config.json, a mapping or a config object; got "
            f"{type(config).__name__}; pass the folder of the model"
        )
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SpecError(
            f"a model config must be readable JSON; got {error} for {path}; pass the folder that "
            "holds the model's config.json"
        ) from error


def read(config: object, *, targets: tuple[str, ...] | None, merged: bool) -> Family:
    """The targets of a model, from its config.

    Args:
        config: See `load_config`.
        targets: Module names to keep ("q_proj" or "self_attn.q_proj"), or None for `LINEAR`.
        merged: One target for q|k|v and one for gate|up.

    Raises:
        SpecError: The family is not known, a size is missing, or a target is not a module.
    """
    cfg = load_config(config)
    if cfg.get("model_type") not in LLAMA_LIKE:
        raise SpecError(
            f"model_type must be one of {list(LLAMA_LIKE)}; got {cfg.get('model_type')!r}; "
            "for another architecture write its Targets by hand: LoraSpec(targets=(Target(...),))"
        )
    names = LINEAR if targets is None else targets
    outside = ("vocab_size",) if any(n.endswith(VOCABULARY) for n in names) else ()
    needed = (*_SIZES, *LLAMA_LIKE[cfg["model_type"]], *outside)
    missing = [k for k in needed if cfg.get(k) is None]
    if missing:
        raise SpecError(
            f"config.json must have {missing}; got keys {sorted(cfg)}; pass the base model's config"
        )
    hidden, inner, heads, layers = (int(cfg[k]) for k in _SIZES)
    head_dim = int(cfg.get("head_dim") or hidden // heads)
    kv_heads = int(cfg.get("num_key_value_heads") or heads)
    q, kv = heads * head_dim, kv_heads * head_dim
    head_counts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "o_proj": heads}
    groups: tuple[tuple[str, int, Literal["column", "row"], dict[str, int]], ...] = (
        ("self_attn.qkv_proj", hidden, "column", {"q_proj": q, "k_proj": kv, "v_proj": kv}),
        ("self_attn.o_proj", q, "row", {"o_proj": hidden}),
        ("mlp.gate_up_proj", hidden, "column", {"gate_proj": inner, "up_proj": inner}),
        ("mlp.down_proj", inner, "row", {"down_proj": hidden}),
    )
    linear = [f"{name.split('.')[0]}.{m}" for name, *_, ms in groups for m in ms]
    keep = _chosen([*linear, EMBEDDING, HEAD], names)
    built = [
        target
        for name, d_in, parallel, widths in groups
        for target in _layered(
            name, d_in, parallel, widths=widths, head_counts=head_counts, keep=keep, merged=merged
        )
    ]
    if outside:
        V = int(cfg["vocab_size"])
        embedding = Target(EMBEDDING, V, hidden, parallel="embedding")
        head = Target(HEAD, hidden, V, parallel="head")
        built += [t for t in (embedding, head) if t.name in keep]
    modules = {m for t in built for m in t.modules}
    return Family(
        targets=tuple(built),
        num_layers=layers,
        dtype=str(cfg.get("dtype") or cfg.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        fused=tuple((name, parts) for name, parts in _FUSED if set(parts) <= modules),
        vocab_size=cfg.get("vocab_size"),
    )


def _layered(
    name: str,
    d_in: int,
    parallel: Literal["column", "row"],
    *,
    widths: dict[str, int],
    head_counts: dict[str, int],
    keep: set[str],
    merged: bool,
) -> list[Target]:
    """The targets of products of a layer that share their input."""
    block = name.split(".")[0]
    parts = {f"{block}.{m}": width for m, width in widths.items()}
    counts = {f"{block}.{m}": (head_counts[m],) if m in head_counts else () for m in widths}
    if not merged:
        return [
            Target(m, d_in, n, (m,), parallel, counts[m]) for m, n in parts.items() if m in keep
        ]
    if not keep & set(parts):
        return []
    whole = tuple(n for count in counts.values() for n in count)
    return [Target(name, d_in, tuple(parts.values()), tuple(parts), parallel, whole)]


def _chosen(modules: list[str], targets: tuple[str, ...]) -> set[str]:
    found = {t: [m for m in modules if m == t or m.endswith("." + t)] for t in targets}
    unknown = [t for t, hits in found.items() if not hits]
    if unknown:
        raise SpecError(
            f"targets must be among {modules}; got {unknown}; use names of these modules"
        )
    return {m for hits in found.values() for m in hits}
