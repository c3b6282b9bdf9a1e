"""Packs placed modules into the slot arrays of a spec."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from lorajax.adapter import PackedWeights
from lorajax.adapters.fit import Placement
from lorajax.adapters.problems import Problems
from lorajax.errors import SpecError
from lorajax.spec import LoraSpec


def pack(
    placements: Sequence[Placement],
    tensors: Mapping[str, np.ndarray],
    spec: LoraSpec,
    rank: int,
    problems: Problems,
) -> dict[str, PackedWeights]:
    """Slot arrays of every target that a module goes to.

    Rank rows are cut into blocks of R, one a slot; the rows of a module beyond its own rank are
    zero in A, B and scale, so mixed ranks are exact.

    Args:
        placements: From `fit`.
        tensors: A `[r, d_in]` and B `[d_out, r]` by name, in any float dtype.
        spec: The slots.
        rank: Largest rank of a module.
        problems: NaN and infinite values are noted here.

    Returns:
        For each target, A `[n, L, G, R, d_in]`, B `[n, L, R, d_out]`, scale `f32[n, L, G, R]`.

    Raises:
        SpecError: The spec's dtype cannot hold plain weights.
    """
    dtype = np.dtype(spec.dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise SpecError(
            "slots must be of a float type of 16 bits or more to take adapters as they are; got "
            f"{dtype.name}; use bfloat16, float16 or float32"
        )
    n, R = spec.slots_for_rank(rank), spec.slot_rank
    arrays = {}
    for target in dict.fromkeys(c.target for p in placements for c in p.cuts):
        L, G = spec.depth(target), len(target.slices)
        arrays[target.name] = PackedWeights(
            A=np.zeros((n, L, G, R, target.d_in), dtype),
            B=np.zeros((n, L, R, sum(target.slices)), dtype),
            scale=np.zeros((n, L, G, R), np.float32),
        )
    with np.errstate(over="ignore", invalid="ignore"):  # reported by name below
        for placement in placements:
            _write(placement, tensors, arrays, R)
    if not all(np.isfinite(a).all() for p in arrays.values() for a in (p.A, p.B)):
        _name_faults(placements, tensors, dtype, problems)
    return arrays


def _write(
    placement: Placement,
    tensors: Mapping[str, np.ndarray],
    arrays: Mapping[str, PackedWeights],
    R: int,
) -> None:
    module, layer = placement.module, placement.layer
    A, B = tensors[module.a], tensors[module.b].T
    for cut in placement.cuts:
        packed, g = arrays[cut.target.name], cut.slice
        column = sum(cut.target.slices[:g])
        columns = slice(column, column + cut.target.slices[g])
        for slot, first in enumerate(range(0, module.rank, R)):
            rows = slice(first, min(first + R, module.rank))
            count = rows.stop - first
            packed.A[slot, layer, g, :count] = A[rows]
            packed.B[slot, layer, :count, columns] = B[rows, cut.start : cut.stop]
            packed.scale[slot, layer, g, :count] = module.scale


def _name_faults(
    placements: Sequence[Placement],
    tensors: Mapping[str, np.ndarray],
    dtype: np.dtype,
    problems: Problems,
) -> None:
    for module in (p.module for p in placements):
        for tensor in (module.a, module.b):
            array = tensors[tensor]
            bad = int((~np.isfinite(array)).sum())
            if bad:
                problems.add(
                    "every value must be finite",
                    f"{tensor} {list(array.shape)} with {bad} NaN or infinite values",
                    "train or save the adapter again, it is damaged",
                )
                continue
            with np.errstate(over="ignore"):
                cast = array.astype(dtype)
            if not np.isfinite(cast).all():
                problems.add(
                    f"every value must fit the slots' {dtype.name}",
                    f"{tensor} {array.dtype.name}{list(array.shape)} with values up to "
                    f"{float(np.abs(array).max()):.3g}",
                    "use a spec with dtype bfloat16 or float32",
                )
