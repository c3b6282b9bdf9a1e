"""The compiled steps of a model: prefill and decode, each with the greedy choice in it.

On a mesh a whole step is one `shard_map`: every device runs the model on its share of the heads and
features and of the batch's rows, and all devices end with all rows' choices.
"""

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
from lorajax.models.placement import CACHE_AXES, on_devices
from lorajax.sharding import Partition
from lorajax.sharding.partition import check_divides
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
        partition: The mesh that the model was loaded on, or None for the default device. The slots
            must lie on it too (`lorajax.sharding.state_shardings`).
    """

    def __init__(
        self,
        model: models.Decoder,
        *,
        keep_logits: bool = False,
        partition: Partition | None = None,
    ):
        graphdef, self.params = nnx.split(model)
        self.config, self.dtype, self.shard = model.config, model.embed[...].dtype, model.shard
        self.partition = partition
        if partition is not None:
            self._cache_sharding = partition.sharding(*CACHE_AXES)
            self._zeros = jax.jit(
                functools.partial(models.init_cache, shards=self.shard.tensor_shards),
                static_argnums=(0, 1, 2, 3),
                out_shardings=self._cache_sharding,
            )

        def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
            bound = functools.partial(_greedy, functools.partial(step, graphdef), keep_logits)
            if partition is not None:
                bound = on_devices(bound, self.params, partition)
            return jax.jit(bound, donate_argnums=2)

        self._prefill, self._decode = compiled(models.prefill), compiled(models.decode)

    @property
    def row_shards(self) -> int:
        """Devices, or groups of them, that each have a share of the rows."""
        return self.shard.row_shards

    def init_cache(self, rows: int, length: int) -> Any:
        """An empty cache of `rows` rows with `length` positions each.

        Raises:
            SpecError: The rows do not divide over the mesh.
        """
        if self.partition is None:
            return models.init_cache(self.config, rows, length, self.dtype)
        heads = self.shard.tensor_shards * self.config.num_kv_heads
        check_divides((rows, length, heads, self.config.head_dim), self._cache_sharding)
        return self._zeros(self.config, rows, length, self.dtype)

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
            batch: K padded prompts; on a mesh, a share of K for each of `row_shards`.
            row_weights: `f32[N, S]`, or None for the plain model.
        """
        inputs = (batch.tokens, batch.lengths, batch.rows, row_weights)
        return self._prefill(self.params, lora, cache, *self._placed(inputs))

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
        return self._decode(
            self.params, lora, cache, *self._placed((tokens, positions, row_weights))
        )

    def _placed(self, inputs: tuple[np.ndarray | None, ...]) -> tuple[Any, ...]:
        """The inputs of a step, where the step wants them."""
        put = None if self.partition is None else self.partition.put
        return inputs if put is None else tuple(a if a is None else put(a, "rows") for a in inputs)


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
