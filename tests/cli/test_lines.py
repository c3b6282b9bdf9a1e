"""Input lines: what is read, and what each bad line is told."""

import json
import re

import pytest

from lorajax.cli.lines import read_lines
from lorajax.engine import Request, RequestError


def encode(text):
    if "?" in text:
        raise RequestError("no such words; got ?; drop it")
    return [len(word) for word in text.split()]


def read(*lines):
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return read_lines(raw, encode=encode, max_tokens=32)


def test_every_form_of_a_good_line():
    got = read(
        {"id": "a", "prompt_ids": [1, 2], "adapter": None, "max_tokens": 3},
        b"",
        b"  \n",
        {"id": "b", "prompt_ids": [1], "adapter": "sql"},
        {"id": "c", "prompt": "one three", "adapter": {"sql": 0.5, "chat": -1}, "max_tokens": 1},
        b'\xef\xbb\xbf{"id": "d", "prompt_ids": [], "max_tokens": null}',
    )
    assert [line.request for line in got] == [
        Request("a", (1, 2), 3, None),
        Request("b", (1,), 32, "sql"),
        Request("c", (3, 5), 1, {"sql": 0.5, "chat": -1}),
        Request("d", (), 32, None),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "must be a JSON object"),
        (b"\xff\xfe", "must be a JSON object"),
        (b"[" * 100_000, "must be a JSON object"),
        (b"[1]", r"must be a JSON object; got \[1\]"),
        (b'{"id": "x", "prompt_ids": [1], "adapter": {"a": NaN}}', "NaN"),
        ({"prompt_ids": [1]}, '"id" must be a string; got null'),
        ({"id": 3, "prompt_ids": [1]}, '"id" must be a string; got 3'),
        ({"id": "x"}, "neither"),
        ({"id": "x", "prompt": "a", "prompt_ids": [1]}, "both"),
        ({"id": "x", "prompt": 5}, '"prompt" must be a string'),
        ({"id": "x", "prompt": "?"}, "no such words"),
        ({"id": "x", "prompt_ids": [1, "2"]}, "list of integers"),
        ({"id": "x", "prompt_ids": [True]}, "list of integers"),
        ({"id": "x", "prompt_ids": 7}, "list of integers"),
        ({"id": "x", "prompt_ids": [1], "max_tokens": 1.5}, '"max_tokens" must be an integer'),
        ({"id": "x", "prompt_ids": [1], "max_tokens": True}, '"max_tokens" must be an integer'),
        ({"id": "x", "prompt_ids": [1], "adapter": ["sql"]}, '"adapter" must be null'),
        ({"id": "x", "prompt_ids": [1], "adapter": {"sql": True}}, '"adapter" must be null'),
        ({"id": "x", "prompt_ids": [1], "adapter": {"sql": "1"}}, '"adapter" must be null'),
        ({"id": "x", "prompt_ids": [1], "adaptor": "sql"}, r"keys must be among .*\['adaptor'\]"),
    ],
)
def test_a_bad_line_is_told_why_and_the_next_is_read(line, message):
    bad, good = read(line, {"id": "next", "prompt_ids": [1]})
    assert bad.request is None
    assert bad.error is not None
    assert bad.error.startswith("line 1: ")
    assert re.search(message, bad.error)
    assert len(bad.error) < 500
    assert good.request is not None


def test_an_id_is_given_once_but_a_failed_line_does_not_take_it():
    first, second, third = read(
        {"id": "a", "prompt_ids": "bad"},
        {"id": "a", "prompt_ids": [1]},
        {"id": "a", "prompt_ids": [2]},
    )
    assert first.error is not None
    assert second.error is None
    assert third.error is not None
    assert "'a' again" in third.error
