import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import lorajax as lj


@st.composite
def batches(draw):
    # Few shapes, since each is compiled; the contents are what matters.
    N, S, T = draw(st.sampled_from([(1, 1, 1), (3, 5, 12)]))
    block = draw(st.sampled_from([None, 1, 5]))
    weight = st.sampled_from([0.0, 0.0, 1.0, 0.25, -0.5])
    rows = [[draw(weight) for _ in range(S)] for _ in range(N)]
    token_row = [draw(st.integers(-1, N - 1)) for _ in range(T)]
    return np.array(rows, np.float32), np.array(token_row, np.int32), block


@settings(max_examples=150, deadline=None)
@given(batches())
def test_routing_is_the_weights_and_their_sparsity(batch):
    row_weights, token_row, block = batch
    routing = lj.make_routing(jnp.asarray(row_weights), jnp.asarray(token_row), block=block)
    S, T = row_weights.shape[1], len(token_row)
    want = np.stack([row_weights[r] if r >= 0 else np.zeros(S) for r in token_row], axis=1)
    np.testing.assert_array_equal(routing.weights, want)
    block = block or T
    assert routing.block == block
    assert routing.active.shape == (-(-T // block), S)
    for p, (active, count) in enumerate(zip(routing.active, routing.count, strict=True)):
        used = np.flatnonzero((want[:, p * block : (p + 1) * block] != 0).any(axis=1))
        np.testing.assert_array_equal(active[: int(count)], used)
        np.testing.assert_array_equal(np.sort(active), np.arange(S))


def test_long_batches_get_blocks():
    routing = lj.make_routing(jnp.ones((1, 3)), jnp.zeros((600,), jnp.int32))
    assert (routing.block, routing.active.shape) == (256, (3, 3))


def test_a_row_outside_the_batch_is_nan_and_not_another_row():
    routing = jax.jit(lj.make_routing)(jnp.eye(2), jnp.array([0, 2, -2, -1], jnp.int32))
    np.testing.assert_array_equal(np.isnan(routing.weights).all(axis=0), [False, True, True, False])
    assert not np.isnan(routing.weights[:, [0, 3]]).any()
