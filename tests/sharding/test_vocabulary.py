"""Slots of the embedding and the head on meshes: cut over the vocabulary, or whole on each."""

import contextlib
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lorajax as lj
from lorajax.sharding import Partition, sharded, state_shardings
from tests.compiles import quick_compiles
from tests.core import test_apply as dense
from tests.core import test_vocabulary as one
from tests.models.support import errors, weights_of
from tests.sharding import test_decoder as decoder
from tests.sharding.support import collectives, compiled_decode, config_of, mesh_of
from tests.sharding.test_ops import ADAPTED, TOKEN_ROW

#: Family, whether its head is the embedding, vocabulary, mesh. 96 divides over all, 99 over none.
CASES = [
    ("qwen2", 96, {"fsdp": 2, "tensor": 4}, AxisType.Auto),
    ("llama3", 99, {"tensor": 8}, AxisType.Auto),
    *(
        pytest.param(*case, marks=pytest.mark.meshes)
        for case in (
            ("llama2", 96, {"tensor": 8}, AxisType.Auto),
            ("llama3", 96, {"data": 2, "tensor": 4}, AxisType.Explicit),
            ("mistral", 99, {"fsdp": 2, "data": 2, "tensor": 2}, AxisType.Explicit),
        )
    ),
]
#: One layer: they are outside of it.
SIZES = {"num_hidden_layers": 1, "targets": ("embed_tokens", "lm_head")}


def life(served, nothing_compiles):
    slots = {"a": [1], "b": [3, 0]}
    weights = weights_of(decoder.MIXES, slots, decoder.SLOTS)
    served.load("embedding", [1])
    served.load("head", [3, 0])
    logits = [served.start(weights), served.step(weights)]
    served.clear([2])
    with nothing_compiles():
        served.clear([3, 0])
        logits.append(served.step(weights))
        served.load("head", [0, 3])
        served.load("embedding", [1])
        logits += [served.step(weights), served.start(weights)]
    return np.stack(logits)


@functools.cache
def on_one_device(family, vocab):
    with quick_compiles():
        return life(decoder.Served(family, 4, vocab_size=vocab, **SIZES), contextlib.nullcontext)


@pytest.mark.parametrize(("family", "vocab", "axes", "axis_type"), CASES)
def test_a_mesh_gives_what_one_device_gives(family, vocab, axes, axis_type, compiles):
    partition = Partition.of(mesh_of(axis_type, **axes))
    served = decoder.Served(family, 4, partition, vocab_size=vocab, **SIZES)
    got, want = life(served, compiles.none), on_one_device(family, vocab)
    assert errors(got, want).max() < 1e-5
    cut = P(None, None, None, None, "tensor" if vocab == 96 else None)
    (embed,), (head,) = (served.shardings[name].parts for name in ("model.embed_tokens", "lm_head"))
    assert (embed.A.spec, head.B.spec) == (cut, P(*cut[1:]))
    assert not any(embed.B.spec)
    assert not any(head.A.spec)
    served.state = None
    plain = [served.start(None), served.step(None)]
    base = decoder.BASE
    for a, b in zip(got, plain, strict=False):
        np.testing.assert_array_equal(a[base].view(np.uint32), b[base].view(np.uint32))
        assert errors(np.delete(a, base, 0), np.delete(b, base, 0)).min() > 1e-3


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 4}, {"fsdp": 2, "tensor": 4}])
def test_collectives_of_a_step_are_the_bases(axes, tied):
    config = config_of("qwen2", 2, num_hidden_layers=1, tie_word_embeddings=tied)
    partition, targets = Partition.of(mesh_of(**axes)), ("q_proj", "o_proj", *SIZES["targets"])
    base, lora = (
        collectives(compiled_decode(config, partition, lora=lora, targets=targets).as_text())
        for lora in (False, True)
    )
    assert base == lora
    assert base["all-reduce"] == 3


MESHES = [
    ({"tensor": 8}, AxisType.Auto),
    ({"data": 2, "tensor": 4}, AxisType.Explicit),
    ({"data": 1, "tensor": 5}, AxisType.Auto),  # does not divide 24
]
IDS = np.array([*one.IDS, 5], np.int32)


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(("axes", "axis_type"), MESHES)
def test_ops_equal_float64(axes, axis_type):
    mesh, spec = mesh_of(axis_type, **axes), one.make_spec()
    spec = lj.LoraSpec(spec.targets[1:], 1, 4, 8, "float32")
    partition, ops, cut = Partition.of(mesh), sharded(mesh), "tensor"
    state = lj.init_state(spec, state_shardings(spec, mesh))
    if state["embed"].shards == 1:
        cut = None
    adapters = [one.vocabulary(spec, seed=s) for s in range(4)]
    for slot, adapter in enumerate(adapters):
        state = lj.write_slots(state, [slot], adapter)
    rng, put = np.random.default_rng(0), partition.put
    embed, w = (rng.standard_normal(s, np.float32) for s in ((one.V, one.D), (one.D, one.V)))
    x = rng.standard_normal((8, one.D), np.float32)

    @jax.jit
    def run(state, ids, embed, x, w, row_weights, token_row):
        route = ops.make_routing(row_weights, token_row)
        return (
            ops.lora_embed(ids, embed, state["embed"], route),
            ops.lora_linear(x, w, state["head"], route, layer=0),
        )

    args = (
        put(IDS, "rows"),
        put(embed, cut, None),
        put(x, "rows", None),
        put(w, None, cut),
        put(dense.ROW_WEIGHTS, None, None),
        put(TOKEN_ROW, "rows"),
    )
    rows, scores = run(state, *args)
    onehot = np.eye(one.V)[IDS]
    for got, base, h, name in (
        (rows, np.float64(embed)[IDS], onehot, "embed"),
        (scores, np.float64(x) @ w, np.float64(x), "head"),
    ):
        target = spec.target(name)
        delta = dense.reference(h[:7], adapters, target, 0)
        last = dense.reference(h[[7, 1, 2, 3, 4, 5, 6]], adapters, target, 0)[:1]
        assert dense.rel(got, base + np.concatenate([delta, last])) < 1e-5
    np.testing.assert_array_equal(np.asarray(rows)[~ADAPTED], embed[IDS][~ADAPTED])
    text = run.lower(state, *args).compile().as_text()
    assert collectives(text) == ({"all-reduce": 1} if cut else {})
