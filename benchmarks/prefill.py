"""Prefill: the base step, and what LoRA adds to it, in the shapes of a Llama.

    python benchmarks/prefill.py --json prefill.json --jobs 6
    python benchmarks/prefill.py --quick

Tokens come in equal segments, one for each adapter. Options and columns as in decode.py.
"""

import measure
from shapes import Case


def cells(quick: bool) -> list[Case]:
    """1 and 8 adapters; 4096 tokens is where the peers were measured."""
    tokens, ranks = ((2048,), (16,)) if quick else ((2048, 4096, 8192), (16, 64))
    return [Case.of(t, d, r, ordered=True) for r in ranks for t in tokens for d in (1, 8)]


def main() -> None:
    args = measure.options(__doc__, layers=4).parse_args()
    cases = args.cells and [Case.parse(text, ordered=True) for text in args.cells.split(",")]
    measure.main(args, cases or cells(args.quick))


if __name__ == "__main__":
    main()
