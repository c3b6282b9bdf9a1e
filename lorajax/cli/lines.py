"""Lines of JSON to requests and back. A bad line gives an error, never an exception."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lorajax.engine import Request, RequestError
from lorajax.engine.request import AdapterChoice

_KEYS = ("id", "prompt_ids", "prompt", "adapter", "max_tokens")

#: Text to token ids.
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Line:
    """A line of input.

    Attributes:
        id: Its id, as given; None if it has none.
        request: What it asks for, or None.
        error: Why it cannot be read, or None.
    """

    id: Any
    request: Request | None = None
    error: str | None = None


def read_lines(lines: Iterable[bytes], *, encode: Encode, max_tokens: int) -> list[Line]:
    """Reads all lines; blank ones are skipped.

    Args:
        lines: JSON objects, one a line, in UTF-8.
        encode: Tokenizer for lines with a "prompt".
        max_tokens: For lines without their own.
    """
    seen: set[str] = set()
    out = []
    for number, raw in enumerate(lines, 1):
        if raw.strip():
            out.append(_read(raw, number, seen, encode=encode, max_tokens=max_tokens))
    return out


def _read(raw: bytes, number: int, seen: set[str], *, encode: Encode, max_tokens: int) -> Line:
    identity: Any = None
    try:
        try:
            value = json.loads(raw.decode("utf-8-sig"), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"a line must be a JSON object; got {error}; correct it") from error
        if not isinstance(value, dict):
            raise RequestError(
                f'a line must be a JSON object; got {_short(value)}; write {{"id": ..., '
                '"prompt_ids": [...]}'
            )
        identity = value.get("id")
        request = _request(value, encode=encode, max_tokens=max_tokens)
        if request.id in seen:
            raise RequestError(f"an id must be given once; got {request.id!r} again; rename one")
    except RequestError as error:
        return Line(identity, error=f"line {number}: {error}")
    seen.add(request.id)
    return Line(request.id, request)


def _request(value: dict[str, Any], *, encode: Encode, max_tokens: int) -> Request:
    unknown = sorted(set(value) - set(_KEYS))
    if unknown:
        raise RequestError(f"keys must be among {list(_KEYS)}; got {unknown}; drop or rename them")
    if not isinstance(value.get("id"), str):
        raise RequestError(f'"id" must be a string; got {_short(value.get("id"))}; name each line')
    wanted = value.get("max_tokens")
    wanted = max_tokens if wanted is None else wanted
    if not _is_int(wanted):
        raise RequestError(f'"max_tokens" must be an integer; got {_short(wanted)}; give a number')
    return Request(
        id=value["id"],
        prompt_ids=_prompt(value, encode),
        max_tokens=wanted,
        adapter=_adapter(value.get("adapter")),
    )


def _prompt(value: dict[str, Any], encode: Encode) -> tuple[int, ...]:
    ids, text = value.get("prompt_ids"), value.get("prompt")
    if (ids is None) == (text is None):
        raise RequestError(
            'a line must have either "prompt_ids" or "prompt"; got '
            f"{'neither' if ids is None else 'both'}; give one"
        )
    if ids is None:
        if not isinstance(text, str):
            raise RequestError(f'"prompt" must be a string; got {_short(text)}; give text')
        return tuple(encode(text))
    if not isinstance(ids, list) or not all(_is_int(i) for i in ids):
        raise RequestError(
            f'"prompt_ids" must be a list of integers; got {_short(ids)}; give token ids'
        )
    return tuple(ids)


def _adapter(value: object) -> AdapterChoice:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict) or not all(_is_number(w) for w in value.values()):
        raise RequestError(
            f'"adapter" must be null, a name, or {{name: weight}}; got {_short(value)}; use null '
            "for the base model"
        )
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name}, which is not JSON")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
