"""Tensor names of adapter files: module path and factor, place in the model, or why not LoRA."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lorajax.errors import AdapterError

_PREFIX = "base_model.model."
#: Put around a model by compilation and by data parallelism; no part of the path PEFT matches.
_WRAPPED = re.compile(r"^(?:(?:_orig_mod|_fsdp_wrapped_module)\.)+")
#: With or without the adapter's name between the factor and "weight"; those of an embedding are
#: parameters of their own, without "weight".
_FACTOR = re.compile(r"^(?P<path>.+)\.lora_(?P<factor>[AB])(?:\.[^.]+)?\.weight$")
_EMBEDDING = re.compile(r"^(?P<path>.+)\.lora_embedding_(?P<factor>[AB])(?:\.[^.]+)?$")
#: What PEFT saves beside the factors of an embedding or head: the base's own weight.
_BASE_COPY = re.compile(r"^(?P<path>.+)\.base_layer\.weight$")
#: Names around the text layers that come and go between a text-only class and a multimodal one.
_WRAPPERS = frozenset({"model", "language_model", "text_model", "base_model", "llm", "thinker"})
_INDEX = re.compile(r"[0-9]{1,9}")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LONGEST_NAME = 128


@dataclass(frozen=True)
class Factor:
    """One LoRA tensor: factor A or B of the linear module or embedding at `path`."""

    path: str
    factor: Literal["A", "B"]
    embedding: bool = False

    @property
    def suffix(self) -> str:
        """What PEFT writes after the path."""
        return f"lora_embedding_{self.factor}" if self.embedding else f"lora_{self.factor}.weight"


def parse_name(tensor: str) -> Factor | None:
    """The factor a tensor is, or None if it is none."""
    bare = module_path(tensor)
    linear, embedding = _FACTOR.match(bare), _EMBEDDING.match(bare)
    match = linear or embedding
    if match is None:
        return None
    return Factor(match["path"], "A" if match["factor"] == "A" else "B", linear is None)


def copied_module(tensor: str) -> str | None:
    """The path of the module whose base weight the tensor repeats, or None."""
    match = _BASE_COPY.match(module_path(tensor))
    return None if match is None else match["path"]


def canonical(tensor: str) -> str:
    """The name that PEFT's `save_pretrained` gives the tensor."""
    parsed = parse_name(tensor)
    return tensor if parsed is None else f"{_PREFIX}{parsed.path}.{parsed.suffix}"


def module_path(tensor: str) -> str:
    """The name without the wrappers that PEFT, compilers and data parallelism put around it."""
    bare = _WRAPPED.sub("", tensor)
    if bare.startswith("module." + _PREFIX):
        bare = bare.removeprefix("module.")
    return _WRAPPED.sub("", bare.removeprefix(_PREFIX))


#: What other tensors of adapter files are: (name, what it is, remedy); the first match is told.
_OTHER = (
    (
        r"\.lora_magnitude_vector\b",
        "a tensor must not be a DoRA magnitude: DoRA is not supported",
        "merge the adapter into the base model, or train it with use_dora=false",
    ),
    (
        r"\.lora_[AB](\.[^.]+)?\.bias$",
        "LoRA factors must have no bias: lora_bias is not supported",
        "train with lora_bias=false",
    ),
    (
        r"\.bias$",
        "an adapter must hold no bias: trained biases and modules_to_save are not supported",
        "train with bias='none' and without modules_to_save",
    ),
    (
        r"\.(trainable_tokens_delta|token_adapter)\b",
        "an adapter must not train token rows: trainable_token_indices is not supported",
        "train without trainable_token_indices, or merge into the base model",
    ),
    (
        r"\.modules_to_save\.|\.weight$",
        "an adapter must hold low-rank factors only: a full weight (modules_to_save, or a resized "
        "vocabulary) is not supported",
        "train without modules_to_save and added tokens, or put these weights into the base model "
        "and drop them from the file",
    ),
)


def not_lora(tensor: str) -> tuple[str, str]:
    """Rule and remedy for a tensor that is no factor."""
    for pattern, rule, do in _OTHER:
        if re.search(pattern, module_path(tensor)):
            return rule, do
    return (
        "every tensor must be a lora_A or lora_B weight",
        "convert the file with the library that wrote it, to PEFT LoRA in safetensors form",
    )


@dataclass(frozen=True)
class Location:
    """A module inside a layer: "model.layers.3.mlp.up_proj" is (3, "mlp.up_proj").

    Outside of the layers it is (0, "lm_head"), and `layers` is empty.
    """

    layer: int
    module: str
    layers: str


def locate(path: str, layers: str, outside: Sequence[str] = ()) -> Location | None:
    """The layer and module of a path, if it lies in the layer list `layers` or is one of `outside`.

    Usual wrappers around the layers ("model", "language_model", ...) may differ on either side, and
    the file may come from a bare model ("h.0" for "transformer.h"). Another list ("vision_tower.
    encoder.layers") is not taken for it.
    """
    parts = path.split(".")
    for i, part in enumerate(parts[:-1]):
        if _INDEX.fullmatch(part) and _same_list(parts[:i], layers.split(".")):
            return Location(int(part), ".".join(parts[i + 1 :]), ".".join(parts[:i]))
    same = (m for m in outside if _same_list(parts, m.split(".")))
    return next((Location(0, module, "") for module in same), None)


def _same_list(file: list[str], spec: list[str]) -> bool:
    if file == spec:
        return True
    file_core = [p for p in file if p not in _WRAPPERS]
    spec_core = [p for p in spec if p not in _WRAPPERS]
    return bool(file_core) and file_core == spec_core[-len(file_core) :]


def below_layer(path: str) -> str:
    """The module's name below its layer, for any layer list; the path itself if it has none."""
    return re.sub(r"^.*?\.\d+\.", "", path)


def check_name(name: str) -> str:
    """A name that is safe in messages, metrics and paths: returned unchanged.

    Raises:
        AdapterError: It is empty, longer than 128, holds ".." or anything but letters, digits,
            ".", "_" and "-", or does not begin with a letter or digit.
    """
    if len(name) > _LONGEST_NAME or ".." in name or not _SAFE_NAME.fullmatch(name):
        raise AdapterError(
            "an adapter name must be 1 to 128 letters, digits, '.', '_' or '-', begin with a "
            f"letter or digit and hold no '..'; got {name[:200]!r}; rename it"
        )
    return name
