"""Rows of a batch: what a request asks for, as sorted (name, weight) pairs, and its arrays."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import SupportsFloat

import numpy as np

from lorajax.errors import LoraError
from lorajax.runtime.pool import Version

#: A request's adapter: None is the base model; a mapping is a weighted sum of adapters.
Row = str | Mapping[str, SupportsFloat] | None

#: A row in normal form: (name, weight) sorted by name; a weight of zero names an adapter that the
#: row does not use.
Pairs = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class CacheKey:
    """What a row's activations depend on besides its tokens: the identity for prefix caches.

    A value of its own type, so that no text can equal it. Reloading other weights under a name
    changes it; the base model has the empty one.

    Attributes:
        adapters: (content digest, weight), sorted.
    """

    adapters: tuple[tuple[str, float], ...]


def parse_rows(rows: Iterable[object]) -> tuple[Pairs, ...]:
    """Rows in normal form.

    Args:
        rows: For each request None, a name, or {name: weight}.

    Raises:
        LoraError: A row is none of these, or a weight is not a finite float32.
    """
    if isinstance(rows, str | Mapping):
        raise LoraError(
            f"rows must be a sequence with one entry for each request; got {rows!r}; "
            "wrap it in a list"
        )
    return tuple(_pairs(index, row) for index, row in enumerate(rows))


def _pairs(index: int, row: object) -> Pairs:
    if row is None:
        return ()
    if isinstance(row, str):
        return ((row, 1.0),)
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise LoraError(
            f"a row must be None, an adapter's name, or {{name: weight}}; got {row!r} in row "
            f"{index}; use None for the base model"
        )
    return tuple((name, _weight(index, name, row[name])) for name in sorted(row))


def _weight(index: int, name: str, weight: object) -> float:
    # The device holds float32: what overflows there is not finite, what vanishes there is base.
    try:
        with np.errstate(over="ignore", under="ignore"):
            value = float(np.float32(weight)) if isinstance(weight, Real) else math.nan
    except OverflowError:  # an int beyond float64
        value = math.inf
    if not math.isfinite(value):
        raise LoraError(
            f"a weight must be a finite float32 number; got {weight!r} for {name!r} in row "
            f"{index}; use 0 for an adapter that the row should not use"
        )
    return value


def names_of(rows: Iterable[Pairs], *, used: bool = False) -> tuple[str, ...]:
    """Names in the rows, sorted; with `used` only those with a weight other than zero."""
    return tuple(sorted({name for row in rows for name, w in row if w or not used}))


def row_weights(
    rows: Sequence[Pairs], slots: Mapping[str, tuple[int, ...]], num_slots: int
) -> np.ndarray:
    """Weight of every slot for every row.

    An adapter of several slots is the sum of them, so its weight stands in each. NumPy, so that the
    number of rows compiles nothing.

    Args:
        rows: N rows.
        slots: Slots of each name that is used.
        num_slots: S.

    Returns:
        `f32[N, S]`, read only.
    """
    weights = np.zeros((len(rows), num_slots), np.float32)
    for index, row in enumerate(rows):
        for name, weight in row:
            if weight:
                weights[index, list(slots[name])] = weight
    weights.flags.writeable = False
    return weights


def cache_key(row: Pairs, versions: Mapping[str, Version]) -> CacheKey:
    """The key of a row whose names stand for these versions."""
    return CacheKey(tuple(sorted((versions[name].digest, w) for name, w in row if w)))
