"""Targets outside of the layers: an embedding and an output head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lorajax as lj
from lorajax.state import abstract_state
from tests.core import test_apply as dense
from tests.core.test_spec import LLAMA
from tests.core.test_state import make_adapter, slot_arrays

V, D = 24, 16
TARGETS = (
    lj.Target("down", 32, D, parallel="row"),
    lj.Target("embed", V, D, parallel="embedding"),
    lj.Target("head", D, V, parallel="head"),
)
IDS = np.array([0, 23, 5, 5, 7, 1, 23], np.int32)


def make_spec(**changes):
    sizes = {"num_layers": 3, "num_slots": 4, "slot_rank": 8, "dtype": "float32"}
    return lj.LoraSpec(TARGETS, **(sizes | changes))


def vocabulary(spec, n=1, seed=0):
    """An adapter, whose targets outside of the layers have one layer."""
    layered = make_adapter(spec, n, seed)
    arrays = {
        name: p if spec.target(name).layered else type(p)(p.A[:, :1], p.B[:, :1], p.scale[:, :1])
        for name, p in layered.arrays.items()
    }
    return lj.Adapter(layered.name, layered.digest, layered.rank, n, arrays)


@pytest.mark.parametrize("stack", [False, True])
def test_arrays_and_bytes(stack):
    spec = make_spec(stack_layers=stack)
    state = abstract_state(spec)
    assert [len(t.parts) for t in state.targets.values()] == [1 if stack else 3, 1, 1]
    (embed,), (head,) = state["embed"].parts, state["head"].parts
    assert (embed.A.shape, embed.B.shape) == ((1, 4, 1, 8, V), (1, 4, 8, D))
    assert (head.A.shape, head.B.shape) == ((1, 4, 1, 8, D), (1, 4, 8, V))
    assert spec.outside == ("embed", "head")
    assert spec.total_bytes == sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))


def test_targets_on_request():
    config = LLAMA | {"vocab_size": 100}
    spec = lj.LoraSpec.from_hf_config(config, num_slots=2)
    assert spec.outside == ()
    chosen = lj.LoraSpec.from_hf_config(
        config, num_slots=2, targets=("q_proj", "lm_head", "embed_tokens")
    )
    assert [(t.name, t.d_in, t.slices, t.parallel) for t in chosen.targets[1:]] == [
        ("model.embed_tokens", 100, (64,), "embedding"),
        ("lm_head", 64, (100,), "head"),
    ]
    alone = lj.LoraSpec.from_hf_config(config, num_slots=2, targets=("lm_head",), merged=False)
    assert alone.outside == ("lm_head",)
    with pytest.raises(lj.SpecError, match="vocab_size"):
        lj.LoraSpec.from_hf_config(LLAMA, num_slots=2, targets=("lm_head",))
    with pytest.raises(lj.SpecError, match="one slice"):
        lj.Target("embed", V, (8, 8), ("a", "b"), parallel="embedding")


def test_embedding_equals_float64():
    spec = make_spec()
    state, adapters = lj.init_state(spec), [vocabulary(spec, seed=s) for s in range(4)]
    for slot, adapter in enumerate(adapters):
        state = lj.write_slots(state, [slot], adapter)
    embed = dense.normal(np.random.default_rng(1), V, D)
    onehot = np.eye(V)[IDS]
    want = np.float64(embed)[IDS] + dense.reference(onehot, adapters, spec.target("embed"), 0)
    run = jax.jit(lambda ids: lj.lora_embed(ids, embed, state["embed"], dense.routing()))
    got = run(IDS)
    assert dense.rel(got, want) < 1e-5
    base = ~dense.ADAPTED
    np.testing.assert_array_equal(np.asarray(got)[base], np.asarray(embed)[IDS][base])

    bad = IDS.copy()
    bad[[1, 3]] = V, -1
    got = np.asarray(run(bad))
    assert np.isnan(got[[1, 3]]).all()
    keep = [0, 2, 4, 5, 6]
    np.testing.assert_array_equal(got[keep], np.asarray(run(IDS))[keep])

    parts = [
        lj.lora_embed(jnp.asarray(IDS), embed[i : i + 12], half, dense.routing(), first=i)
        for i, half in zip((0, 12), halves(state["embed"]), strict=True)
    ]
    np.testing.assert_allclose(parts[0] + parts[1], run(IDS), rtol=1e-6)


def halves(slots):
    """The slots of each half of the vocabulary, as on two devices."""
    (part,) = slots.parts
    cut = [type(part)(A, part.B, part.scale, part.slices) for A in jnp.split(part.A, 2, axis=-1)]
    return [type(slots)((p,), slots.target, 2) for p in cut]


def test_life_of_a_slot(compiles):
    """Written whole, zeroed where an adapter has nothing, never compiled anew; also broken ones."""
    spec = make_spec()
    state = lj.clear_slots(lj.write_slots(lj.init_state(spec), [0], vocabulary(spec)), [0])
    whole = vocabulary(spec, 2, seed=1)
    part = lj.Adapter("part", "part", 8, 1, {"head": vocabulary(spec, seed=2).arrays["head"]})
    with compiles.none():
        state = lj.write_slots(state, [3, 1], whole)
        state = lj.write_slots(state, [1], part)
    np.testing.assert_array_equal(slot_arrays(state, "embed", 3)[0], whole.arrays["embed"].A[0])
    np.testing.assert_array_equal(slot_arrays(state, "head", 1)[1], part.arrays["head"].B[0])
    assert not any(a.any() for a in slot_arrays(state, "embed", 1))

    broken = vocabulary(spec, seed=3)
    broken.arrays["embed"].B[0, 0, 2, 5] = np.nan
    state = lj.write_slots(state, [1], broken)
    _, B, scale = slot_arrays(state, "embed", 1)
    assert np.isfinite(B).all()
    assert np.isnan(scale[0, :, 2]).all()
    with pytest.raises(lj.SpecError, match=r"\[1, 1, 8, 24\].*'embed'"):
        lj.write_slots(state, [0], make_adapter(spec, 1))  # L layers of an embedding


def test_merging():
    spec = make_spec()
    adapter = vocabulary(spec, 2)
    for name in ("embed", "head"):
        packed, target = adapter.arrays[name], spec.target(name)
        w = np.random.default_rng(0).normal(size=(target.d_in, target.slices[0]))
        factors = map(np.float64, (packed.A[:, 0, 0], packed.scale[:, 0, 0], packed.B[:, 0]))
        want = w + 0.5 * np.einsum("nri,nr,nro->io", *factors)
        np.testing.assert_allclose(lj.merge_adapter(w, adapter, spec, name, 0, 0.5), want)
        with pytest.raises(lj.SpecError, match=r"\[0, 1\)"):
            lj.merge_adapter(w, adapter, spec, name, 1)
