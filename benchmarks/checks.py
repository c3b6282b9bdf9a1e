"""Is what is timed right: each product of a cell against float64, on fresh inputs.

The bar is the error of two other bfloat16 models on the same data: `xla`, and the base weight with
each adapter merged into it. More than twice the smaller of the two is too much.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from gpu_layers import BF16, random
from jax import lax
from shapes import Case, Shapes

from lorajax.kernels_pallas import LoraWeights, lora_linear, make_routing

MERGED = 8  #: Adapters that are merged, each into a copy of the weight; the others' tokens are not.


def poison(shape: tuple[int, ...], dtype=BF16) -> None:
    """Leaves NaN in freed memory, where an output that is not written would find it."""
    for array in [jnp.full(shape, jnp.nan, dtype) for _ in range(4)]:
        array.block_until_ready()
        array.delete()


@functools.partial(jax.jit, static_argnames="implementation")
def product(x, w, adapters, rows, implementation):
    """One module of the first layer."""
    route = make_routing(rows, jnp.arange(x.shape[0]))
    return lora_linear(x, w[:1], adapters, route, implementation=implementation, layer=0)


def low_rank(left, slots: LoraWeights, weights, dtype):
    """`((left Aᵀ) ⊙ W) B` of the first layer, in one dtype throughout.

    Args:
        left: `[M, d_in]`.
        slots: S slots.
        weights: `[M, S]`.
        dtype: Of all products.
    """
    A, B, scale = (a[0].astype(dtype) for a in (slots.A, slots.B, slots.scale))
    h = jnp.einsum("md,sgrd->msgr", left.astype(dtype), A) * scale[None]
    h = h * weights.astype(dtype)[:, :, None, None]
    cuts = np.cumsum(slots.slices)[:-1].tolist()
    parts = jnp.split(B, cuts, axis=2)
    return jnp.concatenate(
        [jnp.einsum("msr,srn->mn", h[:, :, g], part) for g, part in enumerate(parts)], axis=1
    )


@jax.jit
def exact(x, w, slots, weights):
    """The product in float64, from the slots that are active."""
    wide = jnp.float64
    return jnp.dot(x.astype(wide), w[0].astype(wide)) + low_rank(x, slots, weights, wide)


@jax.jit
def merged(x, w, slots, weights, of_token):
    """The bfloat16 model with each adapter merged into its own copy of the weight.

    Args:
        x: `[T, d_in]`.
        w: `[1, d_in, d_out]`.
        slots: The active slots.
        weights: `[D, S]`, the slots of each adapter.
        of_token: `[T]`, the adapter of each token.
    """

    def one(i, y):
        rows = jnp.broadcast_to(weights[i], (w.shape[1], weights.shape[1]))
        with jax.default_matmul_precision("highest"):
            delta = low_rank(jnp.eye(w.shape[1], dtype=BF16), slots, rows, jnp.float32)
        both = (w[0].astype(jnp.float32) + delta).astype(BF16)
        return jnp.where((of_token == i)[:, None], jnp.dot(x, both), y)

    return lax.fori_loop(0, weights.shape[0], one, jnp.zeros((x.shape[0], w.shape[2]), BF16))


def errors(
    shapes: Shapes, name: str, case: Case, w, adapters, *, implementation: str, seed: int
) -> dict[str, float]:
    """Relative errors of the implementation, of `xla` and of merged weights; NaN if unwritten."""
    d_in, slices = shapes.modules[name]
    x = random(jax.random.key(seed), (case.tokens, d_in), 1.0)
    of_adapter, of_token = case.groups(seed)
    active = np.flatnonzero(of_adapter.any(axis=0))
    w, first = w[:1], jax.tree.map(lambda a: a[:1], adapters)
    some = jax.tree.map(lambda a: a[:, active], first)
    rows = of_adapter[of_token]
    with jax.enable_x64(True):
        want = np.asarray(exact(x, w, some, jnp.asarray(rows[:, active])))
    scale = np.linalg.norm(want)
    found = {}
    for one in (implementation, "xla"):
        poison((case.tokens, sum(slices)))
        y = np.asarray(product(x, w, first, jnp.asarray(rows), one), np.float64)
        found[one] = float(np.linalg.norm(y - want) / scale)
    few = of_token < MERGED
    y = merged(x, w, some, jnp.asarray(of_adapter[:MERGED, active]), jnp.asarray(of_token))
    difference = (np.asarray(y, np.float64) - want)[few]
    return found | {"merged": float(np.linalg.norm(difference) / np.linalg.norm(want[few]))}


def check(shapes: Shapes, case: Case, weights, adapters, implementation: str) -> dict[str, float]:
    """The worst errors of the four products.

    Raises:
        ValueError: One is more than twice that of the better of the other bfloat16 models.
    """
    worst: dict[str, float] = {}
    for seed, name in enumerate(shapes.modules, case.tokens + 100):
        found = errors(
            shapes,
            name,
            case,
            weights[name],
            adapters[name],
            implementation=implementation,
            seed=seed,
        )
        bar = 2 * min(found["xla"], found["merged"])
        if not found[implementation] <= bar:
            raise ValueError(f"the error of {name} must be at most {bar:.2e}; got {found}; {case}")
        worst = {key: max(error, worst.get(key, 0.0)) for key, error in found.items()}
    return worst
