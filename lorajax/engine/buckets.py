"""Padded shapes: powers of two, so that few programs are compiled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

#: Prompts are padded to at least this many tokens.
MIN_PROMPT = 16


@dataclass(frozen=True)
class PrefillBatch:
    """Prompts of one prefill step, padded.

    Attributes:
        members: Indices of the prompts.
        places: For each of the members, its place among the K.
        tokens: `i32[K, Q]`, zeros behind each prompt.
        lengths: `i32[K]`, tokens of each prompt; 0 for padding.
        rows: `i32[K]`, row of the batch (and cache) of each prompt; -1 for padding.
    """

    members: tuple[int, ...]
    places: tuple[int, ...]
    tokens: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray

    @classmethod
    def empty(cls, count: int, width: int) -> "PrefillBatch":
        """K = `count` unused places of Q = `width` tokens."""
        return cls(
            members=(),
            places=(),
            tokens=np.zeros((count, width), np.int32),
            lengths=np.zeros(count, np.int32),
            rows=np.full(count, -1, np.int32),
        )


def round_up(n: int) -> int:
    """The power of two at or above n."""
    return 1 << max(0, n - 1).bit_length()


def bucket_width(length: int, max_length: int) -> int:
    """Q of a prompt of `length` tokens, where a cache row has `max_length` positions."""
    return min(max(MIN_PROMPT, round_up(length)), max_length)


def bucket_widths(max_prompt: int, max_length: int) -> list[int]:
    """Every Q of prompts of up to `max_prompt` tokens."""
    exponents = range(round_up(max_prompt).bit_length())
    return sorted({bucket_width(1 << e, max_length) for e in exponents})


def most_prompts(width: int, max_tokens: int) -> int:
    """The largest K of a step of at most `max_tokens` tokens: a power of two, at least 1."""
    return 1 << (max(1, max_tokens // width).bit_length() - 1)


def bucket_counts(width: int, num_rows: int, max_tokens: int) -> list[int]:
    """Every K of prompts padded to `width`, for a batch of `num_rows`."""
    most = min(round_up(num_rows), most_prompts(width, max_tokens))
    return [1 << e for e in range(most.bit_length())]


def prefill_batches(
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    *,
    max_length: int,
    max_tokens: int,
    shards: int = 1,
    shard_rows: int = 1 << 30,
) -> list[PrefillBatch]:
    """Groups prompts of like length and pads each group to powers of two.

    At most log2(max_length) x log2(len(prompts)) shapes exist, so that many programs at most.

    Args:
        prompts: Token ids.
        rows: Row of the batch of each prompt.
        max_length: A padded prompt is never longer: the length of a cache row.
        max_tokens: A step has at most this many tokens a shard, padding included, or one prompt.
        shards: Devices that the rows are cut over; each gets the prompts of its own rows, and an
            equal share of K.
        shard_rows: Rows of each.
    """
    groups: dict[int, list[list[int]]] = {}
    for i, prompt in enumerate(prompts):
        width = bucket_width(len(prompt), max_length)
        groups.setdefault(width, [[] for _ in range(shards)])[rows[i] // shard_rows].append(i)
    batches = []
    for width, group in sorted(groups.items()):
        most = most_prompts(width, max_tokens)
        for start in range(0, max(len(own) for own in group), most):
            parts = [own[start : start + most] for own in group]
            batches.append(_padded(parts, prompts, rows, width))
    return batches


def _padded(
    parts: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    width: int,
) -> PrefillBatch:
    """One batch; `parts` are the indices of each shard's prompts."""
    share = round_up(max(len(part) for part in parts))
    batch = PrefillBatch.empty(len(parts) * share, width)
    members = [i for part in parts for i in part]
    places = [s * share + k for s, part in enumerate(parts) for k in range(len(part))]
    for i, k in zip(members, places, strict=True):
        batch.tokens[k, : len(prompts[i])] = prompts[i]
        batch.lengths[k], batch.rows[k] = len(prompts[i]), rows[i]
    return replace(batch, members=tuple(members), places=tuple(places))
