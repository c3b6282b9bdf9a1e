"""Files with LoRA on the embedding and the output head: what PEFT writes, and what is refused."""

import json

import numpy as np
import pytest
import safetensors

from lorajax import AdapterError, LoraSpec
from lorajax.adapters import adapter_from_tensors, explain, load_adapter, save_adapter
from lorajax.runtime import infer_spec
from tests import hf
from tests.adapters.support import packed_delta

FAMILY = "llama3"  # tied, hidden 64, vocabulary 96
CONFIG = hf.BASES[FAMILY]
TARGETS = (*hf.LINEAR, "embed_tokens", "lm_head")
A, B = (f"base_model.model.model.embed_tokens.lora_embedding_{f}" for f in "AB")
HEAD = "base_model.model.lm_head.lora_B.weight"
COPY = "base_model.model.{}.base_layer.weight"


def spec(base=CONFIG, targets=TARGETS, **changes):
    made = LoraSpec.from_hf_config(base, num_slots=8, targets=targets, dtype="float32")
    return LoraSpec(**{**vars(made), **changes})


def build(form, tensors=None, *, of=None, **changes):
    tensors = hf.adapter_tensors(form, CONFIG) if tensors is None else tensors
    raw = {**hf.adapter_config(form), **changes}
    return adapter_from_tensors(raw, tensors, spec() if of is None else of, name="one")


def refused(form, tensors=None, **changes):
    with pytest.raises(AdapterError) as error:
        build(form, tensors, **changes)
    return str(error.value)


@pytest.mark.parametrize("form", hf.VOCABULARY)
@pytest.mark.parametrize("of", [spec(), spec(stack_layers=True)], ids=["layers", "stacked"])
def test_every_factor_is_packed(form, of):
    adapter, want = build(form, of=of), hf.dense_deltas(form, CONFIG)
    assert set(adapter.modules) == set(want)
    for path in of.outside:
        got = packed_delta(adapter, of.target(path), 0)
        delta = want.get(path, np.zeros((96, 64)))
        delta = delta.T if path == hf.HEAD else delta
        np.testing.assert_allclose(got, delta, rtol=0, atol=1e-6)
    if form == "vocabulary":
        assert {adapter.modules[m][0] for m in (hf.EMBEDDING, hf.HEAD)} == {4, 20}
        assert adapter.modules[hf.HEAD][1] == 30 / 20
        assert adapter.num_slots == 2


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.replace("base_model.model.", "base_model.model.language_model."),
        lambda key: key.replace("lora_embedding_A", "lora_embedding_A.sql").replace(
            "lora_B.weight", "lora_B.sql.weight"
        ),
    ],
)
def test_names_of_one_content(rename):
    tensors = hf.adapter_tensors("vocabulary", CONFIG)
    renamed = {rename(key): value for key, value in tensors.items()}
    one, two = (
        build("vocabulary", target_modules=None),
        build(
            "vocabulary",
            renamed,
            target_modules=None,
            rank_pattern={"embed_tokens": 4, "lm_head": 20},
        ),
    )
    for name, packed in one.arrays.items():
        np.testing.assert_array_equal(packed.A, two.arrays[name].A)
        np.testing.assert_array_equal(packed.B, two.arrays[name].B)


def test_written_and_read_again(tmp_path):
    raw, tensors = hf.adapter_config("vocabulary"), hf.adapter_tensors("vocabulary", CONFIG)
    bare = {key.removeprefix("base_model.model."): value for key, value in tensors.items()}
    folder = save_adapter(tmp_path / "a", raw, bare)
    with safetensors.safe_open(folder / "adapter_model.safetensors", "np") as file:
        assert set(file.keys()) == set(tensors)
    assert load_adapter(folder, spec()).digest == build("vocabulary").digest
    assert explain(folder, spec()).problems == ()
    assert {"lm_head", "model.embed_tokens"} < set(explain(folder).module_names)
    inferred = infer_spec(CONFIG, [folder], num_slots=4)
    assert inferred.outside == (hf.EMBEDDING, hf.HEAD)


