"""The three ops on a state, against section 1 of docs/design.md in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lorajax as lj
from tests.core.test_state import make_adapter, make_spec

BASE_ROW, PADDING = 2, -1
TOKEN_ROW = np.array([0, 0, 1, BASE_ROW, PADDING, 1, 3], np.int32)
ROW_WEIGHTS = np.array(
    [[0, 1, 0, 1], [0.7, 0, 0.3, 0], [0, 0, 0, 0], [-0.5, 0, 0, 0]], np.float32
)  # an adapter in two slots, a mix, the base, a negative weight
ADAPTED = np.array([True, True, True, False, False, True, True])


def filled(spec, seed=0):
    """A state with an adapter in every slot, and the adapters by slot."""
    state = lj.init_state(spec)
    adapters = [make_adapter(spec, 1, seed=seed + s) for s in range(spec.num_slots)]
    for slot, adapter in enumerate(adapters):
        state = lj.write_slots(state, [slot], adapter)
    return state, adapters


def reference(x, adapters, target, layer):
    """Section 1, one slot and one slice at a time, in float64."""
    delta = np.zeros((len(x), sum(target.slices)))
    for t, row in enumerate(TOKEN_ROW):
        for s, adapter in enumerate(adapters):
            weight = ROW_WEIGHTS[row, s] if row >= 0 else 0.0
            packed, start = adapter.arrays[target.name], 0
            for g, width in enumerate(target.slices):
                A, scale = packed.A[0, layer, g], packed.scale[0, layer, g]
                h = (np.asarray(x[t], np.float64) @ np.float64(A).T) * scale * weight
                B = np.float64(packed.B[0, layer, :, start : start + width])
                delta[t, start : start + width] += h @ B
                start += width
    return delta


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def rel(got, want):
    return np.linalg.norm(np.float64(got) - want) / np.linalg.norm(want)


def routing():
    return lj.make_routing(jnp.asarray(ROW_WEIGHTS), jnp.asarray(TOKEN_ROW))


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("name", ["qkv", "down"])
def test_ops_equal_float64(stack, name):
    spec = make_spec(stack_layers=stack)
    state, adapters = filled(spec)
    target = spec.target(name)
    rng = np.random.default_rng(5)
    for layer in range(spec.num_layers):
        x = normal(rng, len(TOKEN_ROW), target.d_in)
        w = normal(rng, target.d_in, sum(target.slices))
        want = reference(x, adapters, target, layer)
        base = np.float64(x) @ np.float64(w)
        delta = lj.lora_delta(x, state[name], routing(), layer=layer)
        assert delta.dtype == np.float32
        assert rel(delta, want) < 1e-5
        assert not np.asarray(delta)[~ADAPTED].any()
        assert rel(lj.lora_linear(x, w, state[name], routing(), layer=layer), base + want) < 1e-5
        y = jnp.dot(x, w)
        assert rel(lj.add_lora(y, x, state[name], routing(), layer=layer), base + want) < 1e-5


def test_a_loop_over_stacked_layers():
    spec = make_spec(stack_layers=True)
    state, adapters = filled(spec)
    target = spec.target("qkv")
    rng = np.random.default_rng(5)
    x = normal(rng, len(TOKEN_ROW), 16)
    w = normal(rng, spec.num_layers, 16, 32)

    @jax.jit
    def step(state, x, w):
        layers = jnp.arange(spec.num_layers)
        body = lambda _, i: (_, lj.lora_linear(x, w, state["qkv"], routing(), layer=i))
        return jax.lax.scan(body, 0, layers)[1]

    for layer, got in enumerate(step(state, x, w)):
        want = np.float64(x) @ np.float64(w[layer]) + reference(x, adapters, target, layer)
        assert rel(got, want) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_base_rows_are_bit_equal_to_the_plain_product(dtype):
    spec = make_spec(dtype=dtype)
    state, _ = filled(spec)
    x = jax.random.normal(jax.random.key(0), (len(TOKEN_ROW), 16), dtype)
    w = jax.random.normal(jax.random.key(1), (16, 32), dtype).at[:, 0].set(0)  # zeros of both signs
    plain = jax.jit(jnp.dot)(x, w)
    got = jax.jit(lambda *a: lj.lora_linear(*a, routing(), layer=0))(x, w, state["qkv"])
    assert got.dtype == plain.dtype
    np.testing.assert_array_equal(
        np.asarray(got)[~ADAPTED].view(np.uint8), np.asarray(plain)[~ADAPTED].view(np.uint8)
    )
    assert (np.asarray(got)[ADAPTED] != np.asarray(plain)[ADAPTED]).any(axis=1).all()


@pytest.mark.parametrize("broken", ["A", "B", "scale"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_adapter_reaches_only_its_own_rows(broken, value):
    """No loader lets such an adapter in; the arrays themselves keep tenants apart all the same."""
    spec = make_spec()
    state, adapters = filled(spec)
    target = spec.target("qkv")
    bad = make_adapter(spec, 1, seed=1)
    getattr(bad.arrays["qkv"], broken)[..., -1] = value
    state = lj.write_slots(state, [1], bad)
    x = normal(np.random.default_rng(5), len(TOKEN_ROW), 16)
    got = np.asarray(lj.lora_delta(x, state["qkv"], routing(), layer=1))
    own = np.isin(TOKEN_ROW, [0])  # the rows with a weight on slot 1
    assert not np.isfinite(got[own]).all(axis=1).any()
    want = reference(x, adapters, target, 1)
    assert rel(got[~own], want[~own]) < 1e-5
    assert all(np.isfinite(p.B).all() for p in state["qkv"].parts)


def test_a_broken_row_reaches_no_other_row():
    spec = make_spec()
    state, adapters = filled(spec)
    x = normal(np.random.default_rng(5), len(TOKEN_ROW), 16)
    want = reference(x, adapters, spec.target("qkv"), 0)
    x = x.at[0].set(jnp.nan).at[3].set(jnp.inf)
    got = np.asarray(lj.lora_delta(x, state["qkv"], routing(), layer=0))
    assert np.isnan(got[0]).any()
    assert not got[3].any()
    keep = [1, 2, 5, 6]
    assert rel(got[keep], want[keep]) < 1e-5


def test_two_slots_equal_one_of_twice_the_rank():
    small, large = make_spec(slot_rank=8), make_spec(slot_rank=16, num_slots=1)
    two = make_adapter(small, 2)
    join = lambda a, axis: np.concatenate([a[:1], a[1:]], axis=axis)
    arrays = {
        name: type(p)(A=join(p.A, 3), B=join(p.B, 2), scale=join(p.scale, 3))
        for name, p in two.arrays.items()
    }
    one = lj.Adapter("one", "one", 16, 1, arrays)
    states = (
        lj.write_slots(lj.init_state(small), [3, 0], two),
        lj.write_slots(lj.init_state(large), [0], one),
    )
    x = normal(np.random.default_rng(5), 3, 24)
    rows = jnp.zeros(3, jnp.int32)
    weights = jnp.array([[1.0, 0, 0, 1]]), jnp.ones((1, 1))
    first, second = (
        lj.lora_delta(x, s["down"], lj.make_routing(w, rows), layer=1)
        for s, w in zip(states, weights, strict=True)
    )
    assert rel(first, np.float64(second)) < 1e-6


def test_bad_shapes_are_named(no_shape_hook):
    spec = make_spec()
    slots = lj.init_state(spec)["qkv"]
    x, w = jnp.zeros((7, 16)), jnp.zeros((16, 32))
    for args, words in [
        ((x[:, :8], w), "d_in = 16"),
        ((x[None], w), "flatten"),
        ((x[:3], w), "T = 3"),
        ((x, w.T), "transpose"),
    ]:
        with pytest.raises(ValueError, match=words):
            lj.lora_linear(*args, slots, routing(), layer=0)
    with pytest.raises(ValueError, match="y must be"):
        lj.add_lora(x, x, slots, routing(), layer=0)
    narrow = lj.make_routing(jnp.zeros((1, 3)), jnp.zeros(7, jnp.int32))
    with pytest.raises(ValueError, match="S = 4 slots"):
        lj.lora_delta(x, slots, narrow, layer=0)
    with pytest.raises(ValueError, match="implementation"):
        lj.lora_delta(x, slots, routing(), layer=0, implementation="triton")


@pytest.mark.parametrize("block", [1, 3, 5])
def test_blocks_of_tokens_equal_float64(block):
    """Many slots and several blocks: each block takes its own active slots, in packs."""
    S, T, R = 40, 13, 8
    target = lj.Target("qkv", 16, (16, 8, 8), ("q", "k", "v"))
    spec = lj.LoraSpec((target,), 1, S, R, "float32")
    rng = np.random.default_rng(7)
    slots = [rng.choice(S, size=n, replace=False) for n in (0, 1, 3, 20)]
    row_weights = np.zeros((len(slots), S), np.float32)
    for row, used in enumerate(slots):
        row_weights[row, used] = rng.uniform(-1, 1, len(used))
    token_row = np.array([0, 0, 0, 0, -1, 0, 1, 1, 2, 2, 3, 3, 3], np.int32)
    state = jax.tree.map(lambda a: normal(rng, *a.shape), lj.init_state(spec))
    part = state["qkv"].parts[0]
    x = normal(rng, T, 16)

    @jax.jit
    def step(x, state, row_weights, token_row):
        routing = lj.make_routing(row_weights, token_row, block=block)
        return lj.lora_delta(x, state["qkv"], routing, layer=0)

    got = step(x, state, jnp.asarray(row_weights), jnp.asarray(token_row))
    W = np.where(token_row[:, None] >= 0, row_weights[token_row], 0)
    h = np.einsum("td,sgrd->tsgr", np.float64(x), np.float64(part.A[0])) * np.float64(part.scale[0])
    h *= W[:, :, None, None]
    cuts = np.split(np.float64(part.B[0]), [16, 24], axis=-1)
    want = np.concatenate([np.einsum("tsr,srn->tn", h[:, :, g], b) for g, b in enumerate(cuts)], 1)
    assert rel(got, want) < 1e-5
    assert not np.asarray(got)[W.any(axis=1) == 0].any()
