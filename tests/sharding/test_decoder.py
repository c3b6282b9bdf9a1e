"""Decoders on meshes against one device: every family, KV heads fewer than shards, all axes."""

import contextlib
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import lorajax as lj
from lorajax import models
from lorajax.adapters import adapter_from_tensors
from lorajax.engine import Steps
from lorajax.engine.buckets import PrefillBatch
from lorajax.models.placement import CACHE_AXES
from lorajax.sharding import Partition, state_shardings
from tests import hf
from tests.models.support import errors, weights_of
from tests.sharding.support import config_of, mesh_of

N, Q, C, SLOTS = 8, 8, 16, 4
#: Family, KV heads, mesh, and whether slots are fully sharded. All families either way, all sizes
#: of the tensor axis alone and with other axes, 1, 2 and 4 KV heads with more shards.
CASES = [
    ("llama2", 4, {"tensor": 8}, AxisType.Auto, False),
    ("llama3", 1, {"tensor": 2}, AxisType.Auto, True),
    ("llama_bias", 2, {"tensor": 8}, AxisType.Explicit, False),
    ("qwen2", 2, {"tensor": 4}, AxisType.Auto, True),
    ("qwen2_window", 2, {"data": 2, "tensor": 4}, AxisType.Auto, False),
    ("qwen3", 1, {"fsdp": 2, "tensor": 4}, AxisType.Auto, False),
    ("mistral_window", 4, {"data": 2, "fsdp": 2, "tensor": 2}, AxisType.Explicit, True),
    ("mistral", 8, {"data": 8, "tensor": 1}, AxisType.Auto, False),
]
#: The rest of them takes minutes: `make meshes`.
MORE_CASES = [
    ("llama2", 4, {"tensor": 1}, AxisType.Auto, False),
    ("llama2", 4, {"tensor": 8}, AxisType.Auto, True),
    ("llama3", 1, {"tensor": 2}, AxisType.Auto, False),
    ("llama3", 1, {"tensor": 8}, AxisType.Auto, False),
    ("llama_bias", 2, {"fsdp": 4, "tensor": 2}, AxisType.Auto, False),
    ("llama_bias", 2, {"tensor": 8}, AxisType.Explicit, True),
    ("qwen2", 2, {"tensor": 4}, AxisType.Auto, False),
    ("qwen2_window", 2, {"data": 2, "tensor": 4}, AxisType.Auto, True),
    ("qwen3", 1, {"data": 4, "tensor": 2}, AxisType.Auto, False),
    ("qwen3", 1, {"fsdp": 2, "tensor": 4}, AxisType.Auto, True),
    ("mistral_window", 4, {"data": 2, "fsdp": 2, "tensor": 2}, AxisType.Explicit, False),
    ("mistral", 8, {"data": 2, "tensor": 4}, AxisType.Explicit, True),
]
#: Rows of the batch: base rows among adapters and mixes.
MIXES = [{}, {"a": 1.0}, {"b": 1.0}, {}, {"a": 0.7, "b": -0.3}, {"b": 2.0}, {"a": 1.0}, {}]
BASE = [i for i, mix in enumerate(MIXES) if not mix]


@functools.cache
def tokens():
    drawn = np.random.default_rng(0).integers(3, 90, (N, C)).astype(np.int32)
    return drawn, np.array([8, 3, 5, 1, 8, 2, 7, 6], np.int32)


class Served:
    """Slots and steps on a mesh, or on one device."""

    def __init__(self, family, kv_heads, partition=None, *, fully=False, targets=None, **fields):
        self.config, self.partition = config_of(family, kv_heads, **fields), partition
        tensors = hf.base_tensors(self.config)
        sizes = models.ModelConfig.from_hf(self.config)
        model = models.from_tensors(sizes, tensors, partition=partition)
        self.steps = Steps(model, keep_logits=True, partition=partition)
        self.spec = lj.LoraSpec.from_hf_config(
            self.config, num_slots=SLOTS, slot_rank=16, targets=targets
        )
        self.shardings = None
        if partition is not None:
            self.shardings = state_shardings(self.spec, partition.mesh, fully_sharded=fully)
        self.state = lj.init_state(self.spec, self.shardings)

    def load(self, form, slots):
        adapter = adapter_from_tensors(
            hf.adapter_config(form), hf.adapter_tensors(form, self.config), self.spec, name=form
        )
        assert adapter.num_slots == len(slots)
        self.state = lj.write_slots(self.state, slots, adapter)

    def clear(self, slots):
        self.state = lj.clear_slots(self.state, slots)

    def start(self, weights):
        text, lengths = tokens()
        rows, places = np.arange(N, dtype=np.int32), tuple(range(N))
        batch = PrefillBatch(places, places, text[:, :Q], lengths, rows)
        self.at = lengths.copy()
        cache = self.steps.init_cache(N, C)
        choice, self.cache = self.steps.prefill(self.state, cache, batch, weights)
        return np.asarray(choice.logits)

    def step(self, weights):
        text, _ = tokens()
        new = text[np.arange(N), self.at]
        choice, self.cache = self.steps.decode(self.state, self.cache, new, self.at, weights)
        self.at = self.at + 1
        return np.asarray(choice.logits)


