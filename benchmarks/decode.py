"""Decode on a Hopper GPU: the base step, and what LoRA adds to it, in the shapes of Llama-3.1-8B.

    python benchmarks/decode.py --json decode.json            # all cells, 32 layers
    python benchmarks/decode.py --quick                       # a few cells, 8 layers
    python benchmarks/decode.py --modules                     # device time of each module alone

Columns: us a layer of the base step in plain XLA (unrolled, its fastest form), of base + LoRA with
`xla` and with `mosaic_gpu`, then for `mosaic_gpu` the share of the base step's speed that is kept,
the us that LoRA adds, and the ratio to the time to move all bytes once. Each cell is first checked
against float32 on fresh inputs.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import jax
from gpu_layers import (
    MODULES,
    Case,
    base_step,
    error,
    fused_step,
    kernel_us,
    make_adapters,
    make_weights,
    median_us,
    random,
    unstack,
    xla_step,
)
from jax import lax
from jax import numpy as jnp

from lorajax.kernels_pallas import lora_linear, make_routing

TOKENS = (1, 8, 32, 64, 128, 256)
QUICK_TOKENS = (8, 64, 256)
ADAPTERS = (1, 8, 32, 64)
RANKS = (16, 8, 64)


def cells(tokens: int, rank: int, quick: bool) -> list[Case]:
    """The cases of one row of the table; the last has as many adapters as tokens."""
    counts = (1, 8, 64) if quick else (*ADAPTERS, tokens)
    return [Case(tokens, d, rank) for d in sorted({d for d in counts if d <= tokens})]


def check(case: Case, weights, adapters, rows) -> float:
    """The worst error of a module, relative to that of `xla`; stops if it is over 2."""
    ratios = []
    for i, name in enumerate(MODULES):
        mine, theirs = error(name, case, weights[name], adapters[name], rows, seed=100 + i)
        ratios.append(mine / theirs)
        if not mine <= 2 * theirs:
            sys.exit(f"{name}, {case}: error {mine:.2e}, xla {theirs:.2e}")
    return max(ratios)


def module_us(name, case, weights, adapters, rows, x) -> dict[str, float]:
    """Device us of one module a layer."""
    layers = weights.shape[0]

    def base(x, ws):
        return [jnp.dot(x, w) for w in ws]

    def fused(x, w, a, rows):
        route = make_routing(rows, jnp.arange(case.tokens))

        def step(i, y):
            return lora_linear(x, w, a, route, layer=i, implementation="mosaic_gpu")

        return lax.fori_loop(0, layers, step, jnp.zeros((case.tokens, w.shape[-1]), x.dtype))

    def plain(x, ws, a, rows):
        route = make_routing(rows, jnp.arange(case.tokens))
        return [
            lora_linear(x, w, t, route, implementation="xla") for w, t in zip(ws, a, strict=True)
        ]

    ws, each = unstack(weights, layers), unstack(adapters, layers)
    return {
        "base": kernel_us(jax.jit(base), x, ws) / layers,
        "xla": kernel_us(jax.jit(plain), x, ws, each, rows) / layers,
        "mosaic_gpu": kernel_us(jax.jit(fused), x, weights, adapters, rows) / layers,
        "mosaic_gpu, none active": kernel_us(jax.jit(fused), x, weights, adapters, rows * 0)
        / layers,
    }


def time_step(functions, case: Case, base_us, arrays, x, rows, layers) -> dict[str, float]:
    """Microseconds a layer of a step with LoRA, by implementation, and how the kernel compares."""
    plain, fused = functions
    weights, flat, adapters, each = arrays
    begun = time.time()
    jax.block_until_ready(fused(x, weights, adapters, rows))
    first = time.time() - begun
    found = {
        "base_us": base_us,
        "xla_us": median_us(plain, x, flat, each, rows) / layers,
        "fused_us": median_us(fused, x, weights, adapters, rows) / layers,
        "fused_base_us": median_us(fused, x, weights, adapters, rows * 0) / layers,
        "first_call_s": first,
    }
    fused_us = found["fused_us"]
    print(
        f"T {case.tokens:3} D {case.adapters:3} r {case.rank:2}  base {base_us:6.1f}  "
        f"xla {found['xla_us']:6.1f}  mosaic_gpu {fused_us:6.1f} "
        f"(none active {found['fused_base_us']:6.1f})  kept {base_us / fused_us:.3f}  "
        f"added {fused_us - base_us:6.1f}  x floor {fused_us / case.floor_us():.2f}",
        flush=True,
    )
    return found | {"retention": base_us / fused_us}


def run_rank(rank: int, args, layers: int, weights, flat, deadline: float) -> list[dict]:
    """Every cell of one rank."""
    short = args.quick or args.modules
    slot_rank = min(rank, 16)
    slots = 64 * rank // slot_rank if short else 256 * max(1, rank // slot_rank)
    adapters = make_adapters(layers, slots, slot_rank, seed=10)
    each = None if args.modules else unstack(adapters, layers)
    records = []
    for tokens in QUICK_TOKENS if short else TOKENS:
        x = random(jax.random.key(tokens), (tokens, 4096), 1.0)
        base, *functions = (jax.jit(f) for f in (base_step, xla_step, fused_step))
        base_us = 0.0 if args.modules else median_us(base, x, flat) / layers
        for case in cells(tokens, rank, short):
            if time.time() > deadline:
                return records
            rows = case.weights(slots, seed=tokens)
            record = {"tokens": tokens, "adapters": case.adapters, "rank": rank}
            record["floor_us"] = case.floor_us()
            record["error_vs_xla"] = check(case, weights, adapters, rows)
            if not args.modules:
                arrays = (weights, flat, adapters, each)
                records.append(
                    record | time_step(functions, case, base_us, arrays, x, rows, layers)
                )
                continue
            for name, (d_in, _) in MODULES.items():
                inputs = random(jax.random.key(7), (tokens, d_in), 1.0)
                found = module_us(name, case, weights[name], adapters[name], rows, inputs)
                records.append(record | {"module": name} | found)
                columns = " ".join(f"{k} {v:.1f}" for k, v in found.items())
                print(f"T {tokens:3} D {case.adapters:3} r {rank:2} {name:8} {columns}", flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few cells, 8 layers")
    parser.add_argument("--modules", action="store_true", help="time single modules")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after this time")
    args = parser.parse_args()
    deadline = time.time() + args.seconds
    short = args.quick or args.modules
    layers = args.layers or (8 if short else 32)
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.device_kind}, {layers} layers")
    weights = make_weights(layers, seed=1)
    flat = None if args.modules else unstack(weights, layers)
    records = []
    for rank in RANKS[: 1 if short else None]:
        records += run_rank(rank, args, layers, weights, flat, deadline)
        if args.json:
            args.json.write_text(
                json.dumps({"device": device.device_kind, "cells": records}, indent=1)
            )


if __name__ == "__main__":
    main()
