"""Values: every accepted form gives the delta that float64 NumPy gives."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorajax import LoraSpec, Target, init_state, lora_delta, make_routing, write_slots
from lorajax.adapters import adapter_from_tensors, load_adapter
from tests.adapters.support import (
    ALL,
    BF16,
    FUSED,
    SIZES,
    assert_deltas,
    config,
    expected,
    scale_of,
    spec,
    tensors,
    write,
)

MODULES = tuple(SIZES)


@pytest.fixture(params=[True, False], ids=["merged", "unmerged"])
def lora_spec(request):
    return spec(merged=request.param)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, BF16], ids=str)
def test_all_modules_from_a_folder(tmp_path, lora_spec, dtype):
    made = tensors(dtype=dtype)
    adapter = load_adapter(write(tmp_path / "sql", config(), made), lora_spec)
    assert adapter.name == "sql"
    assert (adapter.rank, adapter.num_slots) == (4, 1)
    assert_deltas(adapter, lora_spec, expected(made, lora_spec, 2.0))
    assert adapter.modules["model.layers.1.mlp.up_proj"] == (4, 2.0)
    assert len(adapter.modules) == len(made) // 2
    assert set(adapter.arrays) == {t.name for t in lora_spec.targets}


@pytest.mark.parametrize("count", range(1, 8))
def test_any_subset_of_modules(lora_spec, count):
    for modules in itertools.combinations(MODULES, count):
        made = tensors(modules)
        adapter = adapter_from_tensors(config(), made, lora_spec, name="x")
        touched = {lora_spec.module_slices[m][0].name for m in modules}
        assert set(adapter.arrays) == touched
        assert_deltas(adapter, lora_spec, expected(made, lora_spec, 2.0))


@pytest.mark.parametrize(
    "modules",
    [
        ("self_attn.qkv_proj",),
        ("mlp.gate_up_proj",),
        ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
        ("self_attn.qkv_proj", "mlp.up_proj"),
        ("self_attn.k_proj", "mlp.gate_up_proj"),
    ],
)
def test_fused_modules(lora_spec, modules):
    made = tensors(modules)
    names = [m.rpartition(".")[2] for m in modules]
    adapter = adapter_from_tensors(config(target_modules=names), made, lora_spec, name="x")
    assert_deltas(adapter, lora_spec, expected(made, lora_spec, 2.0))


@pytest.mark.parametrize("rank", [1, 2, 7, 8, 9, 10, 16, 31, 32])
@pytest.mark.parametrize("alpha", [16, 16.0, 0.5])
@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_and_scales(lora_spec, rank, alpha, rslora):
    made = tensors(r=rank)
    raw = config(r=rank, lora_alpha=alpha, use_rslora=rslora)
    adapter = adapter_from_tensors(raw, made, lora_spec, name="x")
    scale = scale_of(alpha, rank, rslora)
    assert adapter.num_slots == -(-rank // 8)
    assert_deltas(adapter, lora_spec, expected(made, lora_spec, scale))
    for packed in adapter.arrays.values():
        n, L, G, R, d_in = packed.A.shape
        rows = packed.scale.transpose(1, 2, 0, 3).reshape(L, G, n * R)
        np.testing.assert_array_equal(rows[..., :rank], np.float32(scale))
        np.testing.assert_array_equal(rows[..., rank:], 0)
        assert not packed.A.transpose(1, 2, 0, 3, 4).reshape(L, G, n * R, d_in)[:, :, rank:].any()
        assert not packed.B.transpose(1, 0, 2, 3).reshape(L, n * R, -1)[:, rank:].any()


def test_patterns_give_each_module_its_rank_and_scale(lora_spec):
    ranks = {"self_attn.q_proj": 12, "self_attn.v_proj": 2, "mlp.down_proj": 16}
    made = tensors(r=ranks)
    raw = config(
        rank_pattern={"q_proj": 12, "self_attn.v_proj": 2, r"model\.layers\.\d\.mlp.down_proj": 16},
        alpha_pattern={"k_proj|q_proj": 3.5, "layers.0.self_attn.q_proj": 99, "down_proj": 4},
    )
    adapter = adapter_from_tensors(raw, made, lora_spec, name="x")
    scales = dict.fromkeys(MODULES, 8 / 4) | {
        "self_attn.q_proj": 3.5 / 12,  # the first key that matches wins
        "self_attn.k_proj": 3.5 / 4,
        "self_attn.v_proj": 8 / 2,
        "mlp.down_proj": 4 / 16,
    }
    assert (adapter.rank, adapter.num_slots) == (16, 2)
    assert_deltas(adapter, lora_spec, expected(made, lora_spec, scales))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"layers_to_transform": [1]}, [1]),
        ({"layers_to_transform": 0}, [0]),
        ({"layers_to_transform": [0, 1], "layers_pattern": "layers"}, [0, 1]),
        ({"layers_to_transform": [0], "layers_pattern": ["h", "layers"]}, [0]),
        ({"target_modules": [f"layers.1.{m}" for m in MODULES]}, [1]),
        ({"target_modules": [f"1.{m}" for m in MODULES]}, [1]),
        ({"target_modules": [f"model.layers.1.{m}" for m in MODULES]}, [1]),
        ({"target_modules": ALL + ALL}, [0, 1]),
        ({"target_modules": "all-linear"}, [0, 1]),
        ({"target_modules": "ALL-linear"}, [0, 1]),
        ({"target_modules": None}, [0, 1]),
        ({"target_modules": r".*\.(self_attn|mlp)\..*_proj"}, [0, 1]),
        ({"target_modules": r"^model\.layers\.1\..*$"}, [1]),
        ({"exclude_modules": [f"0.{m}" for m in MODULES]}, [1]),
        ({"exclude_modules": r"model\.layers\.0\..*"}, [1]),
        ({"exclude_modules": []}, [0, 1]),
    ],
)
def test_target_forms(lora_spec, changes, layers):
    made = tensors(layers=layers)
    adapter = adapter_from_tensors(config(**changes), made, lora_spec, name="x")
    assert_deltas(adapter, lora_spec, expected(made, lora_spec, 2.0))


@pytest.mark.parametrize(
    ("layers", "prefix"),
    [
        ("model.layers", "base_model.model.model.layers"),
        ("model.layers", "model.layers"),
        ("model.layers", "base_model.model.layers"),
        ("model.layers", "base_model.model.language_model.model.layers"),
        ("model.layers", "base_model.model.model.language_model.layers"),
        ("model.language_model.layers", "base_model.model.model.layers"),
        ("language_model.model.layers", "base_model.model.model.layers"),
        ("model.layers", "module.base_model.model._orig_mod.model.layers"),
        ("model.layers", "_orig_mod.base_model.model.model.layers"),
        ("transformer.h", "base_model.model.transformer.h"),
        ("transformer.h", "base_model.model.h"),
        ("gpt_neox.layers", "base_model.model.gpt_neox.layers"),
        ("distilbert.transformer.layer", "base_model.model.distilbert.transformer.layer"),
        ("transformer.layer", "base_model.model.transformer.layer"),
        ("decoder.block", "base_model.model.decoder.block"),
    ],
)
def test_layer_lists_and_wrappers(layers, prefix):
    lora_spec = spec(layers=layers)
    made = tensors(prefix=prefix)
    adapter = adapter_from_tensors(config(), made, lora_spec, name="x")
    assert_deltas(adapter, lora_spec, expected(made, lora_spec, 2.0, prefix))


def test_keys_may_carry_the_adapter_name(lora_spec):
    made = tensors()
    named = {k.replace(".weight", ".default.weight"): v for k, v in made.items()}
    adapter = adapter_from_tensors(config(), named, lora_spec, name="x")
    assert_deltas(adapter, lora_spec, expected(made, lora_spec, 2.0))
    assert adapter.digest == adapter_from_tensors(config(), made, lora_spec, name="y").digest


@pytest.mark.parametrize("fan_in_fan_out", [True, False, None])
def test_conv1d_bases_do_not_transpose_the_factors(fan_in_fan_out):
    lora_spec = LoraSpec(
        targets=(
            Target("attn.c_attn", 16, (16, 8, 8), ("attn.q", "attn.k", "attn.v")),
            Target("attn.c_proj", 16, 16),
            Target("mlp.c_proj", 64, 16),
        ),
        num_layers=2,
        num_slots=2,
        slot_rank=8,
        dtype="float32",
        layers="transformer.h",
        fused=(("attn.c_attn", ("attn.q", "attn.k", "attn.v")),),
    )
    widths = {"attn.c_attn": (16, 32), "attn.c_proj": (16, 16), "mlp.c_proj": (64, 16)}
    prefix = "base_model.model.transformer.h"
    made = tensors(tuple(widths), prefix=prefix, widths=widths)
    raw = config(target_modules=["c_attn", "c_proj"], fan_in_fan_out=fan_in_fan_out)
    adapter = adapter_from_tensors(raw, made, lora_spec, name="x")
    want = expected(made, lora_spec, 2.0, prefix, {"attn.c_attn": ("attn.q", "attn.k", "attn.v")})
    assert_deltas(adapter, lora_spec, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_packed_in_the_dtype_of_the_spec(dtype):
    lora_spec, made = spec(dtype=dtype), tensors()
    adapter = adapter_from_tensors(config(), made, lora_spec, name="x")
    for packed in adapter.arrays.values():
        assert packed.A.dtype == packed.B.dtype == jnp.dtype(dtype)
        assert packed.scale.dtype == np.float32
    rounded = {k: v.astype(jnp.dtype(dtype)) for k, v in made.items()}
    assert_deltas(adapter, lora_spec, expected(rounded, lora_spec, 2.0))


def test_tensors_may_be_jax_arrays_and_big_endian():
    made = tensors()
    lora_spec = spec()
    want = adapter_from_tensors(config(), made, lora_spec, name="x").digest
    for convert in (jnp.asarray, lambda a: a.astype(">f4")):
        other = {k: convert(v) for k, v in made.items()}
        assert adapter_from_tensors(config(), other, lora_spec, name="x").digest == want


def test_the_input_is_copied_and_left_alone():
    made, raw, lora_spec = tensors(), config(rank_pattern={"zzz": 3}), spec()
    kept = {k: v.copy() for k, v in made.items()}
    with pytest.warns(UserWarning, match="rank_pattern"):
        adapter = adapter_from_tensors(raw, made, lora_spec, name="x")
    for key, value in made.items():
        np.testing.assert_array_equal(value, kept[key])
        value[:] = 9
    raw["rank_pattern"]["q_proj"] = 1
    assert adapter.config["rank_pattern"] == {"zzz": 3}
    assert_deltas(adapter, lora_spec, expected(kept, lora_spec, 2.0))


@pytest.mark.parametrize(
    "changes",
    [{"alpha_pattern": {"^q_proj": 100}}, {"rank_pattern": {"self_attn.z_proj": 99}}],
)
def test_a_pattern_key_without_a_module_has_no_effect_and_warns(changes):
    made, lora_spec = tensors(), spec()
    key = next(iter(next(iter(changes.values()))))
    with pytest.warns(UserWarning, match="must match a module") as caught:
        adapter = adapter_from_tensors(config(**changes), made, lora_spec, name="x")
    assert repr(key) in str(caught[0].message)
    assert_deltas(adapter, lora_spec, expected(made, lora_spec, 2.0))


def test_digest_is_of_the_content():
    made, lora_spec = tensors(), spec()

    def digest(raw=None, files=None, where=lora_spec, name="x"):
        return adapter_from_tensors(raw or config(), files or made, where, name=name).digest

    same = digest()
    assert len(same) == 64
    assert same == digest(name="other") == digest(where=spec(merged=False, dtype="bfloat16"))
    assert same == digest(files=dict(reversed(made.items())))
    assert same == digest(config(lora_alpha=8.0, target_modules=ALL[::-1], peft_version="0.1"))
    assert same != digest(config(lora_alpha=9))
    assert same != digest(config(use_rslora=True))
    changed = {k: v.copy() for k, v in made.items()}
    next(iter(changed.values()))[0, 0] += 1
    assert same != digest(files=changed)
    assert same != digest(files={k: v.astype(np.float64) for k, v in made.items()})


def test_a_loaded_adapter_runs_in_slots():
    """From file tensors through slots to the step's delta."""
    lora_spec, made = spec(), tensors(("self_attn.qkv_proj",), r=12)
    raw = config(r=12, lora_alpha=6, target_modules=["qkv_proj"])
    adapter = adapter_from_tensors(raw, made, lora_spec, name="x")
    state = write_slots(init_state(lora_spec), [2, 0], adapter)
    row = jnp.asarray([[1.0, 0, 1, 0]])
    routing = make_routing(row, jnp.asarray([0, -1, 0], jnp.int32))
    x = jax.random.normal(jax.random.key(0), (3, 32))
    got = lora_delta(x, state["self_attn.qkv_proj"], routing, layer=1)
    whole = expected(made, lora_spec, 0.5)
    want = np.concatenate(
        [np.asarray(x, np.float64) @ whole[1, m] for m in FUSED["self_attn.qkv_proj"]], axis=1
    )
    want[1] = 0
    np.testing.assert_allclose(got, want, atol=1e-4)
