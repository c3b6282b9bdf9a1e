"""PEFT's matching rules: by hand, and against PEFT's own functions."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorajax.adapters.matching import Pattern, Selection
from lorajax.adapters.names import below_layer, locate

Q0 = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("selection", "path", "hit"),
    [
        (Selection(("q_proj",)), Q0, True),
        (Selection(("q_proj",)), "q_proj", True),
        (Selection(("_proj",)), Q0, False),
        (Selection(("self_attn.q_proj",)), Q0, True),
        (Selection(("0.self_attn.q_proj",)), Q0, True),
        (Selection(("0.self_attn.q_proj",)), "model.layers.10.self_attn.q_proj", False),
        (Selection((Q0,)), Q0, True),
        (Selection((".*q_proj",)), Q0, False),
        (Selection(".*q_proj"), Q0, True),
        (Selection("q_proj"), Q0, False),
        (Selection(r"model\.layers"), Q0, False),
        (Selection("all-linear"), Q0, True),
        (Selection("All-Linear"), "lm_head", False),
        (Selection(None), Q0, True),
        (Selection(()), Q0, False),
        (Selection(("q_proj",), exclude=("q_proj",)), Q0, False),
        (Selection(("q_proj",), exclude=("0.self_attn.q_proj",)), Q0, False),
        (Selection(("q_proj",), exclude=r".*layers\.1.*"), Q0, True),
        (Selection("all-linear", exclude=r".*layers\.0.*"), Q0, False),
        (Selection(("q_proj",), layers=(0,)), Q0, True),
        (Selection(("q_proj",), layers=(1,)), Q0, False),
        (Selection((Q0,), layers=(1,)), Q0, True),
        (Selection(("up_proj",), layers=(1,)), "model.layers.1.mlp.experts.0.up_proj", True),
        (Selection(("up_proj",), layers=(0,)), "model.layers.1.mlp.experts.0.up_proj", False),
        (Selection(("q_proj",), layers=(0,), layers_pattern=("layers",)), Q0, True),
        (Selection(("q_proj",), layers=(0,), layers_pattern=("h", "layers")), Q0, True),
        (Selection(("q_proj",), layers=(0,), layers_pattern=("h",)), Q0, False),
        (Selection(("q_proj",), layers=(0,)), "layers.0.q_proj", False),
        (Selection(("q_proj",), layers=(0,), layers_pattern=("layers",)), "layers.0.q_proj", True),
    ],
)
def test_selection(selection, path, hit):
    assert (path in selection) is hit


@pytest.mark.parametrize(
    ("items", "value"),
    [
        ((), 8),
        ((("q_proj", 2),), 2),
        ((("^q_proj", 2),), 8),
        ((("proj", 2),), 8),
        ((("self_attn.q_proj", 2), ("q_proj", 3)), 2),
        ((("k_proj", 2), ("q_proj|k_proj", 3)), 3),
        (((r"^model\.layers\.0\..*", 2),), 2),
        (((r"layers.[1-9].self_attn.q_proj", 2),), 8),
        (((Q0, 2),), 2),
        ((("base_model.model." + Q0, 2),), 8),
    ],
)
def test_pattern(items, value):
    pattern = Pattern(items)
    assert pattern.get(Q0, 8) == value
    assert (len(pattern.unmatched([Q0])) < len(items)) is (value != 8)


@pytest.mark.parametrize(
    ("path", "layers", "found"),
    [
        (Q0, "model.layers", (0, "self_attn.q_proj")),
        ("model.layers.12.mlp.experts.3.up_proj", "model.layers", (12, "mlp.experts.3.up_proj")),
        ("decoder.block.1.layer.0.q", "decoder.block", (1, "layer.0.q")),
        ("encoder.block.1.layer.0.q", "decoder.block", None),
        ("vision_tower.encoder.layers.0.fc1", "model.layers", None),
        ("model.vision_model.layers.0.fc1", "model.layers", None),
        ("model.language_model.layers.0.fc1", "model.layers", (0, "fc1")),
        ("language_model.model.layers.0.fc1", "model.language_model.layers", (0, "fc1")),
        ("layers.0.fc1", "gpt_neox.layers", (0, "fc1")),
        ("gpt_neox.layers.0.fc1", "layers", None),
        ("model.0.fc1", "model.layers", None),
        ("lm_head", "model.layers", None),
        ("model.layers.0", "model.layers", None),
    ],
)
def test_locate(path, layers, found):
    at = locate(path, layers)
    assert (None if at is None else (at.layer, at.module)) == found


def test_below_layer():
    assert below_layer(Q0) == "self_attn.q_proj"
    assert below_layer("decoder.block.1.layer.0.q") == "layer.0.q"
    assert below_layer("lm_head") == "lm_head"


words = st.sampled_from(["model", "layers", "h", "experts", "mlp", "attn", "q_proj", "k_proj", "q"])
segments = st.one_of(words, st.integers(0, 12).map(str))
paths = st.lists(segments, min_size=1, max_size=7).map(".".join)
entries = st.lists(segments, min_size=1, max_size=3).map(".".join)
regexes = st.lists(
    st.one_of(
        words, st.sampled_from([".*", r"\.", r"\d+", "(q|k)_proj", "^", "$", r"\b", "[^.]*"])
    ),
    min_size=1,
    max_size=5,
).map("".join)
names = st.one_of(regexes, st.lists(entries, max_size=3).map(tuple))


@pytest.mark.oracle
@given(data=st.data())
def test_selection_is_pefts(data):
    peft = pytest.importorskip("peft.tuners.tuners_utils", exc_type=ImportError)
    targets, exclude = data.draw(names), data.draw(st.one_of(st.just(()), names))
    layers = None
    if not isinstance(targets, str):
        layers = data.draw(st.none() | st.lists(st.integers(0, 12), min_size=1).map(tuple))
    pattern = data.draw(st.lists(st.sampled_from(["layers", "h", "lay.*"]), max_size=2).map(tuple))
    path = data.draw(paths)
    theirs = peft.check_target_module_exists(
        SimpleNamespace(
            target_modules=targets if isinstance(targets, str) else set(targets),
            exclude_modules=exclude if isinstance(exclude, str) else set(exclude),
            modules_to_save=None,
            target_parameters=None,
            layers_to_transform=list(layers) if layers else None,
            layers_pattern=list(pattern) or None,
        ),
        path,
    )
    assert (path in Selection(targets, exclude, layers, pattern)) is bool(theirs)


@pytest.mark.oracle
@given(keys=st.lists(regexes, unique=True, max_size=4), path=paths)
def test_pattern_is_pefts(keys, path):
    peft = pytest.importorskip("peft.utils.other", exc_type=ImportError)
    values = {key: i for i, key in enumerate(keys)}
    theirs = values.get(peft.get_pattern_key(values.keys(), path), 99)
    assert Pattern(tuple(values.items())).get(path, 99) == theirs
