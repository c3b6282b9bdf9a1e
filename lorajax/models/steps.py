"""Prefill and decode as pure functions of pytrees: jit them, donate the cache, loop on the host."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lorajax.errors import ModelError, SpecError
from lorajax.kernels_pallas import Routing, make_routing
from lorajax.models.cache import KVCache, init_cache
from lorajax.models.decoder import Decoder
from lorajax.state import LoraState


def prefill(
    graphdef: Any,
    params: Any,
    lora: LoraState | None,
    cache: KVCache,
    tokens: Int[Array, "K Q"],
    lengths: Int[Array, "K"],
    rows: Int[Array, "K"],
    row_weights: Float[Array, "N S"] | None,
) -> tuple[Float[Array, "K V"], KVCache]:
    """Runs K new prompts and puts their keys and values into rows of the cache.

    A row is overwritten whole, so nothing of its earlier request stays.

    Args:
        graphdef: From `nnx.split(decoder)`; static.
        params: From `nnx.split(decoder)`.
        lora: The slots, or None for the plain model.
        cache: N rows of C positions, Q <= C.
        tokens: Prompts, padded at the end.
        lengths: Length of each prompt; 0 is an unused place.
        rows: Distinct rows of the cache, one for each prompt. An unused place, or a row outside
            [0, N), changes nothing and its logits mean nothing. On a mesh, rows of the whole cache;
            a prompt must be on the devices that have its row.
        row_weights: Weight of every slot for every row of the cache, as a lease gives them; needed
            with `lora`.

    Returns:
        `f32[K, V]`, the scores after each prompt's last token (NaN if a length exceeds Q), and the
        cache.

    Raises:
        ModelError: Q exceeds C.
        SpecError: `lora` comes without `row_weights`, or has other targets than the model.
    """
    model = _merge(graphdef, params)
    K, Q = tokens.shape
    N, C = cache.rows, cache.length
    if Q > C:
        raise ModelError(f"prompts must fit the cache; got {Q} tokens for {C}; make a longer cache")
    rows = rows - model.shard.row_index() * N
    used = (lengths > 0) & (rows >= 0) & (rows < N)
    at = jnp.arange(Q, dtype=jnp.int32)[None, :]
    positions = jnp.where(used[:, None] & (at < lengths[:, None]), at, -1)
    token_row = jnp.where(positions >= 0, rows[:, None], -1).reshape(K * Q)
    fresh = init_cache(model.config, K, Q, cache.keys[0].dtype)
    hidden, new = model(tokens, positions, fresh, lora, _routing(lora, row_weights, token_row))

    into = jnp.where(used, rows, N)

    def put(old: Float[Array, "N C Hkv D"], part: Float[Array, "K Q Hkv D"]) -> jax.Array:
        whole = jnp.pad(part, ((0, 0), (0, C - Q), (0, 0), (0, 0)))
        return old.at[into].set(whole, mode="drop")

    last = hidden[jnp.arange(K), jnp.clip(lengths - 1, 0, Q - 1)]
    of_last = _routing(lora, row_weights, jnp.where(used, rows, -1))
    logits = jnp.where((lengths <= Q)[:, None], model.logits(last, lora, of_last), jnp.nan)
    return logits, jax.tree.map(put, cache, new)


def decode(
    graphdef: Any,
    params: Any,
    lora: LoraState | None,
    cache: KVCache,
    tokens: Int[Array, "N"],
    positions: Int[Array, "N"],
    row_weights: Float[Array, "N S"] | None,
) -> tuple[Float[Array, "N V"], KVCache]:
    """Runs one more token of every row.

    Args:
        graphdef: From `nnx.split(decoder)`; static.
        params: From `nnx.split(decoder)`.
        lora: The slots, or None for the plain model.
        cache: N rows of C positions.
        tokens: The newest token of each row.
        positions: Its position, at most C - 1; -1 is an idle row, which changes nothing and whose
            logits mean nothing.
        row_weights: Weight of every slot for every row; needed with `lora`.

    Returns:
        `f32[N, V]`, the scores after each token (NaN for a position that the cache cannot hold),
        and the cache.

    Raises:
        SpecError: `lora` comes without `row_weights`, or has other targets than the model.
    """
    model = _merge(graphdef, params)
    token_row = jnp.where(positions >= 0, jnp.arange(cache.rows, dtype=jnp.int32), -1)
    routing = _routing(lora, row_weights, token_row)
    hidden, cache = model(tokens[:, None], positions[:, None], cache, lora, routing)
    fits = (positions < cache.length)[:, None]
    return jnp.where(fits, model.logits(hidden[:, 0], lora, routing), jnp.nan), cache


def _merge(graphdef: Any, params: Any) -> Decoder:
    return nnx.merge(graphdef, params)


def _routing(
    lora: LoraState | None,
    row_weights: Float[Array, "N S"] | None,
    token_row: Int[Array, "T"],
) -> Routing | None:
    if lora is None:
        return None
    if row_weights is None:
        raise SpecError(
            "a state needs the weights of its slots; got row_weights None; pass those of a lease, "
            "or zeros for base rows alone"
        )
    return make_routing(row_weights, token_row)
