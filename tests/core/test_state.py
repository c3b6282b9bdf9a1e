import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lorajax as lj
from lorajax.adapter import PackedWeights

TARGETS = (
    lj.Target("qkv", 16, (16, 8, 8), ("q", "k", "v")),
    lj.Target("down", 24, 16, parallel="row"),
)


def make_spec(**changes):
    return lj.LoraSpec(
        TARGETS, **({"num_layers": 2, "num_slots": 4, "slot_rank": 8, "dtype": "float32"} | changes)
    )


def make_adapter(spec, n, seed=0, targets=None):
    rng = np.random.default_rng(seed)
    L, R = spec.num_layers, spec.slot_rank
    arrays = {}
    for t in spec.targets:
        if targets is not None and t.name not in targets:
            continue
        G = len(t.slices)
        arrays[t.name] = PackedWeights(
            A=rng.standard_normal((n, L, G, R, t.d_in)).astype(spec.dtype),
            B=rng.standard_normal((n, L, R, sum(t.slices))).astype(spec.dtype),
            scale=rng.uniform(0.5, 2, (n, L, G, R)).astype(np.float32),
        )
    return lj.Adapter(f"a{seed}", str(seed), n * R, n, arrays)


def slot_arrays(state, name, slot):
    parts = state[name].parts
    return [
        np.concatenate([np.asarray(getattr(p, key))[:, slot] for p in parts])
        for key in ("A", "B", "scale")
    ]


@pytest.mark.parametrize("stack", [False, True])
def test_a_slot_is_one_adapter_or_zeros(stack):
    spec = make_spec(stack_layers=stack)
    first, second = make_adapter(spec, 2, seed=1), make_adapter(spec, 1, seed=2, targets=["down"])
    state = lj.write_slots(lj.init_state(spec), [3, 1], first)
    state = lj.write_slots(state, [1], second)  # over a slot whose last tenant touched more targets
    for t in spec.targets:
        for key, got in zip(("A", "B", "scale"), slot_arrays(state, t.name, 3), strict=True):
            np.testing.assert_array_equal(got, getattr(first.arrays[t.name], key)[0])
        for slot in (0, 2):
            assert not any(a.any() for a in slot_arrays(state, t.name, slot))
    for key, got in zip(("A", "B", "scale"), slot_arrays(state, "down", 1), strict=True):
        np.testing.assert_array_equal(got, getattr(second.arrays["down"], key)[0])
    assert not any(a.any() for a in slot_arrays(state, "qkv", 1))
    state = lj.clear_slots(state, [3, 1])
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(state))


def test_writes_compile_once(compiles):
    spec = make_spec()
    state = lj.clear_slots(lj.write_slots(lj.init_state(spec), [0], make_adapter(spec, 1)), [0])
    before = compiles.count
    assert before > 0
    for n, slots in [(1, [np.int64(2)]), (3, [0, 3, 1]), (1, [np.int32(1)])]:
        state = lj.write_slots(state, slots, make_adapter(spec, n, seed=n))
        state = lj.write_slots(state, slots[:1], make_adapter(spec, 1, targets=["qkv"]))
        state = lj.clear_slots(state, slots)
    assert compiles.count == before


def test_a_written_state_is_donated():
    spec = make_spec()
    state = lj.init_state(spec)
    lj.write_slots(state, [0], make_adapter(spec, 1))
    assert all(a.is_deleted() for a in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("slots", "words"),
    [([4], "[0, 4)"), ([-1], "[0, 4)"), ([1, 1], "distinct"), ([1, 2], "exactly"), ([], "exactly")],
)
def test_refused_slots_leave_the_state_alive(slots, words):
    spec = make_spec()
    state = lj.init_state(spec)
    with pytest.raises(lj.SpecError) as error:
        lj.write_slots(state, slots, make_adapter(spec, 1))
    assert words in str(error.value)
    assert not any(a.is_deleted() for a in jax.tree.leaves(state))


def test_an_adapter_of_another_spec_is_refused():
    spec = make_spec()
    state = lj.init_state(spec)
    for other in (make_spec(slot_rank=16), make_spec(dtype="float16")):
        with pytest.raises(lj.SpecError, match="packed for the state"):
            lj.write_slots(state, [0], make_adapter(other, 1))
    wide = lj.LoraSpec((lj.Target("wide", 8, 8),), 2, 4, 8, "float32")
    with pytest.raises(lj.SpecError, match="wide"):
        lj.write_slots(state, [0], make_adapter(wide, 1))
    assert not any(a.is_deleted() for a in jax.tree.leaves(state))


def test_layers_are_checked():
    spec = make_spec()
    state = lj.init_state(spec)
    routing = lj.make_routing(jnp.zeros((1, 4)), jnp.zeros((3,), jnp.int32))
    x = jnp.zeros((3, 16))
    for layer in (2, -1):
        with pytest.raises(IndexError, match="layer"):
            lj.lora_delta(x, state["qkv"], routing, layer=layer)
        stacked = lj.init_state(make_spec(stack_layers=True))
        with pytest.raises(IndexError, match="layer"):
            lj.lora_delta(x, stacked["qkv"], routing, layer=layer)
    with pytest.raises(lj.SpecError, match="stack_layers=True"):
        jax.jit(lambda i: lj.lora_delta(x, state["qkv"], routing, layer=i))(0)
    with pytest.raises(lj.SpecError, match="o_proj"):
        state["o_proj"]
