"""The Hopper kernels without a GPU: they lower for "cuda", and refuse what they cannot run."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lorajax.kernels_pallas import LoraWeights, add_lora, lora_delta, lora_linear, make_routing
from lorajax.kernels_pallas.add_lora import api as add_api
from lorajax.kernels_pallas.lora_delta import api as delta_api
from lorajax.kernels_pallas.lora_linear import api as linear_api

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
SHAPES = {
    # tokens, layers, slots, rank, d_in, slices, block
    "one token": (1, 2, 64, 16, 4096, (4096,), None),
    "merged": (64, 2, 64, 16, 4096, (4096, 1024, 1024), None),
    "rank 8": (8, 1, 8, 8, 256, (128, 128), None),
    "rank 64": (256, 2, 64, 64, 14336, (4096,), None),
    "rank 128": (20, 1, 4, 128, 1024, (1024,), None),
    "wide tiles": (100, 1, 16, 16, 1024, (14336, 14336), None),
    "odd tokens": (75, 1, 8, 16, 1024, (1024,), None),
    "prefill": (2048, 2, 16, 16, 4096, (4096, 1024, 1024), None),
    "prefill, short blocks": (300, 1, 16, 16, 1024, (1024,), 64),
}


def on(kind):
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    return use_abstract_mesh(AbstractMesh((1,), ("d",), abstract_device=device))


def arguments(shape, dtype=BF16):
    """(abstract arrays by name, slices, block) of a case."""
    tokens, layers, slots, rank, d_in, slices, block = shape
    of = jax.ShapeDtypeStruct
    G, d_out = len(slices), sum(slices)
    arrays = {
        "x": of((tokens, d_in), dtype),
        "w": of((layers, d_in, d_out), dtype),
        "y": of((tokens, d_out), dtype),
        "A": of((layers, slots, G, rank, d_in), dtype),
        "B": of((layers, slots, rank, d_out), dtype),
        "scale": of((layers, slots, G, rank), F32),
        "rows": of((tokens, slots), F32),
        "layer": of((), I32),
    }
    return arrays, slices, block


def lower(shape, op, implementation="mosaic_gpu", dtype=BF16, kind="NVIDIA H200"):
    arrays, slices, block = arguments(shape, dtype)

    def run(x, w, y, A, B, scale, rows, layer):
        slots = LoraWeights(A, B, scale, slices)
        routing = make_routing(rows, jnp.arange(x.shape[0]), block=block)
        keywords = {"layer": layer, "implementation": implementation}
        if op == "lora_linear":
            return lora_linear(x, w, slots, routing, **keywords)
        if op == "add_lora":
            return add_lora(y, x, slots, routing, **keywords)
        return lora_delta(x, slots, routing, **keywords)

    with on(kind):
        return jax.jit(run).trace(**arrays).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("op", ["lora_linear", "lora_delta", "add_lora"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_lowers_to_one_kernel_for_cuda(shape, op):
    lowered = lower(shape, op)
    text = lowered.as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert text.count("dot_general") == 0  # nothing is left to plain products
    (out,) = jax.tree.leaves(lowered.out_info)
    assert out.dtype == (F32 if op == "lora_delta" else BF16)
    assert out.shape == (shape[0], sum(shape[5]))


def test_stacked_arrays_go_in_whole():
    text = lower(SHAPES["merged"], "lora_linear").as_text()
    call = next(line for line in text.splitlines() if "custom_call @mosaic_gpu" in line)
    for whole in ("tensor<8192x6144xbf16>", "tensor<6144x4096xbf16>", "tensor<2048x6144xbf16>"):
        assert whole in call
    assert "dynamic_slice" not in text


def test_the_counters_are_a_constant_and_not_filled_before_each_launch():
    text = lower(SHAPES["merged"], "lora_linear").as_text()
    call = next(line for line in text.splitlines() if "custom_call @mosaic_gpu" in line)
    assert call.split("tensor<1xi32>, tensor<1xi32>, tensor<")[1].startswith("54xi32>")
    assert "279585296" in text or "0x" in text  # the mark that keeps it from being a plain zero


@pytest.mark.parametrize(
    ("kind", "dtype", "said"),
    [
        ("NVIDIA A100-SXM4-80GB", BF16, "compute capability 9.0 (Hopper); got NVIDIA A100"),
        ("NVIDIA H200", F32, "x, A and B must be bfloat16; got float32"),
    ],
)
def test_a_case_that_it_cannot_run_is_refused_by_name(kind, dtype, said):
    with pytest.raises(ValueError, match="implementation='mosaic_gpu' must be able to run") as info:
        lower(SHAPES["merged"], "lora_linear", dtype=dtype, kind=kind)
    assert said in str(info.value)


def test_it_is_refused_on_the_cpu_that_this_test_runs_on():
    if jax.default_backend() != "cpu":
        pytest.skip("not on a CPU")
    x = jnp.zeros((8, 128), BF16)
    slots = LoraWeights(
        jnp.zeros((1, 2, 1, 8, 128), BF16),
        jnp.zeros((1, 2, 8, 128), BF16),
        jnp.ones((1, 2, 1, 8)),
        (128,),
    )
    routing = make_routing(jnp.ones((1, 2)), jnp.zeros(8, I32))
    with pytest.raises(ValueError, match="Hopper"):
        lora_delta(x, slots, routing, implementation="mosaic_gpu")
    assert not lora_delta(x, slots, routing).any()


def test_an_unsupported_shape_is_refused_with_the_shape():
    shape = (8, 1, 8, 24, 256, (128,), None)
    with pytest.raises(ValueError, match="slot rank must be 8, 16, 32, 64"):
        lower(shape, "lora_linear")


def test_the_default_is_what_was_measured_to_be_fastest():
    default = {
        api: api.IMPLEMENTATIONS["mosaic_gpu"].default for api in (linear_api, add_api, delta_api)
    }
    assert default == {linear_api: True, add_api: False, delta_api: False}
    assert all(list(api.IMPLEMENTATIONS)[-1] == "xla" for api in default)


def test_a_hopper_gpu_takes_it_unasked(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    kinds = {"NVIDIA H200": 1, "NVIDIA A100-SXM4-80GB": 0}
    for kind, kernels in kinds.items():
        text = lower(SHAPES["merged"], "lora_linear", implementation=None, kind=kind).as_text()
        assert text.count("custom_call @mosaic_gpu") == kernels
