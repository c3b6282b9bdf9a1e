"""Measured choices for the products of one kind of GPU: `tiles/<kind>.json`, if there is one.

A file is a list of entries, each with the product (`d_in`, `d_out`, `tokens`) and every field of
`Tile`. `benchmarks/tune_gpu.py` writes it. A product without an entry follows the rules of
`plan.py`. An entry knows nothing of adapters, so base rows keep their bits when they come and go.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources

KEY = ("d_in", "d_out", "tokens")


@dataclass(frozen=True)
class Tile:
    """What a measurement may choose for a launch.

    Attributes:
        split: Parts along K of an output tile.
        depth: Elements of K of a pipeline stage.
        stages: Stages of the pipeline.
    """

    split: int
    depth: int
    stages: int


def find(kind: str, d_in: int, d_out: int, tokens: int) -> Tile | None:
    """The entry of a product on a GPU, or None.

    Args:
        kind: JAX's name of the device, "NVIDIA H200".
        d_in: Width of x.
        d_out: Width of y.
        tokens: T.
    """
    return table(kind).get((d_in, d_out, bucket(tokens)))


def bucket(tokens: int) -> int:
    """The token count whose entry serves T: the next power of two, at least 8."""
    return 1 << max(3, (tokens - 1).bit_length())


def file_name(kind: str) -> str:
    """The name of the file of a device: "nvidia-h200.json"."""
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") + ".json"


@functools.cache
def table(kind: str) -> Mapping[tuple[int, int, int], Tile]:
    """The entries of a GPU; read once, empty where it has no file."""
    name = file_name(kind)
    file = resources.files("lorajax.kernels_pallas.gpu").joinpath("tiles", name)
    return parse(file.read_text(), name) if file.is_file() else {}


def parse(text: str, name: str) -> Mapping[tuple[int, int, int], Tile]:
    """The entries of a file's text, by (d_in, d_out, tokens).

    Raises:
        ValueError: An entry is malformed or there twice; the message names the file and the entry.
    """
    names = {*KEY, *(field.name for field in fields(Tile))}
    found: dict[tuple[int, int, int], Tile] = {}
    for entry in json.loads(text):
        whole = isinstance(entry, dict) and set(entry) == names
        if not whole or any(type(v) is not int or v < 1 for v in entry.values()):
            raise ValueError(
                f"an entry must have exactly the positive integers {sorted(names)}; got {entry} in "
                f"{name}; write the file with benchmarks/tune_gpu.py"
            )
        d_in, d_out, tokens = key = tuple(entry.pop(k) for k in KEY)
        if bucket(tokens) != tokens or key in found:
            raise ValueError(
                f"tokens must be a power of two of at least 8, and a product must be named once; "
                f"got {tokens} for {d_in}x{d_out} in {name}; keep one entry"
            )
        found[d_in, d_out, tokens] = Tile(**entry)
    return found
