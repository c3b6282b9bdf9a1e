"""The sharded ops of a loop of one's own, against section 1 of docs/design.md in float64."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import lorajax as lj
from lorajax.sharding import Partition, sharded, state_shardings
from tests.core import test_apply as dense
from tests.core.test_state import make_adapter
from tests.sharding.support import collectives, mesh_of
from tests.sharding.test_state_shardings import make_spec

# One worker makes the states for all of these.
pytestmark = [pytest.mark.xdist_group("ops"), pytest.mark.usefixtures("quick_compiles")]

#: 8 tokens: two mixes, a base row, padding. Rows and their weights are those of the dense tests.
TOKEN_ROW = np.array([*dense.TOKEN_ROW, 0], np.int32)
ADAPTED = np.array([*dense.ADAPTED, True])
MESHES = {
    "tensor8": mesh_of(tensor=8),
    "data4-tensor2": mesh_of(data=4, tensor=2),
    "data2-tensor4": mesh_of(data=2, tensor=4),
    "explicit": mesh_of(AxisType.Explicit, data=2, tensor=4),
}


@functools.cache
def adapters():
    spec = make_spec(num_slots=4)
    return [make_adapter(spec, 1, seed=s) for s in range(4)]


@functools.cache
class Case:
    def __init__(self, mesh, *, stack=False, fully=False):
        mesh = MESHES[mesh]
        self.partition, self.ops = Partition.of(mesh), sharded(mesh)
        self.spec = make_spec(num_slots=4, stack_layers=stack)
        shardings = state_shardings(self.spec, mesh, fully_sharded=fully)
        self.state = lj.init_state(self.spec, shardings)
        for slot, adapter in enumerate(adapters()):
            self.state = lj.write_slots(self.state, [slot], adapter)
        self.row_weights = self.partition.put(dense.ROW_WEIGHTS, None, None)
        self.token_row = self.partition.put(TOKEN_ROW, "rows")

    def inputs(self, name, seed=3):
        """x, w and y on the mesh, and x, w and the delta in float64, in the mesh's columns."""
        rng, target = np.random.default_rng(seed), self.spec.target(name)
        columns, row = self.state[name].columns, target.parallel == "row"
        x = rng.standard_normal((8, target.d_in), np.float32)
        w = rng.standard_normal((target.d_in, sum(target.slices)), np.float32)
        delta = reference(x, target)
        cut = ("tensor", None) if row else (None, "tensor")
        y = columns.take((x.astype(np.float64) @ w).astype(np.float32))
        return (
            self.partition.put(x, "rows", cut[0]),
            self.partition.put(columns.take(w), *cut),
            self.partition.put(y, "rows", cut[1]),
            columns.take(x.astype(np.float64) @ w),
            columns.take(delta),
        )


def reference(x, target, layer=1):
    last = dense.reference(x[[*range(7)]], adapters(), target, layer)
    again = dense.reference(x[[7, *range(1, 7)]], adapters(), target, layer)[:1]
    return np.concatenate([last, again])


@pytest.mark.parametrize("fully", [False, True])
@pytest.mark.parametrize("mesh", ["tensor8", "data4-tensor2", "explicit"])
def test_ops_equal_float64(mesh, fully):
    case = Case(mesh, fully=fully)
    ops, state = case.ops, case.state

    @functools.partial(jax.jit, static_argnums=0)
    def run(name, state, row_weights, token_row, x, w, y):
        route, slots = ops.make_routing(row_weights, token_row), state[name]
        return (
            ops.lora_delta(x, slots, route, layer=1),
            ops.add_lora(y, x, slots, route, layer=1),
            ops.lora_linear(x, w, slots, route, layer=1),
        )

    for name in ("qkv", "gate_up", "down", "merged_down"):
        x, w, y, base, delta = case.inputs(name)
        got = run(name, state, case.row_weights, case.token_row, x, w, y)
        assert dense.rel(got[0], delta) < 1e-5
        assert not np.asarray(got[0])[~ADAPTED].any()
        assert dense.rel(got[1], base + delta) < 1e-5
        np.testing.assert_array_equal(np.asarray(got[1])[~ADAPTED], np.asarray(y)[~ADAPTED])
        assert dense.rel(got[2], base + delta) < 1e-5


@pytest.mark.parametrize("fully", [False, True])
def test_a_traced_layer_and_the_slices_of_a_product(fully):
    case = Case("data2-tensor4", stack=True, fully=fully)
    x, w, _, base, delta = case.inputs("qkv")
    stacked = np.stack([np.zeros_like(w), w])  # of which layer 1 is used
    w = case.partition.put(stacked, None, None, "tensor")

    @jax.jit
    def run(state, row_weights, token_row, x, w, layer):
        route = case.ops.make_routing(row_weights, token_row)
        y = case.ops.lora_linear(x, w, state["qkv"], route, layer=layer)
        return y, case.ops.split(y, state["qkv"])

    y, parts = run(case.state, case.row_weights, case.token_row, x, w, np.int32(1))
    assert dense.rel(y, base + delta) < 1e-5
    order, local = case.state["qkv"].columns.order(), case.state["qkv"].columns.local
    where = np.repeat([0, 1, 2], local)
    for g, part in enumerate(parts):
        mine = np.tile(where == g, 4)
        np.testing.assert_array_equal(part, np.asarray(y)[:, mine])
    assert (np.diff(order[np.tile(where == 0, 4)]) > 0).all()  # whole heads, in order


@pytest.mark.parametrize(
    ("name", "fully", "want"),
    [
        ("qkv", False, {}),
        ("gate_up", False, {}),
        ("down", False, {"all-reduce": 1}),
        ("qkv", True, {"all-gather": 1}),
        ("down", True, {"all-reduce": 2}),
    ],
)
def test_collectives_of_an_op(name, fully, want):
    case = Case("data2-tensor4", fully=fully)
    x, w, *_ = case.inputs(name)

    def linear(state, row_weights, token_row, x, w):
        route = case.ops.make_routing(row_weights, token_row)
        return case.ops.lora_linear(x, w, state[name], route, layer=0)

    args = (case.state, case.row_weights, case.token_row, x, w)
    text = jax.jit(linear).lower(*args).compile().as_text()
    assert collectives(text) == want


def traced(op, *args, **options):
    """Runs an op as far as its refusal, and compiles nothing."""
    jax.eval_shape(functools.partial(op, **options), *args)


def test_whole_slots_are_refused_where_one_device_is_meant(no_shape_hook):
    case, route = Case("tensor8"), jax.eval_shape(dense.routing)
    x = np.zeros((7, 16), np.float32)
    with pytest.raises(lj.SpecError, match=r"8 devices.*all 48 columns of 'qkv'"):
        traced(lj.lora_delta, x, case.state["qkv"], route, layer=0)


@pytest.mark.parametrize("name", ["qkv", "down"])
def test_fully_sharded_slots_are_refused_where_no_collective_can_be(name, no_shape_hook):
    case, route = Case("tensor8", fully=True), jax.eval_shape(dense.routing)
    x, w, *_ = case.inputs(name)
    with pytest.raises(lj.SpecError, match=f"collective.*'{name}' on 8 devices"):
        traced(lj.lora_linear, x, w, case.state[name], route, layer=0)
    route = jax.eval_shape(case.ops.make_routing, case.row_weights, case.token_row)
    with pytest.raises(ValueError, match=f"must be 'xla'.*'mosaic_tpu' for '{name}'"):
        traced(
            case.ops.lora_linear,
            *(x, w, case.state[name], route),
            layer=0,
            implementation="mosaic_tpu",
        )
