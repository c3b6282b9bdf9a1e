"""Checkpoints: single file, shards, element types, and every tensor used or named."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lorajax import ModelError, models
from tests import hf

CONFIG = hf.BASES["llama2"]
TENSORS = hf.base_tensors(CONFIG)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def same(a: models.Decoder, b: models.Decoder) -> bool:
    leaves = [jax.tree.leaves(models.decoder.nnx.state(m)) for m in (a, b)]
    return len(leaves[0]) == len(leaves[1]) and all(
        x.dtype == y.dtype and (np.asarray(x) == np.asarray(y)).all()
        for x, y in zip(*leaves, strict=True)
    )


def from_memory(tensors=TENSORS, config=CONFIG, **options):
    return models.from_tensors(models.ModelConfig.from_hf(config), tensors, **options)


def test_products_are_merged_and_transposed():
    layer = from_memory().layers[1]
    parts = [TENSORS[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    np.testing.assert_array_equal(layer.qkv_proj.weight[...], np.concatenate(parts).T)
    down = TENSORS["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(layer.down_proj.weight[...], down.T)


@pytest.mark.parametrize("shards", [1, 3])
def test_files_equal_memory(tmp_path, shards):
    hf.write_base(tmp_path, CONFIG, TENSORS, shards=shards)
    assert same(models.load_model(tmp_path), from_memory())
    assert same(models.load_model(str(tmp_path), dtype="bfloat16"), from_memory(dtype="bfloat16"))


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_stored_types(tmp_path, stored):
    tensors = {k: v.astype(stored) for k, v in TENSORS.items()}
    config = {**CONFIG, "torch_dtype": np.dtype(stored).name}
    hf.write_base(tmp_path, config, tensors)
    model = models.load_model(tmp_path)
    assert model.embed[...].dtype == stored
    assert same(model, from_memory(tensors, config))
    wide = {k: v.astype(np.float32) for k, v in tensors.items()}
    assert same(models.load_model(tmp_path, dtype="float32"), from_memory(wide))


def test_harmless_extras():
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32)}
    assert same(from_memory({**TENSORS, **inv_freq}), from_memory())
    tied = hf.BASES["llama3"]
    tensors = hf.base_tensors(tied)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    assert same(from_memory({**tensors, **head}, tied), from_memory(tensors, tied))
    with pytest.raises(ModelError, match=r"lm_head\.weight.*tie_word_embeddings"):
        from_memory({**tensors, "lm_head.weight": head["lm_head.weight"] + 1}, tied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({Q_PROJ: None}, r"none named \['model.layers.1.self_attn.q_proj.weight'\]"),
        ({"lm_head.weight": None}, "lm_head.weight"),
        ({"score.weight": np.ones((2, 48), np.float32)}, r"score\.weight"),
        ({Q_PROJ.replace("weight", "bias"): np.ones(48, np.float32)}, r"q_proj\.bias"),
        ({Q_PROJ: np.ones((48, 47), np.float32)}, r"q_proj.*\[48, 48\].*\[48, 47\]"),
        ({Q_PROJ: np.ones((48, 48), np.int8)}, r"q_proj.*int8"),
        ({"model.norm.weight": np.ones((1, 48), np.float32)}, r"model\.norm.*\[48\].*\[1, 48\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message):
    tensors = {k: v for k, v in {**TENSORS, **change}.items() if v is not None}
    with pytest.raises(ModelError, match=message):
        from_memory(tensors)


def test_float16_overflow_is_named():
    tensors = {**TENSORS, Q_PROJ: np.full((48, 48), 1e5, np.float32)}
    with pytest.raises(ModelError, match=r"q_proj.*65504"):
        from_memory(tensors, dtype="float16")
    with pytest.raises(ModelError, match="int8"):
        from_memory(dtype="int8")


def test_broken_folders(tmp_path):
    with pytest.raises(ModelError, match="must be a folder"):
        models.load_model(tmp_path / "none")
    hf.write_base(tmp_path, CONFIG, TENSORS)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    with pytest.raises(ModelError, match=r"readable safetensors.*model\.safetensors"):
        models.load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="weight_map"):
        models.load_model(tmp_path)


def test_broken_shards(tmp_path):
    hf.write_base(tmp_path, CONFIG, TENSORS, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    second = "model-00002-of-00002.safetensors"

    def write(**changes):
        path.write_text(json.dumps({"weight_map": {**index["weight_map"], **changes}}))

    write(**{Q_PROJ: "../model.safetensors"})
    with pytest.raises(ModelError, match=r"model's folder.*\.\./model"):
        models.load_model(tmp_path)
    home = index["weight_map"][Q_PROJ]
    write(**{Q_PROJ: ({second, "model-00001-of-00002.safetensors"} - {home}).pop()})
    with pytest.raises(ModelError, match=f"no {Q_PROJ} in"):
        models.load_model(tmp_path)
    write()
    names = [n for n, f in index["weight_map"].items() if f == second]
    extra = {"adapter.extra": np.ones(2, np.float32)}
    save_file({**{n: TENSORS[n] for n in names}, **extra}, tmp_path / second)
    with pytest.raises(ModelError, match=r"adapter\.extra"):
        models.load_model(tmp_path)
    (tmp_path / second).unlink()
    with pytest.raises(ModelError, match=second):
        models.load_model(tmp_path)
