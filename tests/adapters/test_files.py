"""Folders and files: damaged, missing, leading elsewhere. One error type, nothing downloaded."""

import json
import os
import struct

import numpy as np
import pytest
import safetensors.numpy

from lorajax import AdapterError
from lorajax.adapters import explain, load_adapter, read_peft
from lorajax.adapters.source import local_folder
from tests.adapters.support import ALL, config, spec, tensors, write


def refused(folder, **kwargs) -> str:
    with pytest.raises(AdapterError) as caught:
        load_adapter(folder, spec(), **kwargs)
    text = str(caught.value)
    assert text.startswith("adapter '")
    assert text.count(";") >= 2
    told = explain(folder, spec(), **kwargs)
    assert told.problems, "inspect tells it too"
    return text


def bytes_of(made) -> bytes:
    return safetensors.numpy.save(made)


def header(entries, size=0) -> bytes:
    return text_header(json.dumps(entries)) + bytes(size)


def text_header(text) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


NAME = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["at least 8 bytes", "got 0 bytes"]),
        (b"\0\0", ["at least 8 bytes", "got 2 bytes"]),
        (b"version https://git-lfs.github.com/spec/v1\n", ["at most 100000000"]),
        (struct.pack("<Q", 10**15) + b"{}", ["header of at most", str(10**15)]),
        (struct.pack("<Q", 500) + b"{}", ["at least 508 bytes", "got 10 bytes"]),
        (struct.pack("<Q", 2) + b"x}", ["readable safetensors"]),
        (struct.pack("<Q", 2) + b"[]", ["header of tensors"]),
        (struct.pack("<Q", 4) + b"\xff\xfe\xff\xff", ["readable safetensors"]),
        (header({NAME: {"dtype": "F32", "shape": [4, 8]}}), ["data_offsets"]),
        (
            header({NAME: {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}}, 100),
            ["as its header says"],
        ),
        (
            header({NAME: {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 64]}}, 64),
            ["64 bytes for float32[4, 8]"],
        ),
        (
            header({NAME: {"dtype": "F32", "shape": [-4, 8], "data_offsets": [0, -128]}}),
            ["header of tensors"],
        ),
        (
            text_header('{"x": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 1]}}'),
            ["header of tensors"],
        ),
        (
            header({NAME: {"dtype": "F8_E4M3", "shape": [4, 8], "data_offsets": [0, 32]}}, 32),
            ["F8_E4M3[4, 8]", NAME],
        ),
        (
            header({NAME: {"dtype": "I8", "shape": [4, 8], "data_offsets": [0, 32]}}, 32),
            ["I8[4, 8]", NAME],
        ),
    ],
    ids=lambda x: None if isinstance(x, list) else repr(x)[:30],
)
def test_damaged_weights(tmp_path, data, words):
    folder = write(tmp_path / "a", config(), data)
    text = refused(folder)
    for word in words:
        assert word in text
    if "F8" not in words[0] and "I8" not in words[0]:
        assert "adapter_model.safetensors" in text


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_truncated_weights(tmp_path, keep):
    data = bytes_of(tensors())
    cut = data[: int(len(data) * keep)]
    text = refused(write(tmp_path / "a", config(), cut))
    assert f"{len(data)} bytes" in text
    assert f"got {len(cut)} bytes" in text


def test_bytes_after_the_tensors(tmp_path):
    data = bytes_of(tensors())
    text = refused(write(tmp_path / "a", config(), data + b"\0"))
    assert f"got {len(data) + 1} bytes" in text


def test_overlapping_tensors_are_left_to_the_library(tmp_path):
    entry = {"dtype": "F32", "shape": [4, 32], "data_offsets": [0, 512]}
    b = {"dtype": "F32", "shape": [48, 4], "data_offsets": [0, 768]}
    data = header({NAME: entry, NAME.replace("lora_A", "lora_B"): b}, 768)
    assert "readable safetensors file" in refused(write(tmp_path / "a", config(), data))


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"x"', "[" * 100_000])
def test_damaged_config(tmp_path, text):
    assert "adapter_config.json" in refused(write(tmp_path / "a", text, tensors()))


