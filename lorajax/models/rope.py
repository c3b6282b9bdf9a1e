"""Rotary position embedding, plain, linear and llama3, from either spelling of a config."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lorajax.errors import ModelError

_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_KEYS = {
    "default": ("original_max_position_embeddings",),
    "linear": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True)
class Rope:
    """Angles of the rotary embedding.

    Attributes:
        theta: Base of the frequencies.
        kind: "default", "linear" or "llama3".
        factor: By how much the scaled frequencies are divided.
        low_freq_factor: llama3: wavelengths over `original_positions / low_freq_factor` are scaled.
        high_freq_factor: llama3: wavelengths under `original_positions / high_freq_factor` are not.
        original_positions: llama3: context of the pretrained model.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Rope":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4).

        Raises:
            ModelError: The type is not implemented, or a field is missing or unknown.
        """
        spelling = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        given = {k: v for k, v in (config.get(spelling) or {}).items() if v is not None}
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _KEYS:
            raise ModelError(
                f"rope_type must be one of {list(_KEYS)}; got {kind!r} in {spelling}; "
                "use a model with one of these rotary embeddings"
            )
        allowed = (*_COMMON, *_KEYS[kind])
        unknown = {k: v for k, v in given.items() if k not in allowed}
        if unknown:
            raise ModelError(
                f"{spelling} of rope_type {kind!r} may hold {list(allowed)}; got {unknown}; "
                "use a model without it, since what it changes is not implemented"
            )
        if given.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(
                "partial_rotary_factor must be 1 or absent; got "
                f"{given['partial_rotary_factor']!r} in {spelling}; use a model with full rotation"
            )
        theta = float(given.get("rope_theta", config.get("rope_theta") or 10000.0))
        if kind == "default":
            return cls(theta)
        original = (
            config.get("original_max_position_embeddings")
            or given.get("original_max_position_embeddings")
            or config.get("max_position_embeddings")
        )
        missing = [k for k in _KEYS[kind] if "factor" in k and k not in given]
        if missing:
            raise ModelError(
                f"{spelling} of rope_type {kind!r} must have {missing}; got {sorted(given)}; "
                "complete the model's config.json"
            )
        factor = float(given["factor"])
        if kind == "linear":
            return cls(theta, kind, factor)
        low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
        if not 0 < low < high:
            raise ModelError(
                "low_freq_factor must be positive and below high_freq_factor; got "
                f"{low} and {high} in {spelling}; correct the model's config.json"
            )
        return cls(theta, kind, factor, low, high, int(original or 0))

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Inverse frequencies `f32[D / 2]`, rounded as in transformers (`modeling_rope_utils`).

        llama3: `f/factor` where the wavelength is long, f where it is short, and in between
        `(1 - s) f/factor + s f` with `s = (original/wavelength - low) / (high - low)`.
        """
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        powers = (np.float64(self.theta) ** exponents.astype(np.float64)).astype(np.float32)
        f = np.float32(1) / powers
        if self.kind == "linear":
            return f / np.float32(self.factor)
        if self.kind == "default":
            return f
        wavelength = np.float32(2 * math.pi) / f
        share = (np.float32(self.original_positions) / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - share) * f / self.factor + share * f
        long = wavelength > self.original_positions / self.low_freq_factor
        short = wavelength < self.original_positions / self.high_freq_factor
        return np.where(long, f / self.factor, np.where(short, f, between)).astype(np.float32)


def angles(
    frequencies: np.ndarray, positions: Int[Array, "N Q"]
) -> tuple[Float[Array, "N Q 1 half"], Float[Array, "N Q 1 half"]]:
    """Cosine and sine of every position's angles, float32; once a step, for all layers."""
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "N Q H D"], cos: Float[Array, "N Q 1 half"], sin: Float[Array, "N Q 1 half"]
) -> Float[Array, "N Q H D"]:
    """Rotates the pairs (x[i], x[i + D/2]), as the HF checkpoints are laid out, in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
