"""`adapter_config.json` of a PEFT LoRA adapter: parsed, or refused naming the field."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lorajax.adapters import fields
from lorajax.adapters.matching import (
    LAYERS_PATTERN,
    PATTERN_KEY,
    Pattern,
    Selection,
    regex_error,
)
from lorajax.adapters.problems import Problems


@dataclass(frozen=True)
class PeftConfig:
    """The fields that decide what an adapter computes.

    Attributes:
        r: Rank of a module that `rank_pattern` does not name.
        alpha: `lora_alpha` of a module that `alpha_pattern` does not name.
        use_rslora: Scale alpha/sqrt(r) in place of alpha/r.
        rank_pattern: Ranks of some modules.
        alpha_pattern: Alphas of some modules.
        selection: Which modules are targeted.
    """

    r: int
    alpha: float
    use_rslora: bool
    rank_pattern: Pattern
    alpha_pattern: Pattern
    selection: Selection

    def rank(self, path: str) -> int:
        """Rank of the module at that path."""
        return int(self.rank_pattern.get(path, self.r))

    def scale(self, path: str) -> float:
        """alpha/r, or alpha/sqrt(r), of the module at that path (PEFT's `LoraLayer.scaling`)."""
        r, alpha = self.rank(path), float(self.alpha_pattern.get(path, self.alpha))
        return alpha / math.sqrt(r) if self.use_rslora else alpha / r


def read_config(raw: Mapping[str, Any], problems: Problems) -> PeftConfig | None:
    """Parses a config and notes every field that cannot be served.

    A key is read, known to be harmless, or refused if it is set. Unknown keys follow one policy:
    null, false, zero and empty values are ignored, anything else is refused.

    Returns:
        The config, or None if it is not PEFT LoRA or lacks what is needed to read the tensors.
    """
    if raw.get("peft_type") != "LORA":
        _refuse_method(raw, problems)
        return None
    for key, value in raw.items():
        if key in fields.REFUSED and value:
            why, do = fields.REFUSED[key]
            problems.add(f"{key} must not be set: {why}", f"{key}={_short(value)}", do)
        elif value and key not in fields.READ | fields.HARMLESS | set(fields.REFUSED):
            problems.add(
                "a key that this loader does not know must be null, false or empty, since it may "
                "change the arithmetic",
                f"{key}={_short(value)}",
                "drop it from adapter_config.json if it only concerns training",
            )
    if raw.get("bias") not in (None, "none", "", False):
        problems.add(
            "bias must be 'none': trained biases are not supported",
            f"bias={_short(raw['bias'])}",
            "train with bias='none', or merge the adapter into the base model",
        )
    _check_init(raw.get("init_lora_weights"), problems)
    get = _Fields(raw, problems)
    r = get.value("r", _is_rank, "an integer > 0")
    alpha = get.value("lora_alpha", _is_number, "a finite number")
    use_rslora = get.value("use_rslora", _is_bool, "true or false", default=False)
    ranks = get.pattern("rank_pattern", _is_rank, "an integer > 0")
    alphas = get.pattern("alpha_pattern", _is_number, "a finite number")
    selection = _read_selection(get)
    if r is None or alpha is None:
        return None
    return PeftConfig(r, float(alpha), bool(use_rslora), ranks, alphas, selection)


def _refuse_method(raw: Mapping[str, Any], problems: Problems) -> None:
    kind = raw.get("peft_type")
    if kind is not None:
        problems.add(
            "peft_type must be 'LORA': other methods are not supported",
            f"peft_type={_short(str(kind))}",
            "train the adapter with peft.LoraConfig, or merge it into the base model",
        )
        return
    if "lora_parameters" in raw or "fine_tune_type" in raw:
        what = "what looks like an MLX config (lora_parameters, fine_tune_type)"
        do = "convert the adapter to PEFT form, or fuse it into the base model with mlx_lm"
    elif "model_class" in raw or isinstance(raw.get("config"), Mapping):
        what = "what looks like an adapter-transformers (AdapterHub) config"
        do = "train the adapter with peft.LoraConfig"
    else:
        what = f"no peft_type among the keys {_short(sorted(map(str, raw)))}"
        do = "pass a folder that peft's save_pretrained wrote"
    problems.add("adapter_config.json must be PEFT's, with peft_type 'LORA'", what, do)


def _check_init(init: object, problems: Problems) -> None:
    if init is None or isinstance(init, bool):
        return
    name = str(init).lower()
    if name in fields.HARMLESS_INITS:
        return
    known = name.startswith(fields.BASE_CHANGING_INITS)
    problems.add(
        "init_lora_weights must leave the base weight unchanged"
        + (": this one subtracts from it" if known else ": this one is not known to do so"),
        f"init_lora_weights={_short(init)}",
        "save the adapter with path_initial_model_for_weight_conversion, which turns it into plain "
        "LoRA of the original base",
    )


def _read_selection(get: "_Fields") -> Selection:
    targets = get.names("target_modules")
    exclude = get.names("exclude_modules")
    layers = get.value(
        "layers_to_transform", _is_layers, "an integer, a list of integers or null", default=None
    )
    if isinstance(layers, int):
        layers = (layers,)
    pattern = get.names("layers_pattern")
    patterns = (pattern,) if isinstance(pattern, str) else pattern or ()
    for expression in patterns:
        if error := regex_error(expression, LAYERS_PATTERN):
            patterns = ()
            get.problems.add(
                "layers_pattern must be valid regular expressions",
                f"{_short(expression)} ({error})",
                "correct layers_pattern in adapter_config.json",
            )
    if isinstance(targets, str) and layers:
        get.problems.add(
            "layers_to_transform must be null where target_modules is a regular expression",
            f"layers_to_transform={_short(layers)} and target_modules={_short(targets)}",
            "put the layers into the expression",
        )
    return Selection(
        targets=targets,
        exclude=exclude or (),
        layers=tuple(sorted(set(layers))) if layers else None,
        layers_pattern=patterns,
    )


@dataclass(frozen=True)
class _Fields:
    """Typed access to a config; what has the wrong type is noted, and read as absent."""

    raw: Mapping[str, Any]
    problems: Problems

    def value(self, key: str, valid: Callable[[Any], bool], what: str, **default: Any) -> Any:
        value = self.raw.get(key)
        if value is None and default:
            return default["default"]
        if valid(value):
            return value
        got = f"{key}={_short(value)}" if key in self.raw else f"a config without {key!r}"
        self.problems.add(f"{key} must be {what}", got, f"set {key} in adapter_config.json")
        return default.get("default")

    def pattern(self, key: str, valid: Callable[[Any], bool], what: str) -> Pattern:
        value = self.raw.get(key) or {}
        if not isinstance(value, Mapping):
            value = {"": value}
        items = []
        for name, number in value.items():
            named = isinstance(name, str) and name
            error = regex_error(name, PATTERN_KEY) if named else "not a module name"
            if error is None and valid(number):
                items.append((name, number))
                continue
            self.problems.add(
                f"{key} must map regular expressions of module names to {what}",
                f"{_short(name)}: {_short(number)}" + (f" ({error})" if error else ""),
                f"correct {key} in adapter_config.json",
            )
        return Pattern(tuple(items))

    def names(self, key: str) -> tuple[str, ...] | str | None:
        """One regular expression, or names without order and doubles; None if absent or empty."""
        value = self.raw.get(key)
        if not value:
            return () if key == "target_modules" and value is not None else None
        if isinstance(value, str):
            error = regex_error(value)
            if error is None:
                return value
            self.problems.add(
                f"{key} must be a valid regular expression or a list",
                f"{key}={_short(value)} ({error})",
                f"correct {key} in adapter_config.json",
            )
            return None
        if isinstance(value, list | tuple | set | frozenset) and all(
            isinstance(v, str) and v for v in value
        ):
            return tuple(sorted(set(value)))
        self.problems.add(
            f"{key} must be a string or a list of strings",
            f"{key}={_short(value)}",
            f"correct {key} in adapter_config.json",
        )
        return None


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_rank(value: Any) -> bool:
    return _is_int(value) and value > 0


def _is_layers(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, list | tuple) and all(map(_is_int, value)))


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < 3e38  # finite in float32, where scales are kept


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
