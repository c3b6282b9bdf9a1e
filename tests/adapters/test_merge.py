"""Merged weights: the definition of LoRA in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from lorajax import SpecError
from lorajax.adapters import adapter_from_tensors
from lorajax.merge import merge_adapter
from tests.adapters.support import BF16, HIDDEN, config, expected, spec, tensors


@pytest.fixture(params=[True, False], ids=["merged", "unmerged"])
def lora_spec(request):
    return spec(merged=request.param)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("weight", [1, 0.25, -2.0])
def test_merge(lora_spec, dtype, weight):
    made = tensors(r=12)
    adapter = adapter_from_tensors(config(r=12), made, lora_spec, name="x")
    want = expected(made, lora_spec, 8 / 12)
    rng = np.random.default_rng(0)
    for target in lora_spec.targets:
        base = rng.normal(size=(target.d_in, sum(target.slices))).astype(dtype)
        delta = np.concatenate([want[1, m] for m in target.modules], axis=1)
        whole = base.astype(np.float64) + weight * delta
        for w in (base, jnp.asarray(base)) if dtype != np.float64 else (base,):
            got = merge_adapter(w, adapter, lora_spec, target.name, 1, weight)
            assert got.dtype == base.dtype
            eps = 1e-6 if dtype in (np.float64, np.float32) else float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(
                got.astype(np.float64), whole, rtol=eps, atol=1e-6 * np.abs(whole).max()
            )


def test_an_untouched_target_is_the_base():
    lora_spec = spec()
    adapter = adapter_from_tensors(config(), tensors(["mlp.up_proj"]), lora_spec, name="x")
    base = np.ones((40, HIDDEN), np.float32)
    got = merge_adapter(base, adapter, lora_spec, "self_attn.o_proj", 0)
    np.testing.assert_array_equal(got, base)
    assert got is not base


def test_refusals():
    lora_spec = spec()
    adapter = adapter_from_tensors(config(), tensors(), lora_spec, name="x")
    base = np.ones((40, HIDDEN), np.float32)
    with pytest.raises(SpecError, match="transpose"):
        merge_adapter(base.T, adapter, lora_spec, "self_attn.o_proj", 0)
    for layer in (-1, 2):
        with pytest.raises(SpecError, match="layer must be"):
            merge_adapter(base, adapter, lora_spec, "self_attn.o_proj", layer)
    with pytest.raises(SpecError, match="nope"):
        merge_adapter(base, adapter, lora_spec, "nope", 0)
