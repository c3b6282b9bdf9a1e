"""Draws the records of decode.py: the share of the base's speed that is kept, and what is added."""

from pathlib import Path
from typing import Any

import peers


def draw(records: list[dict[str, Any]], path: Path, rank: str = "16") -> None:
    """Two panels to a PNG: retention against tokens, and added us a layer against adapters.

    Needs matplotlib (extra `bench`).
    """
    from matplotlib.figure import Figure  # only here: nothing else needs it

    figure = Figure(figsize=(11, 4), layout="constrained")
    kept, added = figure.subplots(1, 2)
    rows = [r for r in records if r["rank"] == rank and "retention" in r]
    for count in sorted({r["adapters"] for r in rows}):
        line = sorted((r["tokens"], r["retention"]) for r in rows if r["adapters"] == count)
        kept.plot(*zip(*line, strict=True), marker="o", label=f"{count} adapters")
    kept.axhline(1.0, color="grey", linewidth=0.8)
    kept.set(xlabel="tokens", ylabel="base step / step with adapters")
    kept.set_xscale("log", base=2)
    added.set_xscale("log", base=2)
    best = {cell[1:3]: us for cell, (_, us) in peers.best().items() if str(cell[3]) == rank}
    for i, tokens in enumerate(sorted({r["tokens"] for r in rows})):
        line = sorted((r["adapters"], r["added_us"]) for r in rows if r["tokens"] == tokens)
        added.plot(*zip(*line, strict=True), marker="o", color=f"C{i}", label=f"{tokens} tokens")
        theirs = sorted((cell[1], us) for cell, us in best.items() if cell[0] == tokens)
        if theirs:
            label = f"{tokens} tokens, best peer"
            added.plot(*zip(*theirs, strict=True), "--", marker="x", color=f"C{i}", label=label)
    added.set(yscale="symlog", xlabel="adapters", ylabel="added, us a layer")
    for panel in (kept, added):
        panel.legend(fontsize="x-small")
    figure.suptitle(f"rank {rank}")
    figure.savefig(path, dpi=150)
