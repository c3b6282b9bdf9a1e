"""Cache and steps: rows, padding, reuse, windows, and bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorajax import ModelError, SpecError, init_state, models
from tests import hf
from tests.models import support

FAMILY, N, C = "mistral_window", 4, 12
pytestmark = support.together(FAMILY)
MODEL = support.decoder(FAMILY)
GRAPH, PARAMS = support.split(MODEL)
TOKENS = (hf.uniform("steps", (N, C), 1.0) * 20 + 48).astype(np.int32)


def empty(fill: float = 0.0) -> models.KVCache:
    cache = models.init_cache(MODEL.config, N, C, "float32")
    return jax.tree.map(lambda x: jnp.full_like(x, fill), cache)


def prefill(cache, tokens, lengths, rows):
    lengths, rows = (np.asarray(x, np.int32) for x in (lengths, rows))
    logits, cache = support.prefill(GRAPH, PARAMS, None, cache, tokens, lengths, rows, None)
    return np.asarray(logits), cache


def decode(cache, tokens, positions):
    tokens, positions = (np.asarray(x, np.int32) for x in (tokens, positions))
    logits, cache = support.decode(GRAPH, PARAMS, None, cache, tokens, positions, None)
    return np.asarray(logits), cache


def equal(a, b) -> bool:
    same = jax.tree.map(lambda x, y: bool(np.array_equal(x, y, equal_nan=True)), a, b)
    return all(jax.tree.leaves(same))


def test_decode_continues_prefill():
    """Token by token past the window of 4, every score equals that of a longer prompt."""
    _, cache = prefill(empty(), TOKENS[:, :3], [3, 1, 2, 3], range(N))
    at = np.array([3, 1, 2, 3])
    for step in range(8):
        got, cache = decode(cache, TOKENS[range(N), at + step], at + step)
        want, _ = prefill(empty(), TOKENS, at + step + 1, range(N))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_window_forgets():
    """Two layers of window 4 see 7 tokens back; an eighth changes nothing, a seventh does."""
    changed = TOKENS.copy()
    changed[:, 4] += 1
    a, b = (prefill(empty(), t, [12] * N, range(N))[0] for t in (TOKENS, changed))
    np.testing.assert_array_equal(a, b)
    changed[:, 5] += 1
    assert (prefill(empty(), changed, [12] * N, range(N))[0] != a).any(axis=1).all()


@pytest.mark.parametrize("stale", [np.nan, np.inf, 1e30])
def test_rows_are_reused_without_a_trace(stale):
    """Bit for bit, whatever an earlier request left in the cache."""
    want, clean = prefill(empty(), TOKENS[:2, :6], [6, 4], [3, 1])
    got, dirty = prefill(empty(stale), TOKENS[:2, :6], [6, 4], [3, 1])
    np.testing.assert_array_equal(got, want)
    tokens, at = TOKENS[:, 7], [-1, 4, -1, 6]
    a, clean = decode(clean, tokens, at)
    b, dirty = decode(dirty, tokens, at)
    np.testing.assert_array_equal(a[[1, 3]], b[[1, 3]])
    assert np.isfinite(a[[1, 3]]).all()


@pytest.mark.parametrize("stale", [np.nan, 1e30])
def test_decoder_alone_never_reads_unwritten_positions(stale):
    step = jax.jit(lambda t, p, c: MODEL(t, p, c))
    at = np.where(np.arange(6)[None] < [[6], [4], [1], [0]], np.arange(6)[None], -1)
    at = at.astype(np.int32)
    want, _ = step(TOKENS[:, :6], at, empty())
    got, _ = step(TOKENS[:, :6], at, empty(stale))
    np.testing.assert_array_equal(np.asarray(got)[at >= 0], np.asarray(want)[at >= 0])
    assert np.isfinite(np.asarray(got)[at >= 0]).all()


def test_unused_prompts_and_idle_rows_change_nothing():
    _, cache = prefill(empty(), TOKENS[:, :5], [5] * N, range(N))
    want, alone = prefill(cache, TOKENS[:1, :6], [6], [2])
    rows, lengths = [2, 1, N, -1, 99], [6, 0, 3, 3, 0]
    got, padded = prefill(cache, np.tile(TOKENS[:1, :6], (5, 1)), lengths, rows)
    assert equal(alone, padded)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-5)
    for i in (0, 1, 3):  # rows that no prompt used
        assert equal(
            jax.tree.map(lambda x, i=i: x[i], cache), jax.tree.map(lambda x, i=i: x[i], padded)
        )
    _, idle = decode(cache, [1] * N, [-1] * N)
    assert equal(cache, idle)


def test_prompt_padding_is_not_read():
    for pad in (0, 95, -5, 10_000):
        tokens = np.where(np.arange(C) < 6, TOKENS, pad).astype(np.int32)
        got, _ = prefill(empty(), tokens, [6] * N, range(N))
        want, _ = prefill(empty(), TOKENS, [6] * N, range(N))
        np.testing.assert_array_equal(got, want)


def test_faults_stay_in_their_row():
    """Ids, positions and lengths outside their bounds give NaN there, and nothing elsewhere."""
    tokens = TOKENS.copy()
    tokens[1, 2], tokens[2, 0] = 96, -1
    want, _ = prefill(empty(), TOKENS, [5, 5, 5, 5], range(N))
    got, cache = prefill(empty(), tokens, [5, 5, 5, 13], range(N))
    assert np.isnan(got[1:]).all()
    np.testing.assert_array_equal(got[0], want[0])
    got, after = decode(cache, TOKENS[:, 5], [5, -1, C, 5])
    assert np.isnan(got[2]).all()
    assert np.isfinite(got[0]).all()
    assert equal(jax.tree.map(lambda x: x[2], cache), jax.tree.map(lambda x: x[2], after))


def test_prompts_longer_than_the_cache_are_refused():
    with pytest.raises(ModelError, match="13 tokens for 12"):
        prefill(empty(), np.zeros((1, 13), np.int32), [1], [0])


def test_state_without_routing_is_refused():
    spec = support.spec_for(FAMILY, num_slots=1)
    at = jnp.zeros((N, 1), jnp.int32)
    with pytest.raises(SpecError, match="routing"):
        MODEL(at, at, empty(), init_state(spec))


def test_nothing_compiles_anew(compiles):
    """Other tokens, lengths, rows and weights run the compiled steps."""
    spec = support.spec_for(FAMILY, num_slots=2)
    state = init_state(spec)

    def both(seed):
        rng = np.random.default_rng(seed)
        weights = rng.uniform(size=(N, 2)).astype(np.float32)
        rows, lengths = rng.permutation(N)[:2], rng.integers(0, 7, 2)
        tokens = rng.integers(0, 96, (2, 6)).astype(np.int32)
        _, cache = support.prefill(
            GRAPH,
            PARAMS,
            state,
            empty_cache,
            tokens,
            lengths.astype(np.int32),
            rows.astype(np.int32),
            weights,
        )
        support.decode(
            GRAPH,
            PARAMS,
            state,
            cache,
            rng.integers(0, 96, N).astype(np.int32),
            rng.integers(-1, C, N).astype(np.int32),
            weights,
        )

    empty_cache = empty()
    both(0)
    with compiles.none():
        for seed in range(1, 6):
            both(seed)
