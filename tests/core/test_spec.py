import json

import jax
import numpy as np
import pytest

import lorajax as lj
from lorajax.state import abstract_state

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}


def test_merged_targets_of_a_family():
    spec = lj.LoraSpec.from_hf_config(LLAMA, num_slots=4, dtype="float32")
    shapes = {t.name: (t.d_in, t.slices, t.parallel) for t in spec.targets}
    assert shapes == {
        "self_attn.qkv_proj": (64, (64, 32, 32), "column"),
        "self_attn.o_proj": (64, (64,), "row"),
        "mlp.gate_up_proj": (64, (96, 96), "column"),
        "mlp.down_proj": (96, (64,), "row"),
    }
    assert dict(spec.fused)["mlp.gate_up_proj"] == ("mlp.gate_proj", "mlp.up_proj")


def test_head_dim_and_missing_kv_heads():
    config = LLAMA | {"head_dim": 32}
    del config["num_key_value_heads"]
    spec = lj.LoraSpec.from_hf_config(config, num_slots=1)
    assert spec.target("self_attn.qkv_proj").slices == (128, 128, 128)
    assert spec.target("self_attn.o_proj").d_in == 128


def test_one_target_a_module():
    spec = lj.LoraSpec.from_hf_config(LLAMA, num_slots=4, merged=False)
    assert [t.name for t in spec.targets] == [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    assert spec.module_slices["mlp.up_proj"] == (spec.target("mlp.up_proj"), 0)


def test_chosen_targets():
    spec = lj.LoraSpec.from_hf_config(LLAMA, num_slots=1, targets=("q_proj", "mlp.down_proj"))
    assert [t.name for t in spec.targets] == ["self_attn.qkv_proj", "mlp.down_proj"]
    assert [name for name, _ in spec.fused] == ["self_attn.qkv_proj"]
    split = lj.LoraSpec.from_hf_config(LLAMA, num_slots=1, targets=("q_proj",), merged=False)
    assert [t.name for t in split.targets] == ["self_attn.q_proj"]
    assert split.fused == ()


def test_config_from_folder_file_and_object(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "float16"}))

    class Config:
        def to_dict(self):
            return LLAMA | {"dtype": "float16"}

    for config in (tmp_path, str(tmp_path), tmp_path / "config.json", Config()):
        spec = lj.LoraSpec.from_hf_config(config, num_slots=2)
        assert spec.dtype == np.float16
        assert spec.num_layers == 3


def test_memory_is_that_of_the_arrays():
    for merged in (True, False):
        spec = lj.LoraSpec.from_hf_config(LLAMA, num_slots=5, slot_rank=8, merged=merged)
        leaves = jax.tree.leaves(abstract_state(spec))
        assert spec.total_bytes == sum(a.size * a.dtype.itemsize for a in leaves)
        assert spec.adapter_bytes(17) == 3 * spec.bytes_per_slot
        assert spec.bytes_per_slot * 5 == spec.total_bytes
    text = str(spec)
    assert "5 slots of rank 8" in text
    assert "a slot" in text
    assert "adapter, rank 64" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slot_rank": 12}, ["multiple of 8", "12"]),
        ({"slot_rank": 0}, ["multiple of 8"]),
        ({"num_slots": 0}, ["at least one", "0 slots"]),
        ({"targets": ("router",)}, ["router", "q_proj"]),
    ],
)
def test_refused_specs(change, words):
    with pytest.raises(lj.SpecError) as error:
        lj.LoraSpec.from_hf_config(LLAMA, **({"num_slots": 2} | change))
    assert all(w in str(error.value) for w in words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA | {"model_type": "mamba"}, ["mamba", "llama", "Target"]),
        ({"model_type": "llama"}, ["hidden_size"]),
        (LLAMA | {"model_type": "qwen3"}, ["head_dim"]),
        ("no/such/folder", ["no/such/folder", "config.json"]),
        (3, ["int"]),
    ],
)
def test_refused_configs(config, words):
    with pytest.raises(lj.SpecError) as error:
        lj.LoraSpec.from_hf_config(config, num_slots=2)
    assert all(w in str(error.value) for w in words)


def test_refused_targets():
    with pytest.raises(lj.SpecError, match="one module for each slice"):
        lj.Target("qkv", 8, (8, 8), ("q",))
    with pytest.raises(lj.SpecError, match="positive"):
        lj.Target("up", 0, 8)
    up = lj.Target("up", 8, 8)
    with pytest.raises(lj.SpecError, match="twice"):
        lj.LoraSpec((up, up), num_layers=1, num_slots=1)
    with pytest.raises(lj.SpecError, match="gate_up"):
        lj.LoraSpec((up,), num_layers=1, num_slots=1, fused=(("gate_up", ("gate", "up")),))


def test_a_spec_is_hashable_and_comparable():
    make = lambda: lj.LoraSpec.from_hf_config(LLAMA, num_slots=4)
    assert make() == make()
    assert hash(make()) == hash(make())
