"""What the TPU report compares: this project's kernel, the base product alone, and XLA's forms.

XLA's forms take one layer's own arrays: a slice of a stack would be copied first.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lorajax import kernels_pallas as kernels
from lorajax.kernels_pallas import LoraWeights, Routing
from lorajax.kernels_pallas.tpu.stages import dot
from lorajax.kernels_pallas.tpu.tiles import Tiles


def fused(x, w, weights: LoraWeights, routing: Routing, layer):
    """This project's kernel."""
    return kernels.lora_linear(x, w, weights, routing, layer=layer, implementation="mosaic_tpu")


def two_products(x, w, weights: LoraWeights, routing: Routing, layer):
    """Base product, then two dense products over all slots: the `xla` implementation."""
    del layer
    return kernels.lora_linear(x, w, weights, routing, layer=0, implementation="xla")


def one_hot(x, w, weights: LoraWeights, routing: Routing, layer):
    """Base product, then the one-hot einsum over all slots that JAX serving engines use."""
    del layer
    A, B, T = weights.A[0], weights.B[0], x.shape[0]
    hot, start = routing.weights.T.astype(x.dtype), 0
    h = jnp.einsum("td,ts,sgrd->tgr", x, hot, A)
    parts = []
    for g, width in enumerate(weights.slices):
        columns = B[..., start : start + width]
        parts.append(jnp.einsum("tr,ts,srn->tn", h[:, g], hot, columns))
        start += width
    return x @ w[0] + jnp.concatenate(parts, axis=1).reshape(T, -1)


def ragged(x, w, weights: LoraWeights, routing: Routing, layer):
    """Base product, then `ragged_dot` over tokens sorted by their one slot."""
    del layer
    A, B = weights.A[0], weights.B[0]
    S, G, R, d_in = A.shape
    slot = jnp.argmax(routing.weights, axis=0)
    order = jnp.argsort(slot)
    sizes = jnp.bincount(slot, length=S).astype(jnp.int32)
    h = lax.ragged_dot(x[order], A.reshape(S, G * R, d_in).swapaxes(1, 2), sizes)
    parts, start = [], 0
    for g, width in enumerate(weights.slices):
        columns = B[..., start : start + width]
        parts.append(lax.ragged_dot(h[:, g * R : (g + 1) * R], columns, sizes))
        start += width
    delta = jnp.concatenate(parts, axis=1)
    return x @ w[0] + jnp.zeros_like(delta).at[order].set(delta)


def base_kernel(tiles: Tiles, vmem: int) -> Callable[..., jax.Array]:
    """The fused kernel's base product alone, with the same tiles, for `f(x, w, layer)`."""

    def body(depth_tiles, layer, x, w, out, acc):
        k = pl.program_id(1)

        @pl.when(k == 0)
        def _zero():
            acc[...] = jnp.zeros(acc.shape, acc.dtype)

        columns = pl.ds(pl.multiple_of(k * tiles.depth, tiles.depth), tiles.depth)
        acc[...] += dot(x[:, columns], w[...])

        @pl.when(k == depth_tiles - 1)
        def _write():
            out[...] = acc[...].astype(out.dtype)

    def run(x, w, layer):
        (T, d_in), d_out = x.shape, w.shape[2]
        grid = (d_out // tiles.columns, d_in // tiles.depth)
        once = pl.Buffered(1)
        return pl.pallas_call(
            functools.partial(body, grid[1]),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid,
                in_specs=[
                    pl.BlockSpec((T, d_in), lambda n, k, layer: (0, 0), pipeline_mode=once),
                    pl.BlockSpec(
                        (None, tiles.depth, tiles.columns), lambda n, k, layer: (layer[0], k, n)
                    ),
                ],
                out_specs=pl.BlockSpec((T, tiles.columns), lambda n, k, layer: (0, n)),
                scratch_shapes=[pltpu.VMEM((T, tiles.columns), jnp.float32)],
            ),
            out_shape=jax.ShapeDtypeStruct((T, d_out), x.dtype),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",) * 2,
                vmem_limit_bytes=vmem,
                disable_bounds_checks=True,
            ),
            name="base_tpu",
        )(layer.reshape(1), x, w)

    return run


#: What the report compiles, by the name it prints.
FORMS = {
    "fused kernel": fused,
    "two dense products": two_products,
    "one-hot einsum": one_hot,
    "ragged_dot": ragged,
}
