"""Shape rules shared by the ops; they run while tracing, so a step pays nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
from jaxtyping import Array, Int, Shaped

from lorajax.kernels_pallas.routing import Routing
from lorajax.kernels_pallas.weights import LoraWeights

Layer = int | Int[Array, ""]


def check_delta(x: Shaped[Array, "..."], weights: LoraWeights, routing: Routing) -> None:
    """Checks x, the slots and the routing against each other.

    Raises:
        ValueError: A shape differs; the message gives the rule, both shapes and the remedy.
    """
    d_in = weights.A.shape[-1]
    if x.ndim != 2 or x.shape[1] != d_in:
        raise ValueError(
            f"x must be [T, d_in] with d_in = {d_in}; got {x.shape}; "
            "flatten the leading axes, or pass the slots of the target that x feeds"
        )
    _check_routing(x, weights, routing)


def check_embed(
    ids: Shaped[Array, "..."], embed: Shaped[Array, "..."], weights: LoraWeights, routing: Routing
) -> None:
    """Checks ids, an embedding, its slots and the routing against each other.

    Raises:
        ValueError: A shape differs.
    """
    if ids.ndim != 1:
        raise ValueError(f"ids must be [T]; got {ids.shape}; flatten the axes")
    want = (weights.A.shape[-1], weights.B.shape[-1])
    if embed.shape != want:
        raise ValueError(
            f"embed must be [V, D] = {list(want)}; got {embed.shape}; pass the embedding as it is "
            "stored, and the slots of the embedding"
        )
    _check_routing(ids, weights, routing)


def _check_routing(x: Shaped[Array, "T ..."], weights: LoraWeights, routing: Routing) -> None:
    if routing.num_tokens != x.shape[0]:
        raise ValueError(
            f"routing must cover the T = {x.shape[0]} tokens of x; got {routing.num_tokens}; "
            "build it from a token_row with one entry for each row of x"
        )
    if routing.num_slots != weights.num_slots:
        raise ValueError(
            f"row_weights must have one column for each of the S = {weights.num_slots} slots; "
            f"got {routing.num_slots}; use the row_weights of a lease on this state"
        )


def check_layer(layer: Layer, num_layers: int) -> None:
    """Checks a layer index that is known while tracing. JAX itself would clamp it.

    Raises:
        IndexError: `layer` is an int outside [0, L).
    """
    if isinstance(layer, int) and not 0 <= layer < num_layers:
        raise IndexError(f"layer must be in [0, {num_layers}); got {layer}; count layers from 0")


def check_base(w: Shaped[Array, "..."], weights: LoraWeights) -> None:
    """Checks a base weight `[d_in, d_out]` or `[L, d_in, d_out]` against the slots.

    Raises:
        ValueError: The shapes differ.
    """
    want = (weights.A.shape[-1], weights.B.shape[-1])
    if w.ndim not in (2, 3) or tuple(w.shape[-2:]) != want:
        raise ValueError(
            f"w must be [d_in, d_out] = {list(want)}, or that with a leading layer axis; got "
            f"{w.shape}; transpose a [d_out, d_in] weight once, when loading it"
        )


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        run: The function.
        platform: The JAX backend that takes it by default ("tpu", "gpu"), or None for all.
        unsupported: From the op's arrays to the reason why `run` cannot take them, or None.
        default: Whether its platform takes it unasked; False until it was shown there to be right
            and the fastest.
    """

    run: Callable[..., Array]
    platform: str | None
    unsupported: Callable[..., str | None]
    default: bool = True


class ImplementationError(ValueError):
    """The implementation that was asked for is unknown, or cannot run the case."""


def always(*_: object) -> None:
    """The `unsupported` of an implementation that can run everything."""


def choose(
    table: Mapping[str, Implementation], implementation: str | None, *arrays: object
) -> Callable[..., Array]:
    """The implementation to run: the one that was asked for, else the platform's first that can.

    The platform is that of the default backend, since tracing does not know where a function will
    run: to lower for another one, name the implementation.

    Args:
        table: Implementations by name, the most wanted first; the last can run everything.
        implementation: A name, or None.
        arrays: The op's arrays, for `unsupported`.

    Raises:
        ImplementationError: The name is unknown, or it cannot run this case.
    """
    if implementation is None:
        here = (None, jax.default_backend())
        own = (i for i in table.values() if i.default and i.platform in here)
        return next(i for i in own if not i.unsupported(*arrays)).run
    if implementation not in table:
        raise ImplementationError(
            f"implementation must be one of {list(table)}; got {implementation!r}; "
            "leave it out for the default"
        )
    reason = table[implementation].unsupported(*arrays)
    if reason is not None:
        raise ImplementationError(
            f"implementation={implementation!r} must be able to run the case: {reason}; "
            "change that, or leave the name out for the default"
        )
    return table[implementation].run


def take_layer(array: Shaped[Array, "L ..."], layer: Layer) -> Shaped[Array, "..."]:
    """`array[layer]`; free where L is 1, else a slice (a copy, for a plain XLA product)."""
    if array.shape[0] == 1 and isinstance(layer, int):
        return array.reshape(array.shape[1:])
    return jax.lax.dynamic_index_in_dim(array, layer, axis=0, keepdims=False)
