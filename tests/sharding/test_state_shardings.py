import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lorajax as lj
from lorajax.sharding import AxisRules, state_shardings
from tests.core.test_apply import TOKEN_ROW, filled, normal, reference, rel, routing
from tests.core.test_state import make_adapter

TARGETS = (
    lj.Target("qkv", 16, (16, 8, 8), ("q", "k", "v")),
    lj.Target("down", 32, 16, parallel="row"),
)


def make_spec(**changes):
    return lj.LoraSpec(
        TARGETS, **({"num_layers": 2, "num_slots": 4, "slot_rank": 8, "dtype": "float32"} | changes)
    )


@pytest.fixture(params=[(1, 8), (2, 4), (4, 2)], ids=lambda s: f"data{s[0]}-tensor{s[1]}")
def mesh(request):
    return jax.make_mesh(request.param, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("stack", [False, True])
def test_sharded_slots_compute_what_one_device_computes(mesh, stack, compiles):
    spec = make_spec(stack_layers=stack)
    shardings = state_shardings(spec, mesh)
    state = lj.init_state(spec, shardings)
    _, adapters = filled(spec)
    for slot, adapter in enumerate(adapters):
        state = lj.write_slots(state, [slot], adapter)
    step = jax.jit(lambda x, slots: lj.lora_delta(x, slots, routing(), layer=1))
    for target in spec.targets:
        x = normal(np.random.default_rng(3), len(TOKEN_ROW), target.d_in)
        want = reference(x, adapters, target, 1)
        assert rel(step(x, state[target.name]), want) < 1e-5
    state = lj.clear_slots(state, [0])
    with compiles.none():  # loads and evictions keep the shardings, so the step stays compiled
        state = lj.clear_slots(lj.write_slots(state, [2], make_adapter(spec, 1, seed=9)), [2])
        step(x, state[target.name])
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_the_table(mesh):
    shardings = state_shardings(make_spec(), mesh)
    column, row = shardings["qkv"].parts[0], shardings["down"].parts[0]
    assert column.A.spec == P(None, None, None, None, None)
    assert column.B.spec == P(None, None, None, "tensor")
    assert row.A.spec == P(None, None, None, None, "tensor")
    assert row.B.spec == P(None, None, None, None)
    assert all(isinstance(s, NamedSharding) for s in jax.tree.leaves(shardings))


def test_refusals():
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,))
    with pytest.raises(lj.SpecError, match="data"):
        state_shardings(make_spec(), mesh)
    rules = AxisRules(data=None)
    state_shardings(make_spec(), mesh, rules)
    with pytest.raises(lj.SpecError, match="twice"):
        AxisRules(data="tensor")
    with pytest.raises(lj.SpecError, match="vocab"):
        rules.spec("vocab")
    odd = lj.LoraSpec((lj.Target("up", 16, 20),), 1, 1, 8)
    with pytest.raises(lj.SpecError, match=r"20.*up"):
        state_shardings(odd, mesh, rules)
