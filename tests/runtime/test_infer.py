"""Specs inferred from adapters on disk, and the manager on real files."""

import json

import numpy as np
import pytest
import safetensors.numpy

import lorajax as lj
from lorajax.runtime import AdapterManager, infer_spec

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "torch_dtype": "float32",
}
WIDTHS = {"self_attn.qkv_proj": 48, "mlp.up_proj": 24}


def config(rank: int, modules=("q_proj",)) -> dict:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(modules)}


def tensors(rank: int, modules=("self_attn.q_proj",), seed: int = 0) -> dict:
    rng, made = np.random.default_rng(seed), {}
    for layer in range(2):
        for module in modules:
            key = f"base_model.model.model.layers.{layer}.{module}"
            shape = (WIDTHS.get(module, 16), rank)
            made[f"{key}.lora_A.weight"] = rng.normal(size=(rank, 16)).astype(np.float32)
            made[f"{key}.lora_B.weight"] = rng.normal(size=shape).astype(np.float32)
    return made


def write(folder, rank: int, modules=("self_attn.q_proj",), seed: int = 0):
    folder.mkdir(exist_ok=True)
    short = [m.split(".")[-1] for m in modules]
    (folder / "adapter_config.json").write_text(json.dumps(config(rank, short)))
    path = folder / "adapter_model.safetensors"
    safetensors.numpy.save_file(tensors(rank, modules, seed), path)
    return folder


@pytest.fixture
def folders(tmp_path):
    return [
        write(tmp_path / "q", 4),
        write(tmp_path / "ov", 20, ("self_attn.o_proj", "self_attn.v_proj")),
    ]


def test_the_union_of_modules_is_served(folders):
    split = infer_spec(CONFIG, folders, num_slots=2, merged=False)
    assert [t.name for t in split.targets] == [
        "self_attn.q_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
    ]
    assert (split.slot_rank, split.dtype) == (16, np.float32)
    merged = infer_spec(CONFIG, folders, num_slots=4, slot_rank=8, dtype="bfloat16")
    assert [t.name for t in merged.targets] == ["self_attn.qkv_proj", "self_attn.o_proj"]
    assert [name for name, _ in merged.fused] == ["self_attn.qkv_proj"]
    for spec in (split, merged):
        manager = AdapterManager(spec, {p.name: p for p in folders})
        for name in ("q", "ov"):
            with manager.lease([name]):
                _ = manager.state


def test_a_fused_module_is_all_its_parts(tmp_path):
    fused = write(tmp_path / "fused", 4, ("self_attn.qkv_proj",))
    spec = infer_spec(CONFIG, [fused], num_slots=1, merged=False)
    assert [t.name.split(".")[1] for t in spec.targets] == ["q_proj", "k_proj", "v_proj"]


def test_explicit_targets_must_cover_the_adapters(folders):
    wide = infer_spec(
        CONFIG, folders, num_slots=2, targets=["q_proj", "v_proj", "o_proj", "up_proj"]
    )
    assert "mlp.up_proj" in wide.module_slices
    with pytest.raises(lj.SpecError, match=r"got \['self_attn.o_proj'\] in 'ov'"):
        infer_spec(CONFIG, folders, num_slots=2, targets=["q_proj", "v_proj"], merged=False)
    assert infer_spec(
        CONFIG, num_slots=2, targets=["q_proj"], merged=False
    ).module_slices.keys() == {"self_attn.q_proj"}
    with pytest.raises(lj.SpecError, match="got neither"):
        infer_spec(CONFIG, num_slots=2)


def test_ranks_must_fit(folders):
    with pytest.raises(lj.SpecError, match="1 slots of rank 16 for rank 20; use at least 2"):
        infer_spec(CONFIG, folders, num_slots=1)
    with pytest.raises(lj.SpecError, match="max_rank=16; got 20 in 'ov'"):
        infer_spec(CONFIG, folders, num_slots=2, max_rank=16)
    with pytest.raises(lj.SpecError, match="rank 64; use at least 4"):
        infer_spec(CONFIG, folders, num_slots=2, max_rank=64)


def test_the_manager_reads_real_files(folders, tmp_path):
    spec = infer_spec(CONFIG, folders, num_slots=3, slot_rank=16)
    manager = AdapterManager(spec, {"q": str(folders[0])})
    manager.load("ov", folders[1])
    manager.load("memory", config=config(4), tensors=tensors(4))
    assert manager.cache_key("memory") == manager.cache_key("q")  # equal content
    manager.load("memory", config=config(4), tensors=tensors(4))
    with pytest.raises(lj.AdapterError, match="'memory' again"):
        manager.load("memory", config=config(4), tensors=tensors(4, seed=1))
    with manager.lease(["q"]) as old:
        write(folders[0], 4, seed=1)
        manager.reload("q")
        assert manager.cache_key("q") != old.cache_keys[0]
        manager.reload("memory", config=config(4), tensors=tensors(4, seed=1))
        assert manager.cache_key("memory") == manager.cache_key("q")

    before = manager.registered, manager.resident
    with pytest.raises(lj.AdapterError, match="'none'"):
        manager.load("none", tmp_path / "none")
    wide = write(tmp_path / "mlp", 4, ("mlp.up_proj",))
    with pytest.raises(lj.AdapterError, match="up_proj"):
        manager.load("mlp", wide)
    (folders[0] / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(lj.AdapterError, match="'q'"):
        manager.reload("q")
    with pytest.raises(lj.AdapterError, match=r"'huge'.*at most 48.*rank 49"):
        manager.load("huge", write(tmp_path / "huge", 49))
    assert (manager.registered, manager.resident) == before
    with manager.lease(["q", "memory"]):
        _ = manager.state
