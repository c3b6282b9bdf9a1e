"""Finds the best tiles for a GPU's products and writes them to kernels_pallas/gpu/tiles/.

    python benchmarks/tune_gpu.py --jobs 12              # all products of 8B, up to 256 tokens
    python benchmarks/tune_gpu.py --modules o down --tokens 64 --dry

Every candidate is one program: a loop over the layers of one product. It is checked against float64
and timed with 0 and with 8 active adapters of rank 16; the sum counts. An entry is written where
the best is at least 1 % faster than the rules of plan.py; other entries of the file stay. Commit
the file, and the next user of such a card has it.
"""

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import checks
import jax
import jobs
import numpy as np
from clocks import compiled, median_us
from gpu_layers import make_inputs, module_adapters, module_weights, random
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
    """Tiles that a plan can run with: near the rules' split, the ring full to half full."""
    own = Tile(plan.split, plan.depth, plan.stages)
    near = range(max(1, own.split - 1), own.split + 2)
    for split, depth in itertools.product(near, (64, 128)):
        most = min(12, dataclasses.replace(plan, tile=Tile(split, depth, 2)).most_stages)
        for stages in sorted({most, most * 3 // 4, most // 2}):
            tile = Tile(split, depth, stages)
            if tile != own and unsupported(dataclasses.replace(plan, tile=tile)) is None:
                yield tile


@dataclass(frozen=True)
class Candidate:
    """A tile of one product, or None for the rules."""

    name: str
    tokens: int
    tile: Tile | None

    @property
    def case(self) -> Case:
        """What it is timed on."""
        return Case.of(self.tokens, min(self.tokens, 8), 16)

    def __str__(self) -> str:
        return f"{self.name} T {self.tokens} {self.tile or 'rules'}"


@dataclass
class Bench:
    """The products that candidates run.

    Attributes:
        shapes: Widths.
        layers: L.
        implementation: "mosaic_gpu".
    """

    shapes: Shapes
    layers: int
    implementation: str
    programs: dict[Candidate, Callable] = field(default_factory=dict, init=False)
    models: dict[tuple, tuple] = field(default_factory=dict, init=False)

    def operands(self, one: Candidate) -> tuple:
        """x, w, adapters and row weights; the same for all candidates of a product."""
        name, case = one.name, one.case
        x = random(jax.random.key(7), (case.tokens, self.shapes.modules[name][0]), 1.0)
        slots = {"slots": case.slots, "rank": case.slot_rank}
        adapters = module_adapters(self.shapes, self.layers, name, **slots)
        _, rows = make_inputs(self.shapes, case)
        return x, module_weights(self.shapes, self.layers, name), adapters, rows

    def prepare(self, one: Candidate) -> None:
        """Compiles a candidate, and checks what it computes in the last layer.

        Raises:
            ValueError: The error is more than twice that of the better of two bfloat16 models.
        """
        arrays = self.operands(one)
        with mock.patch.object(launch, "find_tile", return_value=one.tile):
            program, _ = compiled(functools.partial(stacked, self.implementation), *arrays)
        want, others = self.exact(one, *arrays[:3])
        checks.poison(want.shape)
        found = checks.distance(program(*arrays), want)
        if not found <= 2 * min(others.values()):
            raise ValueError(f"a tile must not change the result; got {found} beside {others}")
        self.programs[one] = program

    def exact(self, one: Candidate, x, w, adapters) -> tuple[np.ndarray, dict[str, float]]:
        """The last layer in float64, and the errors of other models; computed once a product."""
        key = one.name, one.tokens
        if key not in self.models:
            at = (self.layers - 1) % adapters.A.shape[0]
            last = jax.tree.map(lambda a: a[at : at + 1], adapters)
            self.models[key] = checks.models(x, w[-1:], last, one.case, one.tokens)
        return self.models[key]

    def measure(self, one: Candidate) -> dict[str, float]:
        """Microseconds of a launch without adapters and of one with, together."""
        if one not in self.programs:
            self.prepare(one)
        *arrays, rows = self.operands(one)
        program = self.programs[one]
        both = [median_us(program, *arrays, r, runs=20) for r in (rows * 0, rows)]
        return {"us": sum(both) / self.layers}


def best(name: str, plan: Plan, times: dict[Tile | None, float]) -> Tile | None:
    """The best tile of a product, or None where the rules are as good; prints a line."""
    base = times[None]
    tile = min(times, key=times.__getitem__)
    tile = tile if times[tile] < base * GAIN else None
    own = Tile(plan.split, plan.depth, plan.stages)
    better = f"best {times[tile]:6.1f} {tile}" if tile else "nothing better"
    line = f"{name:8} T {plan.tokens:4}  rules {base:6.1f} {own}  {better}"
    print(f"{line} of {len(times) - 1}", flush=True)
    return tile


def entries_of(table) -> list[dict[str, int]]:
    """A table as its file has it."""
    return [
        dict(zip(tiles.KEY, key, strict=True)) | dataclasses.asdict(tile)
        for key, tile in sorted(table.items())
    ]


def write(device: Device, found: dict[tuple[int, int, int], Tile | None]) -> None:
    """Puts what was found for a device's products into its file; None takes an entry out."""
    table = {k: t for k, t in (dict(tiles.table(device.kind)) | found).items() if t is not None}
    rows = ",\n ".join(json.dumps(entry) for entry in entries_of(table))
    path = Path(tiles.__file__).parent / "tiles" / tiles.file_name(device.kind)
    path.write_text(f"[{rows}]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="8B")
    parser.add_argument("--modules", nargs="+", choices=MODELS["8B"].modules)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    jobs.add_options(parser)
    args = parser.parse_args()
    jobs.share_memory()
    device = launch.current_device()
    if not isinstance(device, Device):
        parser.error(device)
    shapes, cells = MODELS[args.model], []
    plans, times = {}, {}
    for tokens, name in itertools.product(args.tokens, args.modules or shapes.modules):
        plan = rule(device, Candidate(name, tokens, None).case, *shapes.modules[name])
        plans[name, tokens], times[name, tokens] = plan, {}
        cells += [Candidate(name, tokens, tile) for tile in (None, *candidates(plan))]
    make_bench = functools.partial(Bench, shapes, args.layers, "mosaic_gpu")
    try:
        for one, record in jobs.in_turn(make_bench, cells, args):
            times[one.name, one.tokens][one.tile] = record["us"]
    finally:
        found = {
            (plan.d_in, plan.d_out, tiles.bucket(plan.tokens)): best(name, plan, mine)
            for (name, _), plan in plans.items()
            if None in (mine := times[name, plan.tokens])
        }
        if not args.dry:
            write(device, found)


if __name__ == "__main__":
    main()
