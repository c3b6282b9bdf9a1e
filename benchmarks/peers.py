"""Writes the table of peers.md: what LoRA adds to a layer, here and with the best peer.

    python benchmarks/peers.py decode.json [prefill.json] > benchmarks/peers.md

The files are those of `decode.py --json` and `prefill.py --json`. The peers' figures are in
peers.json, with the card, versions and date of their measurement.
"""

import argparse
import json
from pathlib import Path
from typing import Any

PEERS = json.loads(Path(__file__).with_name("peers.json").read_text())

#: (phase, tokens, adapters, rank)
Cell = tuple[str, int, int, int]


def best() -> dict[Cell, tuple[str, float]]:
    """The fastest peer of each cell, and the microseconds that it adds to a layer."""
    found = {}
    for cell in PEERS["cells"]:
        times = {n: us for n, us in cell["added_us"].items() if n not in PEERS["best_excludes"]}
        name = min(times, key=times.get)
        found[cell["phase"], cell["tokens"], cell["adapters"], cell["rank"]] = name, times[name]
    return found


def ours(files: list[Path]) -> tuple[dict[Cell, dict[str, Any]], list[str]]:
    """The records of our own cells of one rank, and where they were measured."""
    found, places = {}, []
    for file in files:
        data = json.loads(file.read_text())
        place = f"{data['device']}, JAX {data['jax']}, {data['model']}, {data['layers']} layers"
        places = [p for p in places if p != place] + [place]
        for record in data["cells"]:
            if "added_us" in record and record["rank"].isdigit():
                phase = "decode" if record["tokens"] <= 256 else "prefill"
                cell = phase, record["tokens"], record["adapters"], int(record["rank"])
                found[cell] = record
    return found, places


def table(mine: dict[Cell, dict[str, Any]], places: list[str]) -> str:
    """The page: every cell of either side; a figure that is missing is left out, not guessed."""
    theirs = best()
    versions = ", ".join(f"{name} {version}" for name, version in PEERS["versions"].items())
    lines = [
        "# What LoRA adds to a layer, beside other libraries' kernels",
        "",
        "Written by `benchmarks/peers.py`. Microseconds of a layer of Llama-3.1-8B in bfloat16.",
        "",
        f"Peers: {PEERS['card']}; {versions}; {PEERS['date']}. {PEERS['about']} The best of",
        f"{', '.join(theirs_names())} in each cell.",
        "",
        f"lorajax: {'; '.join(places)}. The whole step less the faster base step (plain XLA, or",
        "cuBLAS in a CUDA graph), so the glue between products and the routing count against it.",
        '"of the slots alone" is the step less the same step with no adapter active.',
        "",
        "| phase | tokens | adapters | rank | best peer | it adds | lorajax adds | ratio | "
        "of the slots alone | kept |",
        "|" + "---|" * 10,
    ]
    for cell in sorted(theirs.keys() | mine.keys()):
        name, us = theirs.get(cell, ("-", None))
        record = mine.get(cell, {})
        added = record.get("added_us")
        alone = None if added is None else _alone(record)
        ratio = None if us is None or added is None else added / us
        kept = record.get("retention")
        shown = [_text(us), _text(added), _text(ratio, 2), _text(alone), _text(kept, 3)]
        lines.append("| " + " | ".join([*map(str, cell), name, *shown]) + " |")
    return "\n".join(lines) + "\n"


def theirs_names() -> list[str]:
    """The peers that may be the best of a cell."""
    names = {name for cell in PEERS["cells"] for name in cell["added_us"]}
    return sorted(names - set(PEERS["best_excludes"]))


def _alone(record: dict[str, Any]) -> float:
    forms = [f for f in ("loop", "unrolled") if f"{f}_us" in record]
    form = min(forms, key=lambda f: record[f"{f}_us"])
    return record[f"{form}_us"] - record[f"{form}_none_us"]


def _text(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", help="of decode.py and prefill.py --json")
    print(table(*ours(parser.parse_args().files)), end="")


if __name__ == "__main__":
    main()
