"""Routing: which slots each token uses, and with what weight."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lorajax.kernels_pallas.weights import Leaf

#: Tokens of a block. Up to about this many, computing all tokens for all active slots and masking
#: is free, because the weights' bytes dominate; beyond it a block's own short list of slots pays.
MAX_BLOCK = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """The weights W of section 1 of docs/design.md, and their sparsity, for one step.

    Attributes:
        weights: `f32[S, T]`. Weight of slot s for token t; a column of zeros is a base token.
        active: `i32[P, S]`. For each block of tokens its active slots, ascending, then the rest.
        count: `i32[P]`. How many entries of `active` are active.
        block: Tokens in a block; P is ceil(T / block).
    """

    weights: Leaf
    active: Leaf
    count: Leaf
    block: int = field(metadata={"static": True})

    @property
    def num_slots(self) -> int:
        """S."""
        return self.weights.shape[0]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.weights.shape[1]


def make_routing(
    row_weights: Float[Array, "N S"], token_row: Int[Array, "T"], *, block: int | None = None
) -> Routing:
    """Builds the routing of a step from the weights of its rows. Call it once per step, inside jit.

    Args:
        row_weights: `f32[N, S]`, weight of every slot for each of N rows (requests). A row of zeros
            is the base model. `AdapterManager.lease` makes this array.
        token_row: `i32[T]`, the row of each token; -1 is a base token or padding. A row outside
            [-1, N) gives that token NaN outputs: an index error must not reach another adapter.
        block: Tokens in a block, by default T up to 256.

    Returns:
        The routing; the same for every layer and target of the step.
    """
    num_rows, num_slots = row_weights.shape
    num_tokens = token_row.shape[0]
    block = min(MAX_BLOCK, num_tokens) if block is None else block
    weights = row_weights.astype(jnp.float32)[jnp.clip(token_row, 0, num_rows - 1)].T
    inside = (token_row >= -1) & (token_row < num_rows)
    weights = jnp.where(token_row >= 0, weights, 0.0)
    weights = jnp.where(inside, weights, jnp.nan)

    num_blocks = -(-num_tokens // block)
    padding = num_blocks * block - num_tokens
    used = jnp.pad(weights != 0, ((0, 0), (0, padding)))
    used = used.reshape(num_slots, num_blocks, block).any(axis=2).T
    active = jnp.argsort(~used, axis=1, stable=True).astype(jnp.int32)
    count = used.sum(axis=1, dtype=jnp.int32)
    return Routing(weights=weights, active=active, count=count, block=block)