def test_config_in_another_encoding(tmp_path):
    folder = write(tmp_path / "a", config(), tensors())
    (folder / "adapter_config.json").write_bytes(b"\xff\xfe{\x00}\x00")
    assert "adapter_config.json" in refused(folder)


def test_a_config_of_absurd_size(tmp_path):
    folder = write(tmp_path / "a", "{}" + " " * (16 * 2**20), tensors())
    assert "bytes, more than" in refused(folder)


def test_a_layer_index_of_absurd_length(tmp_path):
    made = tensors(layers=[0])
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    for old in list(made):
        if old.startswith(key[:-15]):
            made[old.replace(".0.", f".{'9' * 5000}.")] = made.pop(old)
    text = refused(write(tmp_path / "a", config(layers_to_transform=[0]), made))
    assert len(text) < 5000


def test_names_cannot_forge_lines_of_a_log(tmp_path):
    made = {**tensors(), "x\nERROR all is lost\x1b[2J": np.ones((2, 2), np.float32)}
    text = refused(write(tmp_path / "a", config(), made))
    assert text.isprintable()
    assert "ERROR all is lost" in text


def test_the_name_of_the_current_folder(tmp_path, monkeypatch):
    write(tmp_path / "here", config(), tensors())
    monkeypatch.chdir(tmp_path / "here")
    assert load_adapter(".", spec()).name == "here"


def test_a_file_that_changes_before_its_data_is_read(tmp_path):
    folder = write(tmp_path / "a", config(), tensors())
    found = read_peft(folder)
    write(folder, config(), tensors(r=6))
    with pytest.raises(AdapterError, match="the file changed"):
        found.tensors.read()


def test_missing_files(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    assert "an empty folder" in refused(folder)
    (folder / "adapters.safetensors").write_bytes(b"")
    assert "adapters.safetensors" in refused(folder)
    (folder / "adapter_config.json").write_text(json.dumps(config()))
    assert "must hold adapter_model.safetensors" in refused(folder)
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04")
    text = refused(folder)
    assert "pickle" in text
    assert "safe_serialization" in text


def test_another_method_is_named_before_its_weights_are_asked_for(tmp_path):
    folder = write(tmp_path / "a", {"peft_type": "PROMPT_TUNING"}, None)
    assert "PROMPT_TUNING" in refused(folder)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("https://huggingface.co/x/y", ["local folder"]),
        ("s3://bucket/x", ["local folder"]),
        ("file:///etc", ["local folder"]),
        ("some-org/some-adapter", ["hub id", "nothing is downloaded"]),
        ("no/such/folder/here", ["existing local folder"]),
        ("a\0b", ["local folder"]),
        ("x" * 5000, ["folder"]),
    ],
)
def test_sources_that_are_no_folder(source, words):
    with pytest.raises(AdapterError) as caught:
        load_adapter(source, spec(), name="x")
    for word in words:
        assert word in str(caught.value)


def test_a_file_is_no_folder(tmp_path):
    folder = write(tmp_path / "a", config(), tensors())
    text = refused(folder / "adapter_model.safetensors", name="x")
    assert "existing local folder" in text


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_link_out_of_the_folder(tmp_path, file):
    other = write(tmp_path / "other", config(), tensors())
    folder = write(tmp_path / "a", config(), tensors())
    (folder / file).unlink()
    (folder / file).symlink_to(other / file)
    text = refused(folder)
    assert file in text
    assert "link" in text


def test_links_within_the_folder_and_to_the_folder(tmp_path):
    folder = write(tmp_path / "a", config(), tensors())
    (folder / "adapter_model.safetensors").rename(folder / "real")
    (folder / "adapter_model.safetensors").symlink_to("real")
    (tmp_path / "alias").symlink_to(folder)
    assert load_adapter(tmp_path / "alias", spec()).name == "alias"
    assert load_adapter(str(folder / ".." / "a"), spec()).name == "a"


