"""Cases for the kernels, and what they must give: section 1 of docs/design.md in float64 NumPy."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lorajax.kernels_pallas import LoraWeights


@dataclass(frozen=True)
class Shape:
    """Static facts of a case (symbols of docs/design.md)."""

    T: int
    d_in: int
    slices: tuple[int, ...]
    S: int
    R: int
    dtype: str = "float32"
    slot_dtype: str | None = None
    block: int | None = None
    L: int = 2

    @property
    def d_out(self) -> int:
        return sum(self.slices)


def make_weights(shape: Shape, rng: np.random.Generator) -> LoraWeights:
    """Slots with random contents; small integers for int8, which holds no fractions."""
    s, G = shape, len(shape.slices)
    dtype = jnp.dtype(s.slot_dtype or s.dtype)

    def draw(*size: int) -> jax.Array:
        if dtype == jnp.int8:
            return jnp.asarray(rng.integers(-5, 6, size), dtype)
        return jnp.asarray(rng.normal(size=size), jnp.float32).astype(dtype)

    return LoraWeights(
        A=draw(s.L, s.S, G, s.R, s.d_in),
        B=draw(s.L, s.S, s.R, s.d_out),
        scale=jnp.asarray(rng.uniform(0.5, 2, (s.L, s.S, G, s.R)), jnp.float32),
        slices=s.slices,
    )


def make_arrays(shape: Shape, rng: np.random.Generator) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x `[T, d_in]`, w `[L, d_in, d_out]` and y `[T, d_out]`, whose first entry is -0.0."""
    s = shape
    x = jnp.asarray(rng.normal(size=(s.T, s.d_in)), jnp.float32).astype(s.dtype)
    w = jnp.asarray(rng.normal(size=(s.L, s.d_in, s.d_out)), jnp.float32).astype(s.dtype)
    y = np.array(rng.normal(size=(s.T, s.d_out)), np.float32)
    y[:, 0] = -0.0
    return x, w, jnp.asarray(y).astype(s.dtype)


def token_weights(row_weights: np.ndarray, token_row: np.ndarray) -> np.ndarray:
    """W `[T, S]`; NaN where a row is out of range."""
    N, S = row_weights.shape
    out = np.zeros((len(token_row), S))
    for t, row in enumerate(token_row):
        if row >= N or row < -1:
            out[t] = np.nan
        elif row >= 0:
            out[t] = row_weights[row]
    return out


def expected_delta(x: jax.Array, weights: LoraWeights, W: np.ndarray, layer: int) -> np.ndarray:
    """The delta `f64[T, d_out]`: a token's slots one by one, and no others."""
    A, B, scale = (_f64(a)[layer] for a in (weights.A, weights.B, weights.scale))
    x, out = _f64(x), np.zeros((x.shape[0], B.shape[-1]))
    for t, s in zip(*np.nonzero(W), strict=True):
        start = 0
        for g, width in enumerate(weights.slices):
            h = (A[s, g] @ x[t]) * scale[s, g] * W[t, s]
            out[t, start : start + width] += h @ B[s][:, start : start + width]
            start += width
    return out


def _f64(array: jax.Array) -> np.ndarray:
    return np.asarray(array.astype(jnp.float32), np.float64)


def assert_close(got: jax.Array, want: np.ndarray, dtype: str) -> None:
    """Compares in norm, and NaN rows exactly.

    float32: 1e-5. bfloat16: h and the output are rounded once each (half a unit is 2^-9), so twice
    their sum.
    """
    got = np.asarray(got.astype(jnp.float32), np.float64)
    bad = np.isnan(want).any(axis=1)
    assert (np.isnan(got).any(axis=1) == bad).all(), (np.isnan(got).any(axis=1), bad)
    tolerance = 1e-5 if dtype == "float32" else 4 * 2.0**-9
    error = np.linalg.norm(got[~bad] - want[~bad])
    assert error <= tolerance * np.linalg.norm(want[~bad]) + 1e-30, error
