import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lorajax as lj
from lorajax.sharding import AxisRules, Partition, state_shardings
from tests.core.test_state import make_adapter, slot_arrays
from tests.sharding.support import mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

TARGETS = (
    lj.Target("qkv", 16, (16, 8, 8), ("q", "k", "v"), heads=(8, 4, 4)),
    lj.Target("gate_up", 16, (24, 24), ("gate", "up")),
    lj.Target("down", 32, 16, parallel="row"),
    lj.Target("merged_down", 32, (16, 8), ("down_a", "down_b"), parallel="row"),
)


def make_spec(**changes):
    return lj.LoraSpec(
        TARGETS, **({"num_layers": 2, "num_slots": 3, "slot_rank": 8, "dtype": "float32"} | changes)
    )


def slot_of(state, name, slot):
    return dict(zip(("A", "B", "scale"), slot_arrays(state, name, slot), strict=True))


MESHES = [
    ({"data": 1, "tensor": 8}, AxisType.Auto),
    ({"data": 2, "tensor": 4}, AxisType.Auto),
    ({"data": 2, "tensor": 4}, AxisType.Explicit),
    ({"fsdp": 2, "data": 2, "tensor": 2}, AxisType.Auto),
]


# The tests of a mesh go to one worker, which compiles its writes once.
@pytest.fixture(
    params=[pytest.param(m, id=str(m), marks=pytest.mark.xdist_group(f"slots-{m}")) for m in MESHES]
)
def mesh(request):
    axes, axis_type = request.param
    return mesh_of(axis_type, **axes)


