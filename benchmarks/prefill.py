"""Prefill on a Hopper GPU: the base step, and what LoRA adds to it, in the shapes of Llama-3.1-8B.

    python benchmarks/prefill.py --json prefill.json

Tokens come in equal segments, one for each adapter. Columns as in decode.py.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from decode import check
from gpu_layers import (
    Case,
    base_step,
    fused_step,
    make_adapters,
    make_weights,
    median_us,
    random,
    unstack,
    xla_step,
)

TOKENS = (2048, 8192)
ADAPTERS = (1, 8)
RANKS = (16, 64)


def segments(case: Case, slots: int) -> jax.Array:
    """`[T, S]`: the tokens of each adapter next to each other."""
    each = case.rank // case.slot_rank
    held = np.random.default_rng(0).permutation(slots)[: case.adapters * each]
    rows = np.zeros((case.tokens, slots), np.float32)
    of = np.arange(case.tokens) * case.adapters // case.tokens
    rows[np.arange(case.tokens)[:, None], held.reshape(case.adapters, each)[of]] = 1.0
    return jnp.asarray(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after this time")
    args = parser.parse_args()
    start, records, layers = time.time(), [], args.layers
    weights = make_weights(layers, seed=1)
    flat = unstack(weights, layers)
    for rank in RANKS:
        slots = 64
        adapters = make_adapters(layers, slots, min(rank, 16), seed=10)
        each = unstack(adapters, layers)
        for tokens in TOKENS:
            x = random(jax.random.key(tokens), (tokens, 4096), 1.0)
            base, plain, fused = (jax.jit(f) for f in (base_step, xla_step, fused_step))
            for count in ADAPTERS:
                if time.time() - start > args.seconds:
                    continue
                case = Case(tokens, count, rank)
                rows = segments(case, slots)
                worst = check(case, weights, adapters, rows)
                found = {
                    "base_us": median_us(base, x, flat) / layers,
                    "xla_us": median_us(plain, x, flat, each, rows) / layers,
                    "fused_us": median_us(fused, x, weights, adapters, rows) / layers,
                    "fused_base_us": median_us(fused, x, weights, adapters, rows * 0) / layers,
                    "error_vs_xla": worst,
                }
                records.append({"tokens": tokens, "adapters": count, "rank": rank} | found)
                print(
                    f"T {tokens} D {count} r {rank}  base {found['base_us']:.0f}  "
                    f"xla {found['xla_us']:.0f}  mosaic_gpu {found['fused_us']:.0f} "
                    f"(none active {found['fused_base_us']:.0f})  "
                    f"kept {found['base_us'] / found['fused_us']:.3f}  err/xla {worst:.2f}",
                    flush=True,
                )
        del adapters, each
    if args.json:
        args.json.write_text(json.dumps({"cells": records}, indent=1))


if __name__ == "__main__":
    main()
