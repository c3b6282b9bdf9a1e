"""Finds the best tiles for a GPU's products and writes them to kernels_pallas/gpu/tiles/.

    python benchmarks/tune_gpu.py                        # all products of 8B, up to 256 tokens
    python benchmarks/tune_gpu.py --modules o down --tokens 64 --dry

Every candidate is checked against float64 and timed with 0 and with 8 active adapters of rank 16;
the sum counts. An entry is written where the best is at least 1 % faster than the rules of plan.py;
other entries of the file stay. Commit the file, and the next user of such a card has it.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import checks
import jax
from clocks import compiled, median_us
from gpu_layers import make_adapters, make_inputs, make_weights, random
from modules import stacked
from shapes import MODELS, Case, Shapes

from lorajax.kernels_pallas.gpu import launch, tiles
from lorajax.kernels_pallas.gpu.plan import MAX_BLOCK, Device, Plan, unsupported
from lorajax.kernels_pallas.gpu.tiles import Tile

GAIN = 0.99  #: An entry must take at most this share of the time by the rules.


def rule(device: Device, case: Case, d_in: int, slices: tuple[int, ...]) -> Plan:
    """The plan of a product by the rules alone."""
    return Plan(
        device=device,
        tokens=case.tokens,
        block=min(case.tokens, MAX_BLOCK),
        d_in=d_in,
        d_out=sum(slices),
        slots=case.slots,
        rank=case.slot_rank,
        slices=slices,
        has_base=True,
    )


def candidates(plan: Plan) -> Iterator[Tile]:
    """Tiles that a plan can run with, without the rules' own."""
    own = Tile(plan.split, plan.depth, plan.stages)
    for split, depth in itertools.product(range(1, 7), (64, 128)):
        most = min(12, dataclasses.replace(plan, tile=Tile(split, depth, 2)).most_stages)
        for stages in sorted({most, most * 3 // 4, most // 2}):
            tile = Tile(split, depth, stages)
            if tile != own and unsupported(dataclasses.replace(plan, tile=tile)) is None:
                yield tile


def time_us(shapes: Shapes, name: str, case: Case, weights, adapters, tile: Tile | None) -> float:
    """Microseconds of a launch without adapters and of one with; an error stops the run."""
    w, slots = weights[name], adapters[name]
    d_in, _ = shapes.modules[name]
    x, (_, rows) = random(jax.random.key(7), (case.tokens, d_in), 1.0), make_inputs(shapes, case)
    with mock.patch.object(launch, "find_tile", return_value=tile):
        checks.product.clear_cache()
        found = checks.errors(shapes, name, case, w, slots, implementation="mosaic_gpu", seed=7)
        if not found["mosaic_gpu"] <= 2 * min(found["xla"], found["merged"]):
            raise ValueError(f"a tile must not change the result; got {found} for {tile}, {case}")
        program, _ = compiled(functools.partial(stacked, "mosaic_gpu"), x, w, slots, rows)
    return sum(median_us(program, x, w, slots, r) for r in (rows * 0, rows)) / w.shape[0]


def tune(shapes: Shapes, name: str, case: Case, device: Device, arrays) -> Tile | None:
    """The best tile of a product, or None where the rules are as good."""
    plan = rule(device, case, *shapes.modules[name])
    base = time_us(shapes, name, case, *arrays, None)
    best, least = None, base * GAIN
    for tile in candidates(plan):
        us = time_us(shapes, name, case, *arrays, tile)
        if us < least:
            best, least = tile, us
    own = Tile(plan.split, plan.depth, plan.stages)
    better = f"best {least:6.1f} {best}" if best else "nothing better"
    print(f"{name:8} T {case.tokens:4}  rules {base:6.1f} {own}  {better}", flush=True)
    return best


def entries_of(table) -> list[dict[str, int]]:
    """A table as its file has it."""
    return [
        dict(zip(tiles.KEY, key, strict=True)) | dataclasses.asdict(tile)
        for key, tile in sorted(table.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="8B")
    parser.add_argument("--modules", nargs="+", choices=MODELS["8B"].modules)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no product after this")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    args = parser.parse_args()
    device = launch.current_device()
    if not isinstance(device, Device):
        parser.error(device)
    shapes, deadline = MODELS[args.model], time.monotonic() + args.seconds
    weights, found = make_weights(shapes, args.layers), dict(tiles.table(device.kind))
    path = Path(tiles.__file__).parent / "tiles" / tiles.file_name(device.kind)
    all_slots = Case.of(8, 8, 16)
    adapters = make_adapters(shapes, args.layers, all_slots.slots, all_slots.slot_rank)
    for tokens, name in itertools.product(args.tokens, args.modules or shapes.modules):
        if time.monotonic() > deadline:
            print("out of time")
            break
        case = Case.of(tokens, min(tokens, 8), 16)
        best = tune(shapes, name, case, device, (weights, adapters))
        d_in, slices = shapes.modules[name]
        key = d_in, sum(slices), tiles.bucket(tokens)
        found.pop(key, None)
        found |= {key: best} if best else {}
        if not args.dry:
            rows = ",\n ".join(json.dumps(entry) for entry in entries_of(found))
            path.write_text(f"[{rows}]\n")


if __name__ == "__main__":
    main()
