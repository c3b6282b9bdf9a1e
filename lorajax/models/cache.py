"""The key-value cache, and attention over it."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from lorajax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of N rows (requests), C positions each; one array a layer.

    What lies beyond a row's positions is never read, so a row is reused by writing from position 0.

    Attributes:
        keys: For each layer `[N, C, Hkv, D]`, already rotated.
        values: For each layer `[N, C, Hkv, D]`.
    """

    keys: tuple[Any, ...]  # not Array: the same tree holds shapes and shardings
    values: tuple[Any, ...]

    @property
    def rows(self) -> int:
        """N."""
        return self.keys[0].shape[0]

    @property
    def length(self) -> int:
        """C."""
        return self.keys[0].shape[1]


def init_cache(
    config: ModelConfig, rows: int, length: int, dtype: DTypeLike, *, shards: int = 1
) -> KVCache:
    """Makes an empty cache of N = `rows` rows and C = `length` positions.

    Args:
        config: `Decoder.config`: the sizes on one device.
        rows: N.
        length: C.
        dtype: Element type.
        shards: Devices that heads are cut over, if the cache is to lie on all of them.
    """
    shape = (rows, length, shards * config.num_kv_heads, config.head_dim)
    layers = range(config.num_layers)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
    )


def write(
    cached: Float[Array, "N C Hkv D"],
    new: Float[Array, "N Q Hkv D"],
    positions: Int[Array, "N Q"],
) -> Float[Array, "N C Hkv D"]:
    """Writes keys or values at their positions; those outside [0, C) are dropped."""
    N, C = cached.shape[:2]
    at = jnp.where(positions >= 0, positions, C)  # -1 would wrap to the last position
    return cached.at[jnp.arange(N)[:, None], at].set(new.astype(cached.dtype), mode="drop")


def attend(
    q: Float[Array, "N Q H D"],
    keys: Float[Array, "N C Hkv D"],
    values: Float[Array, "N C Hkv D"],
    positions: Int[Array, "N Q"],
    window: int | None,
) -> Float[Array, "N Q H D"]:
    """Causal attention of each query over its own row of the cache; softmax in float32.

    Args:
        q: Rotated queries.
        keys: A layer's keys.
        values: A layer's values.
        positions: Position of each query; -1 is padding, whose output is finite and of no use.
        window: Positions a query sees, its own included, or None for all.
    """
    N, Q, H, D = q.shape
    C, Hkv = keys.shape[1:3]
    at = jnp.arange(C)
    seen = at[None, None, :] <= positions[:, :, None]
    if window is not None:
        seen &= at[None, None, :] > positions[:, :, None] - window
    # An unread value may be an earlier request's NaN, and a weight of 0 would not silence it.
    written = at[None, :] <= positions.max(axis=1)[:, None]
    values = jnp.where(written[:, :, None, None], values, 0)

    scores = jnp.einsum(
        "nqhgd,nchd->nhgqc",
        q.reshape(N, Q, Hkv, H // Hkv, D),
        keys.astype(q.dtype),
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(seen[:, None, None], scores * D**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum("nhgqc,nchd->nqhgd", weights, values.astype(q.dtype))
    return out.reshape(N, Q, H, D)