@pytest.mark.parametrize(("stack", "fully"), [(False, False), (True, False), (True, True)])
def test_slots_are_written_in_shards(mesh, stack, fully, compiles):
    """Each device holds the columns of its heads; nothing is compiled or moved after warm-up."""
    spec = make_spec(stack_layers=stack)
    shardings = state_shardings(spec, mesh, fully_sharded=fully)
    state = lj.clear_slots(lj.init_state(spec, shardings), [0])
    state = lj.write_slots(state, [0], make_adapter(spec, 1, seed=0))
    adapter = make_adapter(spec, 2, seed=1, targets=("qkv", "down"))
    with compiles.none():
        state = lj.write_slots(state, [2, 0], adapter)
        state = lj.clear_slots(state, [1])
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    for index, slot in enumerate([2, 0]):
        for name in ("qkv", "down"):
            columns, packed = state[name].columns, adapter.arrays[name]
            got = slot_of(state, name, slot)
            np.testing.assert_array_equal(got["A"], packed.A[index])
            np.testing.assert_array_equal(got["B"], columns.take(packed.B[index]))
            np.testing.assert_array_equal(got["scale"], packed.scale[index])
        assert not slot_of(state, "gate_up", slot)["B"].any()
    n = mesh.shape["tensor"]
    part = state["qkv"].parts[0]
    assert part.slices == (16 // n, 2 * max(1, 4 // n), 2 * max(1, 4 // n))
    assert {s.data.shape[-1] for s in part.B.addressable_shards} == {sum(part.slices)}
    assert {s.data.shape[-1] for s in state["down"].parts[0].A.addressable_shards} == {32 // n}
    m = n if fully else 1
    assert {s.data.shape[-2] for s in part.A.addressable_shards} == {8 // m}
    assert {s.data.shape[-1] for s in part.scale.addressable_shards} == {8 // m}
    assert {s.data.shape[-1] for s in state["down"].parts[0].B.addressable_shards} == {16 // m}


@pytest.mark.parametrize("fully", [False, True])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_row_of_b_that_is_not_finite_marks_its_scale_on_every_shard(axis_type, fully):
    spec = make_spec()
    mesh = mesh_of(axis_type, data=2, tensor=4)
    state = lj.init_state(spec, state_shardings(spec, mesh, fully_sharded=fully))
    adapter = make_adapter(spec, 1)
    adapter.arrays["qkv"].B[0, 1, 3, 31] = np.inf  # a column of the last shard alone
    got = slot_of(lj.write_slots(state, [1], adapter), "qkv", 1)
    assert np.isnan(got["scale"][1, :, 3]).all()
    assert np.isnan(got["scale"]).sum() == 3
    assert not got["B"][1, 3].any()
    assert np.isfinite(got["B"]).all()


@pytest.mark.parametrize("fully", [False, True])
def test_the_manager_writes_in_shards(mesh, fully, compiles):
    spec = make_spec()
    shardings = state_shardings(spec, mesh, fully_sharded=fully)
    adapters = {f"a{i}": make_adapter(spec, 1, seed=i) for i in range(5)}
    manager = lj.AdapterManager(spec, sources=adapters, shardings=shardings)
    with compiles.none():
        for name in adapters:
            with manager.lease([name, None]) as lease:
                (slot,) = lease.slots[name]
                got = slot_of(manager.state, "qkv", slot)["B"]
            want = manager.state["qkv"].columns.take(adapters[name].arrays["qkv"].B[0])
            np.testing.assert_array_equal(got, want)
    assert manager.stats.evictions == 2


def test_the_table(mesh):
    shardings = state_shardings(make_spec(), mesh)
    column, row = shardings["qkv"].parts[0], shardings["down"].parts[0]
    assert column.A.spec == P(None, None, None, None, None)
    assert column.B.spec == P(None, None, None, "tensor")
    assert row.A.spec == P(None, None, None, None, "tensor")
    assert row.B.spec == column.scale.spec == row.scale.spec == P(None, None, None, None)
    full = state_shardings(make_spec(), mesh, fully_sharded=True)
    column, row = full["qkv"].parts[0], full["down"].parts[0]
    assert column.A.spec == P(None, None, None, "tensor", None)
    assert column.B.spec == row.B.spec == column.scale.spec == P(None, None, None, "tensor")
    assert row.A.spec == P(None, None, None, None, "tensor")
    assert row.scale.spec == P(None, None, None, None)
    assert all(isinstance(s, NamedSharding) for s in jax.tree.leaves(shardings))


def test_rules():
    mesh = mesh_of(tensor=8)
    assert AxisRules.of(mesh) == AxisRules(data=None, tensor="tensor")
    assert AxisRules(fsdp="z").spec("rows", "tensor") == P(("data", "z"), "tensor")
    assert AxisRules().spec("rows", None) == P("data", None)
    assert AxisRules(data=None).spec("rows", "fsdp") == P(None, None)
    with pytest.raises(lj.SpecError, match=r"exist; got \['data'\]"):
        state_shardings(make_spec(), mesh, AxisRules())
    with pytest.raises(lj.SpecError, match="twice"):
        AxisRules(data="tensor")
    with pytest.raises(lj.SpecError, match="vocab"):
        AxisRules().spec("vocab")
    with pytest.raises(lj.SpecError, match=r"got \['x'\]"):
        Partition.of(mesh_of(x=2, tensor=4))
    shard = Partition.of(mesh_of(x=2, tensor=4), AxisRules(data="x")).shard
    assert (shard.tensor_shards, shard.row_shards, shard.rows) == (4, 2, ("x",))
    alone = Partition.of(mesh_of(data=1, tensor=1)).shard
    assert (alone.tensor, alone.rows, alone.row_shards) == (None, (), 1)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (lj.Target("up", 16, 20), r"8 shards.*got 20 columns.*\[20\]"),
        (lj.Target("k", 16, 24, heads=(3,)), "8 shards.*got 3 heads"),
        (lj.Target("down", 20, 16, parallel="row"), "features.*8 devices; got 20 for 'down'"),
        (lj.Target("o", 32, 16, parallel="row", heads=(4,)), "heads.*8 devices; got 4 for 'o'"),
    ],
)
def test_features_that_do_not_divide_are_refused(target, words):
    with pytest.raises(lj.SpecError, match=words):
        state_shardings(lj.LoraSpec((target,), 1, 1, 8), mesh_of(tensor=8))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (lj.Target("up", 18, 24), "slot_rank.*6 devices; got 8 for 'up'; use slot_rank=24"),
        (lj.Target("down", 18, 20, parallel="row"), r"6 shards.*got 20 columns.*\[20\]"),
    ],
)
def test_fully_sharded_slots_that_do_not_divide_are_refused(target, words):
    spec, mesh = lj.LoraSpec((target,), 1, 1, 8), mesh_of(tensor=6)
    state_shardings(spec, mesh)
    with pytest.raises(lj.SpecError, match=words):
        state_shardings(spec, mesh, fully_sharded=True)
