"""Which modules an adapter targets, and their rank and alpha: PEFT's own rules.

Paths are those that PEFT sees: "model.layers.0.self_attn.q_proj". The rules are those of
`check_target_module_exists` and `get_pattern_key` in PEFT 0.21; tests compare them with PEFT.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_HEADS = ("lm_head", "embed_out", "output_layer")
_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "word_embeddings", "embeddings", "embed_in")
#: How PEFT wraps a key of rank_pattern or alpha_pattern, and an entry of layers_pattern.
PATTERN_KEY = r"(.*\.)?({})$"
LAYERS_PATTERN = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
#: The first numbered segment below a named one: the layer, not an expert.
_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")


@dataclass(frozen=True)
class Selection:
    """The modules that an `adapter_config.json` names.

    Attributes:
        targets: Names (equal to the path, or its tail after a dot), one regular expression for the
            whole path, or None: then the tensors of the file decide.
        exclude: The same two forms; wins over `targets`.
        layers: Only these layers; None for all. Only with names.
        layers_pattern: Names of the layer list; empty for any.
    """

    targets: tuple[str, ...] | str | None = None
    exclude: tuple[str, ...] | str = ()
    layers: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()

    def __contains__(self, path: str) -> bool:
        """Whether PEFT would put LoRA on the linear module or embedding at `path`."""
        if self.exclude and _named(self.exclude, path):
            return False
        if self.targets is None:
            return True
        if isinstance(self.targets, str):
            if self.targets.lower() == "all-linear":
                return not is_vocabulary(path)
            return re.fullmatch(self.targets, path) is not None
        if path in self.targets:  # a whole path is not filtered by layer
            return True
        return _named(self.targets, path) and self._in_layers(path)

    def _in_layers(self, path: str) -> bool:
        if self.layers is None:
            return True
        match = None if self.layers_pattern else _FIRST_INDEX.match(path)
        for pattern in self.layers_pattern:
            match = re.match(LAYERS_PATTERN.format(pattern), path)
            if match is not None:
                break
        index = "" if match is None else match["idx"]
        return 0 < len(index) < 10 and int(index) in self.layers


def is_vocabulary(path: str) -> bool:
    """Whether an output head or an embedding is at `path`; "all-linear" leaves both out."""
    return path.rpartition(".")[2] in _HEADS + _EMBEDDINGS


def _named(names: tuple[str, ...] | str, path: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return path in names or any(path.endswith("." + name) for name in names)


@dataclass(frozen=True)
class Pattern:
    """`rank_pattern` or `alpha_pattern`: values for the modules that a key matches.

    A key is a regular expression for the whole path or for its tail after any dot; the first key
    that matches wins.
    """

    items: tuple[tuple[str, int | float], ...] = ()

    def get(self, path: str, default: int | float) -> int | float:
        """The module's value, or the default."""
        return next((value for key, value in self.items if _tail(key, path)), default)

    def unmatched(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Keys that match no path: PEFT ignores them."""
        return tuple(key for key, _ in self.items if not any(_tail(key, p) for p in paths))


def _tail(key: str, path: str) -> bool:
    return re.match(PATTERN_KEY.format(key), path) is not None


def regex_error(pattern: str, around: str = "{}") -> str | None:
    """Why a regular expression cannot be used inside of `around`, or None."""
    try:
        re.compile(around.format(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        return str(error)
    return None