@pytest.mark.parametrize("form", ["embedding", "head"])
def test_the_smallest_spec_of_an_adapter_outside_of_the_layers(tmp_path, form):
    inferred = infer_spec(CONFIG, [hf.write_adapter(tmp_path / "a", form, CONFIG)], num_slots=2)
    (target,) = inferred.targets
    assert target.parallel == form


@pytest.mark.parametrize("form", ["embedding", "head"])
def test_a_spec_without_the_target_says_what_to_do(form):
    text = refused(form, of=spec(targets=hf.LINEAR))
    assert "among the targets of the spec" in text
    assert (A if form == "embedding" else "lm_head.lora_A.weight") in text


def resized(tensors, rows):
    grown = dict(tensors)
    for key in (A, HEAD):
        axis = 1 if key == A else 0
        wide = [(0, 0), (0, 0)]
        wide[axis] = (0, rows - grown[key].shape[axis])
        grown[key] = np.pad(grown[key], wide)
    return grown


def test_another_vocabulary_is_refused_by_tensor_and_shape():
    text = refused("vocabulary", resized(hf.adapter_tensors("vocabulary", CONFIG), 100))
    for words in (A, "[4, 100]", HEAD, "[100, 20]", "= 96, the base model's vocabulary"):
        assert words in text


def swapped(tensors):
    """The embedding's factors under the names of a linear module."""
    other = {A: A.replace("embedding_A", "A.weight"), B: B.replace("embedding_B", "B.weight")}
    return {other.get(key, key): value for key, value in tensors.items()}


def test_factors_of_the_wrong_kind():
    tensors = hf.adapter_tensors("embedding", CONFIG)
    assert "lora_embedding_A" in refused("embedding", swapped(tensors))
    assert "once" in refused("embedding", {**tensors, **swapped(tensors)})
    half = {A: tensors[A], **{k: v for k, v in swapped(tensors).items() if "lora_B" in k}}
    assert "both lora_A and lora_B" in refused("embedding", half)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_modules": "all-linear"}, "PEFT would ignore"),
        ({"exclude_modules": ["embed_tokens"]}, "PEFT would ignore"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"use_dora": True}, "use_dora"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"embed_tokens": 5}}, "rank 4, for r=5"),
    ],
)
def test_refused_configs(changes, words):
    assert words in refused("vocabulary", **changes)


def with_copies(dtype=np.float32, change=0.0):
    """The form as PEFT saves it: with the base's weights, which in a tied base are one."""
    weight = hf.base_tensors(CONFIG)["model.embed_tokens.weight"].astype(dtype)
    copies = {COPY.format(m): weight + dtype(change) for m in ("model.embed_tokens", "lm_head")}
    return {**hf.adapter_tensors("vocabulary", CONFIG), **copies}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return hf.write_base(tmp_path_factory.mktemp("base"), CONFIG, hf.base_tensors(CONFIG))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_copies_of_the_base_that_are_equal_change_nothing(base, dtype):
    adapter = build("vocabulary", with_copies(dtype), of=spec(base))
    assert adapter.digest == build("vocabulary").digest
    shards = hf.base_tensors(CONFIG)
    assert set(adapter.modules).isdisjoint(shards)


def test_copies_that_are_not_the_base(base, tmp_path):
    with pytest.raises(AdapterError, match="must equal") as error:
        build("vocabulary", with_copies(change=0.5), of=spec(base))
    for name in ("lm_head", "model.embed_tokens"):
        assert COPY.format(name) in str(error.value)
    assert "float32[96, 64] (base: [96, 64])" in str(error.value)
    with pytest.raises(AdapterError, match="build the spec from the folder of the base"):
        build("vocabulary", with_copies())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(AdapterError, match="cannot be read"):
        build("vocabulary", with_copies(), of=spec(tmp_path))
    other = {k: v for k, v in with_copies().items() if "embed_tokens.lora" not in k}
    with pytest.raises(AdapterError, match=r"full weight.*embed_tokens\.base_layer"):
        build("vocabulary", other, of=spec(base))
