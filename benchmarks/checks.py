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

#: What is compared and not timed compiles without a search for the fastest products.
compared = functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})


def poison(shape: tuple[int, ...], dtype=BF16) -> None:
    """Leaves NaN in freed memory, where an output that is not written would find it."""
    for array in [jnp.full(shape, jnp.nan, dtype) for _ in range(4)]:
        array.block_until_ready()
        array.delete()


@functools.partial(compared, static_argnames="implementation")
def product(x, w, adapters, rows, implementation):
    """One module of the first layer."""
    route = make_routing(rows, jnp.arange(x.shape[0]))
    return lora_linear(x, w[:1], adapters, route, implementation=implementation, layer=0)


@compared
def exact(x, w, slots: LoraWeights, rows):
    """The product of the first layer in float64.

    Args:
        x: `[T, d_in]`.
        w: `[1, d_in, d_out]`.
        slots: Of one layer.
        rows: `[T, S]`, the weight of every slot for each token.
    """
    arrays = (x, w, rows, slots.A, slots.B, slots.scale)
    x, w, rows, A, B, scale = (a.astype(jnp.float64) for a in arrays)
    h = jnp.einsum("td,sgrd->tsgr", x, A[0]) * scale * rows[:, :, None, None]
    parts = zip(jnp.split(B[0], _cuts(slots), axis=2), range(len(slots.slices)), strict=True)
    deltas = [jnp.einsum("tsr,srn->tn", h[:, :, g], part) for part, g in parts]
    return jnp.dot(x, w[0]) + jnp.concatenate(deltas, axis=1)


@compared
def merged(x, w, slots: LoraWeights, of_adapter, of_token):
    """The bfloat16 model with each adapter merged into its own copy of the weight.

    Args:
        x: `[T, d_in]`.
        w: `[1, d_in, d_out]`.
        slots: Of one layer.
        of_adapter: `[MERGED, S]`, the slots of each adapter.
        of_token: `[T]`, the adapter of each token.
    """
    A, B, scale = (a[0].astype(jnp.float32) for a in (slots.A, slots.B, slots.scale))
    parts = jnp.split(B, _cuts(slots), axis=2)

    def one(i, y):
        weight = scale * of_adapter[i][:, None, None]
        deltas = [
            jnp.einsum("srd,sr,srn->dn", A[:, g], weight[:, g], part, precision="highest")
            for g, part in enumerate(parts)
        ]
        both = w[0].astype(jnp.float32) + jnp.concatenate(deltas, axis=1)
        return jnp.where((of_token == i)[:, None], jnp.dot(x, both.astype(BF16)), y)

    return lax.fori_loop(0, MERGED, one, jnp.zeros((x.shape[0], w.shape[2]), BF16))


def _cuts(slots: LoraWeights) -> list[int]:
    return np.cumsum(slots.slices)[:-1].tolist()


def distance(y, want: np.ndarray) -> float:
    """The relative error of y, `[T, d_out]`."""
    return float(np.linalg.norm(np.asarray(y, np.float64) - want) / np.linalg.norm(want))


def models(x, w, adapters, case: Case, seed: int) -> tuple[np.ndarray, dict[str, float]]:
    """The product in float64, and the errors of the two models that set the bar.

    Args:
        x: `[T, d_in]`.
        w: `[1, d_in, d_out]`.
        adapters: Of one layer.
        case: The cell.
        seed: Of `case.groups`.
    """
    of_adapter, of_token = case.groups(seed)
    rows = jnp.asarray(of_adapter[of_token])
    with jax.enable_x64(True):
        want = np.asarray(exact(x, w, adapters, rows))
    few = of_token < MERGED
    some = np.zeros((MERGED, case.slots), np.float32)
    some[: min(MERGED, case.adapters)] = of_adapter[:MERGED]
    y = merged(x, w, adapters, jnp.asarray(some), jnp.asarray(of_token))
    plain = distance(product(x, w, adapters, rows, "xla"), want)
    return want, {"xla": plain, "merged": distance(np.asarray(y)[few], want[few])}


def errors(
    shapes: Shapes, name: str, case: Case, w, adapters, *, implementation: str, seed: int
) -> dict[str, float]:
    """Relative errors of the implementation, of `xla` and of merged weights; NaN if unwritten."""
    d_in, slices = shapes.modules[name]
    x = random(jax.random.key(seed), (case.tokens, d_in), 1.0)
    w, first = w[:1], jax.tree.map(lambda a: a[:1], adapters)
    want, others = models(x, w, first, case, seed)
    poison((case.tokens, sum(slices)))
    y = product(x, w, first, jnp.asarray(case.rows(seed)), implementation)
    return {implementation: distance(y, want)} | others


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
