"""What an adapter holds, before any base model is known."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lorajax.adapters import names
from lorajax.adapters.config import PeftConfig, read_config
from lorajax.adapters.matching import is_vocabulary
from lorajax.adapters.problems import Problems, some
from lorajax.adapters.source import (
    local_folder,
    open_weights,
    read_added_tokens,
    read_config_file,
)
from lorajax.adapters.tensors import FLOATS, TensorInfo, Tensors

_DTYPES = frozenset(d.name for d in FLOATS.values())


@dataclass(frozen=True)
class LoraModule:
    """A pair of factors on one linear layer, or on an embedding.

    Attributes:
        path: As PEFT sees it, "model.layers.0.self_attn.q_proj".
        rank: r, from the tensors; equal to what the config says.
        scale: alpha/r or alpha/sqrt(r).
        a: Name of the tensor A `[r, d_in]`.
        b: Name of the tensor B `[d_out, r]`.
        d_in: Input features; of an embedding its tokens.
        d_out: Output features.
        dtype: Element type of A.
        embedding: Whether it is an embedding's.
    """

    path: str
    rank: int
    scale: float
    a: str
    b: str
    d_in: int
    d_out: int
    dtype: str
    embedding: bool = False


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """A PEFT adapter as it was saved, for any base model.

    Attributes:
        name: For messages.
        raw: Its `adapter_config.json`.
        config: The parsed config; None if it cannot be served.
        modules: Its modules by path.
        tensors: Its tensors: infos now, data on demand.
        copies: Tensors that repeat the base's weight of one of its modules, by module.
        others: Tensors that are neither factors nor copies, with their infos.
        added_tokens: Ids of tokens that its tokenizer adds, from `added_tokens.json`.
    """

    name: str
    raw: Mapping[str, Any]
    config: PeftConfig | None
    tensors: Tensors
    modules: Mapping[str, LoraModule] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, TensorInfo] = field(default_factory=dict)
    added_tokens: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Largest rank of a module; 0 without modules."""
        return max((m.rank for m in self.modules.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(i.nbytes for i in self.tensors.infos.values())

    @property
    def module_names(self) -> tuple[str, ...]:
        """Modules that it adapts, below the layer: ("lm_head", "self_attn.q_proj")."""
        return tuple(sorted({names.below_layer(path) for path in self.modules}))


def read_peft(source: str | Path, name: str | None = None) -> PeftAdapter:
    """Reads the config and the tensor shapes of a PEFT folder; its data stays on disk.

    Args:
        source: A local folder with adapter_config.json and adapter_model.safetensors.
        name: For messages; by default the folder's name.

    Raises:
        AdapterError: It cannot be served with any base model; all reasons are told.
    """
    adapter, problems = inspect_folder(source, name)
    report_others(adapter, problems)
    problems.refuse(adapter.name)
    return adapter


def inspect_folder(source: str | Path, name: str | None) -> tuple[PeftAdapter, Problems]:
    """`read_peft` that returns the problems instead of raising them.

    Raises:
        AdapterError: There is no readable config and no readable weight file.
    """
    name = default_name(source) if name is None else names.check_name(name)
    folder = local_folder(source, name)
    raw = read_config_file(folder, name)
    problems = Problems()
    config = read_config(raw, problems)
    if raw.get("peft_type") != "LORA":  # its file is not ours to read
        problems.refuse(name)
    adapter = describe(name, raw, config, open_weights(folder, name), problems)
    return replace(adapter, added_tokens=read_added_tokens(folder, name)), problems


def default_name(source: str | Path) -> str:
    """The last part of the path, as the caller spelled it."""
    return Path(source).name or Path(source).absolute().name


def describe(
    name: str,
    raw: Mapping[str, Any],
    config: PeftConfig | None,
    tensors: Tensors,
    problems: Problems,
) -> PeftAdapter:
    """Pairs the tensors up to modules and checks them against the config."""
    factors: dict[tuple[str, bool], dict[str, str]] = {}
    others = {}
    for tensor, info in tensors.infos.items():
        parsed = names.parse_name(tensor)
        if parsed is None:
            others[tensor] = info
            continue
        pair = factors.setdefault((parsed.path, parsed.embedding), {})
        if parsed.factor in pair:
            problems.add(
                "a module must be in the file once",
                f"{pair[parsed.factor]} and {tensor}",
                "save one adapter in a file",
            )
        pair[parsed.factor] = tensor
    modules = {}
    for (path, embedding), pair in sorted(factors.items()):
        module = _module(path, pair, config, tensors.infos, problems)
        if module is not None and path in modules:
            problems.add(
                "a module must be in the file once",
                f"{modules[path].a} and {module.a}",
                "save the factors of a linear module or of an embedding",
            )
        if module is not None:
            modules[path] = replace(module, embedding=embedding)
    copies = {
        path: tensor
        for tensor in others
        if (path := names.copied_module(tensor)) is not None
        and path in modules
        and is_vocabulary(path)
    }
    _check_tying(raw, modules, problems)
    if not factors:
        problems.add(
            "a file must hold LoRA tensors (names that end in .lora_A.weight, .lora_B.weight, or "
            "in .lora_embedding_A, .lora_embedding_B)",
            "a file with " + (f"only {len(others)} others" if others else "no tensors"),
            "save the adapter with peft's save_pretrained",
        )
    others = {tensor: info for tensor, info in others.items() if tensor not in copies.values()}
    return PeftAdapter(name, raw, config, tensors, modules, copies, others)


def _check_tying(
    raw: Mapping[str, Any], modules: Mapping[str, LoraModule], problems: Problems
) -> None:
    touched = [path for path in modules if is_vocabulary(path)]
    if raw.get("ensure_weight_tying") and touched:
        problems.add(
            "ensure_weight_tying must be false where an embedding or output head is adapted: on a "
            "tied base it gives both the same factors, which is not supported",
            f"ensure_weight_tying=True with {some(touched)}",
            "train without it",
        )


def _module(
    path: str,
    pair: Mapping[str, str],
    config: PeftConfig | None,
    infos: Mapping[str, TensorInfo],
    problems: Problems,
) -> LoraModule | None:
    if len(pair) < 2:
        missing = "B" if "A" in pair else "A"
        tensor = next(iter(pair.values()))
        problems.add(
            "a module must have both lora_A and lora_B",
            f"{tensor} {infos[tensor]} without lora_{missing}",
            "save the adapter again, its file lacks a tensor",
        )
        return None
    a, b = infos[pair["A"]], infos[pair["B"]]
    for tensor, info in ((pair["A"], a), (pair["B"], b)):
        if info.dtype not in _DTYPES:
            problems.add(
                "tensors must be float16, bfloat16, float32 or float64",
                f"{tensor} {info}",
                "convert the adapter, without quantising it",
            )
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or 0 in a.shape + b.shape:
        problems.add(
            "a module must have lora_A [r, d_in] and lora_B [d_out, r] with one r > 0",
            f"{path} with A {a} and B {b}",
            "pass an adapter of linear layers and embeddings (no convolutions, no fused experts)",
        )
        return None
    rank, scale = a.shape[0], 0.0
    if config is not None:
        if config.rank(path) != rank:
            problems.add(
                "the rank of a module must be the one that r and rank_pattern give",
                f"{pair['A']} {a}, rank {rank}, for r={config.rank(path)}",
                "correct r or rank_pattern in adapter_config.json",
            )
        if path not in config.selection:
            problems.add(
                "a tensor must belong to a module that the config targets: PEFT would ignore it",
                f"{pair['A']} {a}",
                "correct target_modules, exclude_modules or layers_to_transform",
            )
        scale = config.scale(path)
    return LoraModule(path, rank, scale, pair["A"], pair["B"], a.shape[1], b.shape[0], a.dtype)


def report_others(
    adapter: PeftAdapter,
    problems: Problems,
    base_shapes: Mapping[str, str] | None = None,
) -> None:
    """Notes tensors that are neither LoRA factors nor copies of the base's weights.

    Args:
        adapter: What was read.
        problems: Noted here.
        base_shapes: What the base has in the place of a tensor, where a spec knows it.
    """
    for tensor, info in adapter.others.items():
        rule, do = names.not_lora(tensor)
        base = (base_shapes or {}).get(tensor)
        problems.add(rule, f"{tensor} {info}" + (f" ({base})" if base else ""), do)


def unmatched_patterns(adapter: PeftAdapter) -> tuple[tuple[str, str], ...]:
    """(field, key) of rank_pattern and alpha_pattern that match no module and so do nothing."""
    if adapter.config is None:
        return ()
    paths = list(adapter.modules)
    config = adapter.config
    return tuple(
        (name, key)
        for name, pattern in (
            ("rank_pattern", config.rank_pattern),
            ("alpha_pattern", config.alpha_pattern),
        )
        for key in pattern.unmatched(paths)
    )