def life(served, nothing_compiles):
    """Logits of a prompt and of steps between which adapters come and go."""
    slots = {"a": [1], "b": [3, 0]}
    weights = weights_of(MIXES, slots, SLOTS)
    served.load("plain", [1])
    served.load("patterns", [3, 0])
    logits = [served.start(weights), served.step(weights)]
    served.clear([2])
    with nothing_compiles():
        served.clear([1])
        logits.append(served.step(weights))
        served.clear([3, 0])
        served.load("patterns", [1, 3])
        served.load("rslora", [0])
        logits.append(served.step(weights))
        logits.append(served.start(weights))
    return np.stack(logits)


@functools.cache
def on_one_device(family, kv_heads):
    return life(Served(family, kv_heads), contextlib.nullcontext)


def case(family, kv_heads, axes, axis_type, fully, *marks):
    """A family's cases go to one test worker, which runs its one device once."""
    mesh = "-".join(f"{axis}{size}" for axis, size in axes.items())
    name = f"{family}-{kv_heads}-{mesh}-{axis_type.name}" + "-fully" * fully
    marks = (pytest.mark.xdist_group(f"decoder-{family}"), *marks)
    return pytest.param(family, kv_heads, axes, axis_type, fully, id=name, marks=marks)


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    ("family", "kv_heads", "axes", "axis_type", "fully"),
    [*(case(*c) for c in CASES), *(case(*c, pytest.mark.meshes) for c in MORE_CASES)],
)
def test_a_mesh_gives_what_one_device_gives(family, kv_heads, axes, axis_type, fully, compiles):
    partition = Partition.of(mesh_of(axis_type, **axes))
    served = Served(family, kv_heads, partition, fully=fully)
    got, want = life(served, compiles.none), on_one_device(family, kv_heads)
    assert errors(got, want).max() < 1e-5
    changed = [i for i in range(N) if i not in BASE]
    assert errors(got[1:4, changed], got[[2, 3, 4]][:, changed]).min() > 1e-3
    for leaf, sharding in zip(
        jax.tree.leaves(served.state), jax.tree.leaves(served.shardings), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    for leaf in jax.tree.leaves(served.cache):
        assert leaf.sharding.is_equivalent_to(served.partition.sharding(*CACHE_AXES), leaf.ndim)


def test_base_rows_are_bit_equal_on_a_mesh():
    partition = Partition.of(mesh_of(data=2, tensor=4))
    weights = weights_of([{"a": 9.0} if mix else {} for mix in MIXES], {"a": [2]}, SLOTS)
    plain = Served("llama_bias", 2, partition)
    plain.state = None
    want = [plain.start(None), plain.step(None)]
    for fully in (False, True):
        served = Served("llama_bias", 2, partition, fully=fully)
        served.load("rslora", [2])
        for a, b in zip([served.start(weights), served.step(weights)], want, strict=True):
            np.testing.assert_array_equal(a[BASE].view(np.uint32), b[BASE].view(np.uint32))
            assert (a[1] != b[1]).any()


def test_param_shardings():
    partition = Partition.of(mesh_of(fsdp=2, tensor=4))
    config = models.ModelConfig.from_hf(config_of("llama_bias", 2))
    model = models.abstract_model(config, partition)
    layer, P = model.layers[0], PartitionSpec

    def spec(param):
        return jax.tree.leaves(param)[0].sharding.spec

    assert spec(model.embed) == P("tensor", "fsdp")
    assert spec(model.head) == spec(layer.qkv_proj.weight) == P("fsdp", "tensor")
    assert spec(layer.gate_up_proj.bias) == P("tensor")
    assert spec(layer.down_proj.weight) == P("tensor", "fsdp")
    assert spec(layer.down_proj.bias) == spec(layer.mlp_norm.weight) == P(None)
    shapes = {p.shape for p in jax.tree.leaves(layer.qkv_proj.weight)}
    assert shapes == {(48, 4 * (2 * 8 + 8 + 8))}  # two KV heads, each on two of four shards
    shardings = models.param_shardings(config, partition)
    assert [s.spec for s in jax.tree.leaves(shardings)] == [
        p.sharding.spec for p in jax.tree.leaves(model)
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 3, "num_attention_heads": 12}, "num_key_value_heads.*4 dev.*3"),
        ({"num_attention_heads": 6}, "num_attention_heads.*4 devices; got 6"),
        ({"intermediate_size": 81}, "intermediate_size.*81"),
        ({"hidden_size": 49}, r"axes must divide.*\[96, 49\]"),
    ],
)
def test_models_that_do_not_divide_are_refused(fields, words):
    config = models.ModelConfig.from_hf(config_of("llama2", 2, **fields))
    partition = Partition.of(mesh_of(fsdp=2, tensor=4))
    tensors = hf.base_tensors(config_of("llama2", 2, **fields))
    with pytest.raises(lj.LoraError, match=words):
        models.from_tensors(config, tensors, partition=partition)


def test_adapters_are_not_merged_into_columns_that_are_laid_out():
    served = Served("llama2", 8, Partition.of(mesh_of(tensor=2)))
    model = models.from_tensors(
        models.ModelConfig.from_hf(served.config),
        hf.base_tensors(served.config),
        partition=served.partition,
    )
    with pytest.raises(lj.SpecError, match=r"one device.*got one on 2"):
        models.merge_adapters(model, served.spec, [])
