"""`lora_delta` in plain XLA: the reference that every kernel must equal."""

import functools
import itertools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lorajax.kernels_pallas.checks import Layer, take_layer
from lorajax.kernels_pallas.routing import MAX_BLOCK, Routing
from lorajax.kernels_pallas.weights import LoraWeights

_PACK = 128  # rank rows of one step over a block's active slots


def lora_delta(
    x: Float[Array, "T d_in"], weights: LoraWeights, routing: Routing, *, layer: Layer
) -> Float[Array, "T d_out"]:
    """`((x Aᵀ) ⊙ W) B` in float32.

    Two dense products over all slots. A CPU, where a branch is cheap and arithmetic is not, skips
    them if the batch has base rows alone, and with several blocks of tokens and many slots takes
    each block's own active slots; elsewhere work whose amount is data would wait for the host.
    """
    A, B, scale = at_layer(weights, layer, x.dtype)
    S, _, R, _ = A.shape

    def dense() -> Float[Array, "T d_out"]:
        return _slots_delta(x, A, B, scale, routing.weights, weights.slices)

    def blocked() -> Float[Array, "T d_out"]:
        return _blocks_delta(x, A, B, scale, routing, weights.slices)

    several = routing.active.shape[0] > 1 and S * R > 2 * _PACK
    return unless_base(routing, B.shape[-1], dense, on_cpu=blocked if several else dense)


Delta = Callable[[], Float[Array, "T d_out"]]


def unless_base(
    routing: Routing, d_out: int, delta: Delta, *, on_cpu: Delta
) -> Float[Array, "T d_out"]:
    """The delta; on a CPU zeros, without the products, if the batch has base rows alone."""

    def none() -> Float[Array, "T d_out"]:
        return jnp.zeros((routing.num_tokens, d_out), jnp.float32)

    def if_adapted() -> Float[Array, "T d_out"]:
        return lax.cond(routing.count.sum() > 0, on_cpu, none)

    return lax.platform_dependent(cpu=if_adapted, default=delta)


def at_layer(
    weights: LoraWeights, layer: Layer, dtype: DTypeLike
) -> tuple[Float[Array, "S G R d_in"], Float[Array, "S rank d_out"], Float[Array, "S G R"]]:
    """A, B and scale of one layer, A and B in the element type of the products.

    Ranks of B are R, unless A and scale are a shard's share of them.
    """
    A, B, scale = (take_layer(a, layer) for a in (weights.A, weights.B, weights.scale))
    return A.astype(dtype), B.astype(dtype), scale


