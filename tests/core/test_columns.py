import numpy as np
import pytest

import lorajax as lj
from lorajax.columns import Columns


def written_out(widths, heads, shards):
    """For each shard and slice, the columns it must hold, head by head."""
    columns, units = [], heads or widths
    for i in range(shards):
        for g, (width, count) in enumerate(zip(widths, units, strict=True)):
            size, start = width // count, sum(widths[:g])
            held = [h for h in range(count) if h * shards // count == i]
            if count < shards:  # head h is on the shards from h * shards / count on
                held = [max(h for h in range(count) if h * shards // count <= i)]
            columns += [start + h * size + c for h in held for c in range(size)]
    return columns


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("widths", "heads"),
    [
        ((64, 8, 8), (8, 1, 1)),
        ((64, 16, 16), (8, 2, 2)),
        ((64, 32, 32), (8, 4, 4)),
        ((64, 64, 64), (8, 8, 8)),
        ((24, 24), ()),
        ((8,), ()),
    ],
)
def test_each_shard_holds_its_share_of_every_slice(widths, heads, shards):
    columns = Columns(widths, heads, shards)
    want = written_out(widths, heads, shards)
    np.testing.assert_array_equal(columns.order(), want)
    assert columns.width == len(want) == shards * sum(columns.local)
    array = np.arange(3 * sum(widths)).reshape(3, -1)
    np.testing.assert_array_equal(columns.take(array), array[:, want])
    np.testing.assert_array_equal(columns.take(array, slice(2, 5)), array[:, want[2:5]])


def test_query_heads_lie_with_the_key_heads_that_they_attend_to():
    heads, kv_heads, shards = 16, 4, 8
    columns = Columns((heads, kv_heads), (heads, kv_heads), shards)  # heads of one column
    for shard in np.split(columns.order(), shards):
        q, k = np.split(shard, [columns.local[0]])
        assert set(q * kv_heads // heads) == set(k - heads)


@pytest.mark.parametrize(
    ("widths", "heads", "shards"),
    [((20,), (), 8), ((4,), (), 8), ((24, 24), (3, 3), 2), ((48, 8), (12, 3), 4)],
)
def test_refusals(widths, heads, shards):
    with pytest.raises(lj.SpecError, match=rf"{shards} shards.*got \d+ (heads|columns)"):
        Columns(widths, heads, shards)


@pytest.mark.parametrize("merged", [True, False])
def test_heads_of_a_model(merged):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }
    spec = lj.LoraSpec.from_hf_config(config, num_slots=1, merged=merged)
    heads = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), ())
    for target in spec.targets:
        for module, count in zip(target.modules, target.heads, strict=bool(target.heads)):
            heads[module.split(".")[1]] = count
    assert heads == {"q_proj": 8, "k_proj": 2, "v_proj": 2, "o_proj": 8}


def test_heads_of_a_target():
    with pytest.raises(lj.SpecError, match=r"heads.*qkv"):
        lj.Target("qkv", 16, (16, 8, 8), ("q", "k", "v"), heads=(4, 2))
    with pytest.raises(lj.SpecError, match=r"heads.*\(3,\).*o"):
        lj.Target("o", 16, 8, parallel="row", heads=(3,))
    assert lj.Target("o", 16, 8, parallel="row", heads=(4,)).heads == (4,)
