"""Decode: the base step, and what LoRA adds to it, in the shapes of a Llama.

    python benchmarks/decode.py --json decode.json --plot decode.png   # all cells, 32 layers
    python benchmarks/decode.py --json decode.json --jobs 12           # the same, compiled together
    python benchmarks/decode.py --quick                                # a few cells, 8 layers
    python benchmarks/decode.py --cells 64:8:16,8:8:16 --profile       # these; where the time goes
    python benchmarks/decode.py --quick --model tiny --implementation xla   # on a CPU, to try it
    python benchmarks/decode.py --mesh tensor=8 --cells 64:8:16 --model 70B    # see mesh.py

A cell is T tokens of D distinct adapters of rank r, spread evenly. `measure.py` says what the
columns are. Each cell is first checked against float64 (`checks.py`).
"""

import measure
import mesh
from shapes import Case

TOKENS = (1, 8, 32, 64, 128, 256)
ADAPTERS = (1, 8, 32, 64)
RANKS = (16, 8, 64)
MIXED = (8, 16, 32, 64)


def cells(quick: bool) -> list[Case]:
    """Every cell, or a few; the largest of a row has as many adapters as tokens."""
    tokens, ranks = ((8, 64, 256), (16,)) if quick else (TOKENS, RANKS)
    counts = {t: {1, 8, 64} if quick else {*ADAPTERS, t} for t in tokens}
    found = [Case.of(t, d, r) for r in ranks for t in tokens for d in sorted(counts[t]) if d <= t]
    return found if quick else found + [Case.of(t, 8, *MIXED) for t in TOKENS if t >= 8]


def main() -> None:
    parser = measure.options(__doc__, layers=32)
    parser.add_argument("--mesh", help='the step on a mesh, "tensor=8" or "data=2,tensor=4"')
    args = parser.parse_args()
    if args.quick:
        args.layers = min(args.layers, 8)
    cases = [Case.parse(text) for text in args.cells.split(",")] if args.cells else None
    (mesh if args.mesh else measure).main(args, cases or cells(args.quick))


if __name__ == "__main__":
    main()
