"""`lora_delta` in plain XLA: the reference that every kernel must equal."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from lorajax.kernels_pallas.checks import Layer, take_layer
from lorajax.kernels_pallas.routing import Routing
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
    A, B, scale = (take_layer(a, layer) for a in (weights.A, weights.B, weights.scale))
    A, B = A.astype(x.dtype), B.astype(x.dtype)
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


def _slots_delta(
    x: Float[Array, "T d_in"],
    A: Float[Array, "S G R d_in"],
    B: Float[Array, "S R d_out"],
    scale: Float[Array, "S G R"],
    weights: Float[Array, "S T"],
    slices: tuple[int, ...],
) -> Float[Array, "T d_out"]:
    """The delta of some slots, every token times every slot."""
    S, G, R, d_in = A.shape
    T = x.shape[0]
    # A x^T, not x A^T: the small side is the one that a CPU product transposes and packs.
    h = lax.dot_general(
        A.reshape(S * G * R, d_in),
        x,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    ).reshape(S, G, R, T)
    return expand(h, B, scale, weights, slices)


def expand(
    h: Float[Array, "S G R T"],
    B: Float[Array, "S R d_out"],
    scale: Float[Array, "S G R"],
    weights: Float[Array, "S T"],
    slices: tuple[int, ...],
) -> Float[Array, "T d_out"]:
    """`(h ⊙ W) B`, from h in float32.

    The mask selects and never multiplies: 0 times NaN is NaN, and a broken adapter or row must stay
    alone. B needs no mask, since `write_slots` keeps it finite.
    """
    S, _, R, T = h.shape
    w = weights[:, None, None, :]
    h = jnp.where(w != 0, h * (scale[..., None] * w), 0.0).astype(B.dtype)

    B = B.reshape(S * R, -1)
    parts, start = [], 0
    for g, width in enumerate(slices):
        columns = lax.slice_in_dim(B, start, start + width, axis=1)
        h_g = h[:, g].reshape(S * R, T)
        contract = (((0,), (0,)), ((), ()))
        parts.append(lax.dot_general(h_g, columns, contract, preferred_element_type=jnp.float32))
        start += width
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


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
