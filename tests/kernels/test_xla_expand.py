"""The two ways in which plain XLA expands h, and who takes which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorajax.kernels_pallas.lora_delta import xla

SLICES = (24, 8, 16)


def arrays(tokens, slots=3, rank=4):
    rng = np.random.default_rng(tokens)
    h = rng.standard_normal((slots, len(SLICES), rank, tokens), np.float32)
    return h, rng.standard_normal((slots, rank, sum(SLICES)), np.float32)


def exact(h, B):
    """Slice by slice in float64."""
    ends = np.cumsum(SLICES)
    parts = np.split(B.astype(np.float64), ends[:-1], axis=2)
    return np.concatenate(
        [np.einsum("srt,srn->tn", h[:, g].astype(np.float64), b) for g, b in enumerate(parts)], 1
    )


@pytest.mark.parametrize("form", [xla.expand_apart, xla.expand_together])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_both_forms_against_float64(form, tokens):
    h, B = arrays(tokens)
    packed = h.swapaxes(0, 1).reshape(len(SLICES), -1, tokens)
    found = form(jnp.asarray(packed), jnp.asarray(B.reshape(-1, B.shape[-1])), SLICES)
    np.testing.assert_allclose(np.asarray(found), exact(h, B), rtol=1e-5, atol=1e-5)


def products(tokens, platform):
    """Products in the program for a platform."""
    h, B = (jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in arrays(tokens))
    program = jax.jit(lambda h, B: xla.expand(h, B, SLICES)).trace(h, B)
    return program.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.dot_general")


@pytest.mark.parametrize(
    ("tokens", "platform", "wanted"),
    [(64, "cuda", 1), (64, "rocm", 1), (64, "cpu", 3), (64, "tpu", 3), (512, "cuda", 3)],
)
def test_a_gpu_multiplies_once_while_tokens_are_few(tokens, platform, wanted):
    assert products(tokens, platform) == wanted