def test_a_hugging_face_cache_snapshot(tmp_path):
    repo = tmp_path / "models--org--sql"
    (repo / "blobs").mkdir(parents=True)
    snapshot = write(repo / "snapshots" / "0f3a", config(), tensors())
    for file in os.listdir(snapshot):
        (snapshot / file).rename(repo / "blobs" / f"blob-{file}")
        (snapshot / file).symlink_to(f"../../blobs/blob-{file}")
    adapter = load_adapter(snapshot, spec(), name="sql")
    assert adapter.rank == 4
    other = repo / "other" / "0f3a"  # the same links where no cache would put them
    other.mkdir(parents=True)
    for file in os.listdir(snapshot):
        (other / file).symlink_to(f"../../blobs/blob-{file}")
    assert "link" in refused(other, name="sql")
    (snapshot / "adapter_config.json").unlink()
    (tmp_path / "c.json").write_text(json.dumps(config()))
    (snapshot / "adapter_config.json").symlink_to("../../../c.json")
    assert "link" in refused(snapshot, name="sql")


def test_a_root_keeps_requests_inside(tmp_path):
    root = tmp_path / "root"
    inside = write(root / "a", config(), tensors())
    outside = write(tmp_path / "b", config(), tensors())
    (root / "link").symlink_to(outside)
    assert local_folder(root / "x" / ".." / "a", "a", root) == inside.resolve()
    for source in (outside, root / ".." / "b", root / "link"):
        with pytest.raises(AdapterError, match="must lie inside"):
            local_folder(source, "b", root)


def test_read_peft_describes_without_a_spec(tmp_path):
    made = tensors(["self_attn.q_proj", "mlp.down_proj"], r={"self_attn.q_proj": 6})
    raw = config(rank_pattern={"q_proj": 6}, use_rslora=True, lora_alpha=3)
    found = read_peft(write(tmp_path / "a", raw, made))
    assert (found.name, found.rank) == ("a", 6)
    assert found.module_names == ("mlp.down_proj", "self_attn.q_proj")
    module = found.modules["model.layers.1.self_attn.q_proj"]
    assert (module.rank, module.d_in, module.d_out, module.dtype) == (6, 32, 40, "float32")
    assert module.scale == 3 / 6**0.5
    assert found.nbytes == sum(a.nbytes for a in made.values())
    read = found.tensors.read()
    assert set(read) == set(made)
    np.testing.assert_array_equal(read[module.a], made[module.a])


def test_read_peft_refuses_what_no_base_can_serve(tmp_path):
    with pytest.raises(AdapterError, match="use_dora"):
        read_peft(write(tmp_path / "a", config(use_dora=True), tensors()))
    made = {**tensors(), "base_model.model.lm_head.weight": np.ones((9, 32), np.float32)}
    with pytest.raises(AdapterError, match="full weight"):
        read_peft(write(tmp_path / "b", config(), made))


def test_a_file_that_vanishes_before_its_data_is_read(tmp_path):
    folder = write(tmp_path / "a", config(), tensors())
    found = read_peft(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="readable safetensors"):
        found.tensors.read()


def test_explain_tells_all(tmp_path):
    raw = config(target_modules=ALL, alpha_pattern={"^q_proj": 100})
    folder = write(tmp_path / "a", raw, tensors(["self_attn.q_proj"], r=4))
    told = explain(folder, spec())
    assert told.problems == ()
    assert (told.rank, told.num_slots) == (4, 1)
    assert told.device_bytes == spec().adapter_bytes(4)
    assert told.module_names == ("self_attn.q_proj",)
    assert "'^q_proj' matches no module" in told.notes[0]
    assert "model.layers.0.self_attn.k_proj" in told.notes[1]
    assert "and 7 more" in told.notes[1]
    free = explain(folder)
    assert (free.problems, free.num_slots, free.rank) == ((), None, 4)


def test_explain_lists_every_reason(tmp_path):
    made = tensors(layers=[0, 5])
    made["base_model.model.lm_head.weight"] = np.ones((9, 32), np.float32)
    told = explain(write(tmp_path / "a", config(use_dora=True, bias="all"), made), spec())
    text = " ".join(told.problems)
    assert len(told.problems) == 4
    for word in ("use_dora", "bias='all'", "layers.5", "lm_head.weight"):
        assert word in text


def test_explain_finds_values_that_cannot_be_served(tmp_path):
    made = tensors()
    next(iter(made.values()))[0, 0] = np.nan
    told = explain(write(tmp_path / "a", config(), made), spec())
    assert "NaN" in told.problems[0]
