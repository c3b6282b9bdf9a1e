"""Sizes and layout of a decoder, from a Hugging Face `config.json` in either spelling."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lorajax.errors import ModelError, SpecError
from lorajax.families import LLAMA_LIKE, load_config
from lorajax.models.rope import Rope

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
#: Fields that change the maths: the values that are implemented (the first is what absence means).
_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
    "compression_config": (None,),
    "is_causal": (True, None),
    "add_cross_attention": (False, None),
}
_DTYPES = ("bfloat16", "float16", "float32")
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama kind.

    Attributes:
        family: "llama", "mistral", "qwen2" or "qwen3".
        vocab_size: V.
        hidden_size: D of the residual stream.
        intermediate_size: Features inside the MLP.
        num_layers: L.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, Hkv.
        head_dim: Features of a head.
        max_positions: Context the model was made for.
        norm_eps: Added to the mean square in every norm.
        rope: Rotary embedding.
        windows: For each layer, how many positions back (itself included) it sees; None for all.
        tied: Whether the embedding is also the output head.
        qkv_bias: Whether q, k and v add a bias.
        o_bias: Whether the attention output adds a bias.
        mlp_bias: Whether gate, up and down add a bias.
        qk_norm: Whether each head of q and k is normalised before rotation.
        dtype: Element type the model was saved for.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "bfloat16"

    def local(self, shards: int) -> "ModelConfig":
        """The sizes on each of some devices that tensor parallelism cuts the model over.

        A device has its share of the query heads and the key-value heads that they attend to, of
        which it has a copy if there are fewer than devices.

        Raises:
            ModelError: Heads or the MLP's features do not divide.
        """
        for size, what in (
            (self.num_heads, "num_attention_heads"),
            (self.intermediate_size, "intermediate_size"),
        ):
            if size % shards:
                raise ModelError(
                    f"{what} must divide over the tensor axis of {shards} devices; got {size}; "
                    "use a smaller tensor axis"
                )
        kv = self.num_kv_heads
        if kv % shards and shards % kv:
            raise ModelError(
                f"num_key_value_heads must divide over the tensor axis of {shards} devices, or the "
                f"devices over them; got {kv}; use another size of the tensor axis"
            )
        return replace(
            self,
            num_heads=self.num_heads // shards,
            num_kv_heads=max(1, kv // shards),
            intermediate_size=self.intermediate_size // shards,
        )

    @classmethod
    def from_hf(cls, config: object) -> "ModelConfig":
        """Reads a model's config.

        Args:
            config: Its folder, the path of its `config.json`, a mapping, or a config object.

        Raises:
            ModelError: The family is not known, a size is missing or does not fit, or a field asks
                for maths that is not implemented; the message names the field and its value.
        """
        try:
            cfg = load_config(config)
        except SpecError as error:
            raise ModelError(str(error)) from error
        family = str(cfg.get("model_type"))
        if family not in LLAMA_LIKE:
            raise ModelError(
                f"model_type must be one of {list(LLAMA_LIKE)}; got {family!r}; "
                "other architectures need a decoder of their own"
            )
        _check_fields(cfg, family)
        heads, hidden = cfg["num_attention_heads"], cfg["hidden_size"]
        attention_bias = bool(cfg.get("attention_bias")) and family in ("llama", "qwen3")
        return cls(
            family=family,
            vocab_size=cfg["vocab_size"],
            hidden_size=hidden,
            intermediate_size=cfg["intermediate_size"],
            num_layers=cfg["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=cfg.get("num_key_value_heads") or heads,
            head_dim=cfg.get("head_dim") or hidden // heads,
            max_positions=cfg["max_position_embeddings"],
            norm_eps=float(cfg["rms_norm_eps"]),
            rope=Rope.from_hf(cfg),
            windows=_windows(cfg, family),
            tied=bool(cfg.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(cfg.get("mlp_bias")) and family == "llama",
            qk_norm=family == "qwen3",
            dtype=_dtype(cfg),
        )


def _check_fields(cfg: Mapping[str, Any], family: str) -> None:
    missing = [k for k in (*_REQUIRED, *LLAMA_LIKE[family]) if cfg.get(k) is None]
    if missing:
        raise ModelError(
            f"the config of a {family} model must have {missing}; got {sorted(cfg)}; "
            "pass the model's own config.json"
        )
    for field, values in _IMPLEMENTED.items():
        _refuse_unless(cfg.get(field, values[0]) in values, cfg, field, f"one of {list(values)}")
    unread = {"mistral": ("attention_bias", "mlp_bias"), "qwen2": ("mlp_bias",)}
    for field in unread.get(family, ("mlp_bias",) if family == "qwen3" else ()):
        _refuse_unless(not cfg.get(field), cfg, field, f"false in a {family} model")
    heads, hidden = cfg["num_attention_heads"], cfg["hidden_size"]
    kv, width = cfg.get("num_key_value_heads") or heads, cfg.get("head_dim")
    _refuse_unless(heads % kv == 0, cfg, "num_key_value_heads", f"a divisor of {heads} query heads")
    if width is None:
        _refuse_unless(hidden % heads == 0, cfg, "hidden_size", f"a multiple of {heads} heads")
    _refuse_unless((width or hidden // heads) % 2 == 0, cfg, "head_dim", "even")


def _refuse_unless(ok: bool, cfg: Mapping[str, Any], field: str, rule: str) -> None:
    if not ok:
        raise ModelError(
            f"{field} must be {rule}; got {cfg.get(field)!r}; "
            "the maths it asks for is not implemented, so use another model"
        )


def _windows(cfg: Mapping[str, Any], family: str) -> tuple[int | None, ...]:
    """The window of each layer; transformers reads the fields differently in each family."""
    L, types = cfg["num_hidden_layers"], cfg.get("layer_types")
    if family == "llama":
        _refuse_unless(cfg.get("sliding_window") is None, cfg, "sliding_window", "null in llama")
        size, sliding = None, [False] * L
    elif family == "mistral":
        size = cfg.get("sliding_window", 4096)
        sliding = [size is not None] * L
    else:
        size = cfg.get("sliding_window", 4096) if cfg.get("use_sliding_window") else None
        first = cfg.get("max_window_layers", 28)
        sliding = [size is not None and i >= first for i in range(L)]
        if types is not None and size is not None and len(types) == L:
            sliding = [t == _SLIDING for t in types]
    implied = [_SLIDING if s else _FULL for s in sliding]
    _refuse_unless(types is None or list(types) == implied, cfg, "layer_types", f"{implied} here")
    _refuse_unless(size is None or size > 0, cfg, "sliding_window", "positive or null")
    return tuple(size if s else None for s in sliding)


def _dtype(cfg: Mapping[str, Any]) -> str:
    name = str(cfg.get("dtype") or cfg.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(
            f"dtype of a model must be one of {list(_DTYPES)}; got {name!r}; save it in one of them"
        )
    return name
