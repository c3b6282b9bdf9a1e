"""The compiled steps of a model: prefill and decode, each with the greedy choice in it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from lorajax import models
from lorajax.engine.buckets import PrefillBatch
from lorajax.state import LoraState


class Choice(NamedTuple):
    """The next token of each row.

    Attributes:
        tokens: `i32[K]`, argmax of the logits; the smallest id of equals.
        logprobs: `f32[K]`, natural log of its probability; NaN if a logit is not a number.
        logits: `f32[K, V]`, or None if they are not kept.
    """

    tokens: Int[Array, "K"]
    logprobs: Float[Array, "K"]
    logits: Float[Array, "K V"] | None


class Steps:
    """A model's steps, compiled once a shape: weights and slots are arguments.

    Args:
        model: From `lorajax.models.load_model`; the cache has its element type.
        keep_logits: Whether choices carry all logits (for checks; it costs a copy to the host).
    """

    def __init__(self, model: models.Decoder, *, keep_logits: bool = False):
        graphdef, self.params = nnx.split(model)
        self.config, self.dtype = model.config, model.embed[...].dtype

        def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
            bound = functools.partial(_greedy, functools.partial(step, graphdef), keep_logits)
            return jax.jit(bound, donate_argnums=2)

        self._prefill, self._decode = compiled(models.prefill), compiled(models.decode)

    def init_cache(self, rows: int, length: int) -> Any:
        """An empty cache of `rows` rows with `length` positions each."""
        return models.init_cache(self.config, rows, length, self.dtype)

    def prefill(
        self,
        lora: LoraState | None,
        cache: Any,
        batch: PrefillBatch,
        row_weights: np.ndarray | None,
    ) -> tuple[Choice, Any]:
        """Runs prompts and chooses their first tokens.

        Args:
            lora: Slots, or None for the plain model.
            cache: Donated; use the returned one.
            batch: K padded prompts.
            row_weights: `f32[N, S]`, or None for the plain model.
        """
        return self._prefill(
            self.params, lora, cache, batch.tokens, batch.lengths, batch.rows, row_weights
        )

    def decode(
        self,
        lora: LoraState | None,
        cache: Any,
        tokens: np.ndarray,
        positions: np.ndarray,
        row_weights: np.ndarray | None,
    ) -> tuple[Choice, Any]:
        """Runs one token of every row and chooses the next.

        Args:
            lora: Slots, or None for the plain model.
            cache: Donated; use the returned one.
            tokens: `i32[N]`.
            positions: `i32[N]`, where each token stands in its row; -1 for idle rows.
            row_weights: `f32[N, S]`, or None for the plain model.
        """
        return self._decode(self.params, lora, cache, tokens, positions, row_weights)


def _greedy(
    step: Callable[..., tuple[jax.Array, Any]],
    keep_logits: bool,
    params: Any,
    lora: LoraState | None,
    cache: Any,
    *inputs: Any,
) -> tuple[Choice, Any]:
    logits, cache = step(params, lora, cache, *inputs)
    logits = logits.astype(jnp.float32)
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    logprobs = chosen - jax.nn.logsumexp(logits, axis=-1)
    return Choice(tokens, logprobs, logits if keep_logits else None), cache
