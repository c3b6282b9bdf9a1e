"""The few Mosaic GPU calls whose form differs between JAX 0.10 and 0.12."""

import inspect
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lorajax.kernels_pallas.gpu.schedule import Ref

_LOAD_TAKES_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_LOAD_NEEDS_INDEX = (
    _LOAD_TAKES_INDEX is not None and _LOAD_TAKES_INDEX.default is inspect.Parameter.empty
)
_STORE = getattr(plgpu, "store", None)


def load(ref: Ref, layout: Any) -> jax.Array:
    """Loads a whole reference from global memory, or from shared memory without tiling."""
    if _LOAD_NEEDS_INDEX:
        return plgpu.load(ref, (), layout=layout, optimized=False)
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def store(ref: Ref, value: jax.Array) -> None:
    """Stores to global memory, each thread its own registers."""
    if _STORE is None:
        ref[...] = value
    else:
        _STORE(ref, value, optimized=False)
