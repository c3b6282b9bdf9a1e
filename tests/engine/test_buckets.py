import numpy as np
import pytest

from lorajax.engine import buckets


def test_prompts_of_like_length_share_a_padded_batch():
    prompts = [(5, 6, 7), tuple(range(1, 21)), (8,)]
    small, large = buckets.prefill_batches(prompts, [4, 0, 2], max_length=64, max_tokens=4096)
    assert small.members == (0, 2)
    np.testing.assert_array_equal(small.tokens[:, :4], [[5, 6, 7, 0], [8, 0, 0, 0]])
    np.testing.assert_array_equal(small.lengths, [3, 1])
    np.testing.assert_array_equal(small.rows, [4, 2])
    assert small.tokens.shape == (2, 16)
    assert large.tokens.shape == (1, 32)


def test_padding_places_are_unused():
    (batch,) = buckets.prefill_batches([(1,)] * 3, [0, 1, 2], max_length=64, max_tokens=4096)
    assert batch.tokens.shape == (4, 16)
    assert batch.lengths[3] == 0
    assert batch.rows[3] == -1


def test_a_step_is_no_larger_than_the_limit_but_has_one_prompt():
    batches = buckets.prefill_batches([(1,) * 17] * 5, range(5), max_length=64, max_tokens=100)
    assert [b.tokens.shape for b in batches] == [(2, 32), (2, 32), (1, 32)]
    assert [i for b in batches for i in b.members] == [0, 1, 2, 3, 4]
    (batch,) = buckets.prefill_batches([(1,) * 60], [0], max_length=64, max_tokens=8)
    assert batch.tokens.shape == (1, 64)


@pytest.mark.parametrize(("max_length", "max_tokens"), [(96, 4096), (70, 64), (10, 4096)])
def test_the_listed_shapes_are_all_that_occur(max_length, max_tokens):
    listed = {
        (K, Q)
        for Q in buckets.bucket_widths(max_length, max_length)
        for K in buckets.bucket_counts(Q, 6, max_tokens)
    }
    seen = set()
    for length in range(1, max_length + 1):
        for count in range(1, 7):
            prompts = [(1,) * length] * count
            for batch in buckets.prefill_batches(
                prompts, range(count), max_length=max_length, max_tokens=max_tokens
            ):
                assert batch.tokens.shape[1] <= max_length
                seen.add(batch.tokens.shape)
    assert seen == listed
