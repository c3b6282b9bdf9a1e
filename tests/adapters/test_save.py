"""Writing PEFT folders: the content survives, and nothing is half written."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

from lorajax import AdapterError
from lorajax.adapters import adapter_from_tensors, load_adapter, save_adapter
from tests.adapters.support import BF16, config, spec, tensors


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, BF16], ids=str)
@pytest.mark.parametrize("prefix", ["base_model.model.model.layers", "model.layers"])
def test_round_trip(tmp_path, dtype, prefix):
    made = tensors(dtype=dtype, prefix=prefix)
    raw = config(target_modules={"q_proj", "k_proj", "v_proj", "o_proj"}, lora_alpha=3.5)
    made = {k: v for k, v in made.items() if "self_attn" in k}
    before = adapter_from_tensors(raw, made, spec(), name="x")
    folder = save_adapter(tmp_path / "deep" / "sql", raw, made)
    after = load_adapter(folder, spec())
    assert after.digest == before.digest
    assert after.modules == before.modules
    for name, packed in before.arrays.items():
        for key in ("A", "B", "scale"):
            np.testing.assert_array_equal(
                getattr(after.arrays[name], key), getattr(packed, key), strict=True
            )
    assert sorted(p.name for p in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    with safetensors.safe_open(folder / "adapter_model.safetensors", "np") as file:
        assert all(k.startswith("base_model.model.model.layers.") for k in file.keys())  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}


def test_jax_arrays_views_and_no_peft_type(tmp_path):
    made = tensors()
    views = {k: np.asfortranarray(v) for k, v in made.items()}
    folder = save_adapter(tmp_path / "a", config(peft_type=...), views)
    arrays = {k: jnp.asarray(v) for k, v in made.items()}
    other = save_adapter(str(tmp_path / "b"), config(), arrays)
    assert load_adapter(folder, spec()).digest == load_adapter(other, spec()).digest
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"


@pytest.mark.parametrize(
    ("raw", "made"),
    [
        (config(use_dora=True), tensors()),
        (config(r=8), tensors()),
        (config(), {**tensors(), "base_model.model.lm_head.weight": np.ones((9, 32))}),
        (config(extra=set()) | {"peft_type": "OFT"}, tensors()),
    ],
)
def test_what_cannot_be_loaded_is_not_written(tmp_path, raw, made):
    with pytest.raises(AdapterError):
        save_adapter(tmp_path / "a", raw, made)
    assert not list(tmp_path.iterdir())


def test_a_taken_path_is_left_alone(tmp_path):
    (tmp_path / "empty").mkdir()
    save_adapter(tmp_path / "empty", config(), tensors())
    (tmp_path / "file").write_text("x")
    for taken in ("empty", "file"):
        with pytest.raises(AdapterError, match="taken"):
            save_adapter(tmp_path / taken, config(lora_alpha=1), tensors())
    assert (tmp_path / "file").read_text() == "x"
    assert load_adapter(tmp_path / "empty", spec()).config["lora_alpha"] == 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file"]


def test_a_config_that_is_no_json_leaves_nothing(tmp_path):
    with pytest.raises(TypeError, match="no JSON value"):
        save_adapter(tmp_path / "a", config(revision=object()), tensors())
    assert not list(tmp_path.iterdir())