def shrink(
    x: Float[Array, "T d_in"],
    A: Float[Array, "S G R d_in"],
    scale: Float[Array, "S G R"],
    weights: Float[Array, "S T"],
) -> Float[Array, "S G R T"]:
    """`(A xᵀ) ⊙ scale ⊙ W` in float32, every token times every slot.

    Linear in A and x: sums over shares of d_in, and shares of R, are those of the whole.

    Args:
        x: `[T, d_in]`.
        A: `[S, G, R, d_in]`, in x's dtype.
        scale: `f32[S, G, R]`.
        weights: `f32[S, T]`, those of a routing.
    """
    S, G, R, d_in = A.shape
    # A x^T, not x A^T: the small side is the one that a CPU product transposes and packs.
    h = lax.dot_general(
        A.reshape(S * G * R, d_in),
        x,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return select(h.reshape(S, G, R, x.shape[0]), scale, weights)


def select(
    h: Float[Array, "S G R T"], scale: Float[Array, "S G R"], weights: Float[Array, "S T"]
) -> Float[Array, "S G R T"]:
    """`h ⊙ scale ⊙ W` in float32.

    It selects and never multiplies by zero: 0 times NaN is NaN, and a broken adapter or row must
    stay alone.
    """
    w = weights[:, None, None, :]
    return jnp.where(w != 0, h * (scale[..., None] * w), 0.0)


def expand(
    h: Float[Array, "S G R T"], B: Float[Array, "S R d_out"], slices: tuple[int, ...]
) -> Float[Array, "T d_out"]:
    """`hᵀ B` in float32. B needs no mask, since `write_slots` keeps it finite.

    A GPU multiplies all slices' h and the whole of B at once while tokens are few: there a launch,
    and a copy of a slice of B, cost more than what is not used of the product.

    Args:
        h: `[S, G, R, T]` from `shrink`, rounded to the dtype of the product.
        B: `[S, R, d_out]`, in h's dtype.
        slices: Widths of the G slices of d_out.
    """
    S, G, R, T = h.shape
    h, B = h.swapaxes(0, 1).reshape(G, S * R, T), B.reshape(S * R, -1)
    if G == 1 or T > MAX_BLOCK:
        return expand_apart(h, B, slices)
    apart, together = (functools.partial(f, slices=slices) for f in (expand_apart, expand_together))
    return lax.platform_dependent(h, B, cuda=together, rocm=together, default=apart)


def expand_apart(
    h: Float[Array, "G ranks T"], B: Float[Array, "ranks d_out"], slices: tuple[int, ...]
) -> Float[Array, "T d_out"]:
    """A product for each slice."""
    parts = [_product(h[g], columns) for g, columns in enumerate(_cut(B, slices))]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def expand_together(
    h: Float[Array, "G ranks T"], B: Float[Array, "ranks d_out"], slices: tuple[int, ...]
) -> Float[Array, "T d_out"]:
    """One product of every slice's h and all columns, of which each slice takes its own."""
    G, ranks, T = h.shape
    every = _product(h.swapaxes(0, 1).reshape(ranks, G * T), B).reshape(G, T, -1)
    return jnp.concatenate([_cut(every[g], slices)[g] for g in range(G)], axis=1)


def _product(
    h: Float[Array, "ranks T"], B: Float[Array, "ranks columns"]
) -> Float[Array, "T columns"]:
    contract = (((0,), (0,)), ((), ()))
    return lax.dot_general(h, B, contract, preferred_element_type=jnp.float32)


def _cut(a: Float[Array, "n d_out"], slices: tuple[int, ...]) -> list[Array]:
    """The columns of each slice."""
    ends = itertools.accumulate(slices)
    return [
        lax.slice_in_dim(a, end - width, end, axis=1)
        for end, width in zip(ends, slices, strict=True)
    ]


def _slots_delta(
    x: Float[Array, "T d_in"],
    A: Float[Array, "S G R d_in"],
    B: Float[Array, "S R d_out"],
    scale: Float[Array, "S G R"],
    weights: Float[Array, "S T"],
    slices: tuple[int, ...],
) -> Float[Array, "T d_out"]:
    """The delta of some slots."""
    return expand(shrink(x, A, scale, weights).astype(x.dtype), B, slices)


def _blocks_delta(
    x: Float[Array, "T d_in"],
    A: Float[Array, "S G R d_in"],
    B: Float[Array, "S R d_out"],
    scale: Float[Array, "S G R"],
    routing: Routing,
    slices: tuple[int, ...],
) -> Float[Array, "T d_out"]:
    """The delta, block by block over packs of the block's active slots."""
    (S, _, R, d_in), d_out = A.shape, B.shape[-1]
    T, block, blocks = x.shape[0], routing.block, routing.active.shape[0]
    pack = min(S, max(1, _PACK // R))
    padding = blocks * block - T
    x = jnp.pad(x, ((0, padding), (0, 0))).reshape(blocks, block, d_in)
    weights = jnp.pad(routing.weights, ((0, 0), (0, padding))).reshape(S, blocks, block)
    active = jnp.pad(routing.active, ((0, 0), (0, -S % pack)))

    def one_block(args: tuple[Array, ...]) -> Float[Array, "block d_out"]:
        x_b, weights_b, active_b, count = args

        def one_pack(i: Array, delta: Array) -> Array:
            slots = lax.dynamic_slice_in_dim(active_b, i * pack, pack)
            live = i * pack + jnp.arange(pack) < count
            w = jnp.where(live[:, None], weights_b[slots], 0.0)
            return delta + _slots_delta(x_b, A[slots], B[slots], scale[slots], w, slices)

        none = jnp.zeros((block, d_out), jnp.float32)
        return lax.fori_loop(0, -(-count // pack), one_pack, none)

    delta = lax.map(one_block, (x, weights.swapaxes(0, 1), active, routing.count))
    return delta.reshape(blocks * block, d_out)[:T]
