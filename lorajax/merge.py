"""A base weight with an adapter added in: what serving through slots must equal."""

from typing import Any

import numpy as np

from lorajax.adapter import Adapter
from lorajax.errors import SpecError
from lorajax.spec import LoraSpec


def merge_adapter(
    w: Any, adapter: Adapter, spec: LoraSpec, target: str, layer: int, weight: int | float = 1.0
) -> np.ndarray:
    """`w + weight · Σ_s (scale ⊙ A)ᵀ B` of one target and layer, slice by slice.

    Args:
        w: `[d_in, d_out]`, the base weight: a NumPy or JAX array; `[V, D]` of an embedding.
        adapter: Packed for `spec`.
        spec: Its slots.
        target: Name of the target; one that the adapter does not touch returns w.
        layer: In [0, L); 0 outside of the layers.
        weight: Factor on the whole adapter.

    Returns:
        `[d_in, d_out]` in w's dtype. Computed in float64 if w is float64, else in float32, and
        rounded once.

    Raises:
        SpecError: There is no such target or layer, or w has another shape.
    """
    base = np.asarray(w)
    goal = spec.target(target)
    shape = (goal.d_in, sum(goal.slices))
    if base.shape != shape:
        raise SpecError(
            f"w must be [d_in, d_out] = {list(shape)} for {target!r}; got {list(base.shape)}; "
            "transpose a [d_out, d_in] weight"
        )
    depth = spec.depth(goal)
    if not 0 <= layer < depth:
        raise SpecError(f"layer must be in [0, {depth}); got {layer}; count layers from 0")
    packed = adapter.arrays.get(target)
    if packed is None:
        return base.copy()
    wide = np.dtype(np.float64 if base.dtype == np.float64 else np.float32)
    merged, start = base.astype(wide), 0
    for g, width in enumerate(goal.slices):
        A = packed.A[:, layer, g].astype(wide).reshape(-1, goal.d_in)  # [n·R, d_in]
        B = packed.B[:, layer, :, start : start + width].astype(wide).reshape(-1, width)
        scale = packed.scale[:, layer, g].astype(wide).reshape(-1, 1) * wide.type(weight)
        merged[:, start : start + width] += (A * scale).T @ B
        start += width
    return merged.astype(base.dtype)
