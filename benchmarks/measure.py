"""Shared by decode.py and prefill.py: their options, and the times of a cell.

Base step, without LoRA: plain XLA, unrolled, from the wall clock; and cuBLAS in a CUDA graph, where
torch with CUDA is installed (`cublas_graph.py`). `base` is the faster of the two.

Step with LoRA, from the wall clock of several calls queued together: `xla`, unrolled; `loop`, the
kernel in a loop over stacked arrays; `unrolled`, the same layers one after the other, each through
one inner `jax.jit`. The last two also with no adapter active. `compile_s` is the time to trace,
lower and compile it; with `--jobs` the processes share the CPU. `kept` is base / the fastest kernel
form, `added` their difference.
"""

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cublas_graph
import jax
import jobs
from checks import check
from clocks import compiled, median_us, profile
from gpu_layers import (
    base_step,
    loop_step,
    make_adapters,
    make_inputs,
    make_weights,
    unrolled_step,
    unstack,
    xla_step,
)
from plot import draw
from shapes import MODELS, Case, Shapes

FORMS = ("xla", "loop", "unrolled")


def options(doc: str, *, layers: int) -> argparse.ArgumentParser:
    """The options that decode.py and prefill.py share."""
    parser = argparse.ArgumentParser(
        description=doc.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few cells, 8 layers at most")
    parser.add_argument("--cells", help="cells T:D:r, comma separated; r may be 8+16+64, or 64@16")
    parser.add_argument("--model", choices=MODELS, default="8B")
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--forms", default=",".join(FORMS), help="what to time")
    parser.add_argument("--implementation", default="mosaic_gpu", help="of loop and unrolled")
    parser.add_argument("--profile", action="store_true", help="kernels and gaps of each form")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="draw them to this PNG")
    parser.add_argument("--glue", choices=("compiled", "eager", "none"), default="compiled")
    parser.add_argument("--torch-python", default=sys.executable, help="for cuBLAS")
    jobs.add_options(parser)
    return parser


@dataclass(frozen=True)
class Base:
    """The step of T tokens without LoRA: a cell of its own, as cells of the same T share it."""

    tokens: int

    def __str__(self) -> str:
        return f"base step of {self.tokens} tokens"


def shared(first: Case, cell: Base | Case) -> Hashable:
    """What decides which programs a cell needs; a base step, compiled in turn, joins the first."""
    case = cell if isinstance(cell, Case) else first
    return case.tokens, case.slots, case.slot_rank


@dataclass
class Bench:
    """The model that every cell runs on.

    Programs are compiled for shapes alone: the arrays of all layers, tens of GB, are there only
    while they are timed.

    Attributes:
        shapes: Widths.
        layers: L.
        implementation: Of the forms `loop` and `unrolled`.
        forms: Which forms to time.
        profiled: Also profile every form.
    """

    shapes: Shapes
    layers: int
    implementation: str
    forms: tuple[str, ...]
    profiled: bool = False
    programs: dict[tuple, tuple[Callable, float]] = field(default_factory=dict, init=False)
    errors: dict[Case, dict[str, float]] = field(default_factory=dict, init=False)

    def prepare(self, cell: Base | Case) -> None:
        """Checks a cell and compiles its forms.

        Not the base step, that all figures are relative to: XLA times products to choose among
        them, and so needs the GPU for itself.
        """
        if isinstance(cell, Case):
            self.check(cell)
            for form in self.forms:
                self.program(form, cell)

    def measure(self, cell: Base | Case) -> dict[str, Any]:
        """All figures of a cell."""
        record = self.case(cell) if isinstance(cell, Case) else self.base(cell)
        return {"device": jax.devices()[0].device_kind} | record

    def check(self, case: Case) -> dict[str, float]:
        """The errors of a cell, computed once."""
        if case not in self.errors:
            adapters = make_adapters(self.shapes, 1, case.slots, case.slot_rank)
            weights = make_weights(self.shapes, 1)
            self.errors[case] = check(self.shapes, case, weights, adapters, self.implementation)
        return self.errors[case]

    def program(self, form: str, case: Case) -> tuple[Callable, float]:
        """The step of a form, compiled once for its tokens and slots, and the seconds it took."""
        key = (form, case.tokens, case.slots, case.slot_rank)
        if key not in self.programs:
            arrays = jax.eval_shape(functools.partial(self.operands, form, case))
            self.programs[key] = compiled(functools.partial(*self.step(form)), *arrays)
        return self.programs[key]

    def step(self, form: str) -> tuple:
        """The function of a form, and its first arguments."""
        if form in ("base", "xla"):
            return {"base": base_step, "xla": xla_step}[form], self.shapes
        steps = {"loop": loop_step, "unrolled": unrolled_step}
        return steps[form], self.shapes, self.implementation

    def operands(self, form: str, case: Case) -> tuple:
        """Fresh x and weights of a form, and except for `base` adapters and row weights."""
        x, rows = make_inputs(self.shapes, case)
        weights = make_weights(self.shapes, self.layers)
        if form == "base":
            return x, unstack(weights)
        adapters = make_adapters(self.shapes, self.layers, case.slots, case.slot_rank)
        if form == "xla":
            return x, unstack(weights), unstack(adapters), rows
        return x, weights, adapters, rows

    def base(self, cell: Base) -> dict[str, float]:
        """Microseconds a layer of a base step."""
        case = Case.of(cell.tokens, 1, 16)
        program, _ = self.program("base", case)
        return {"base_xla_us": median_us(program, *self.operands("base", case)) / self.layers}

    def case(self, case: Case) -> dict[str, Any]:
        """The errors of a cell, and the figures of each form."""
        record = {"tokens": case.tokens, "adapters": case.adapters, "rank": case.rank}
        record |= {"slot_rank": case.slot_rank, "slots": case.slots}
        record |= {"floor_us": case.floor_us(self.shapes), "errors": self.check(case)}
        for form in self.forms:
            program, record[f"{form}_compile_s"] = self.program(form, case)
            *arrays, rows = self.operands(form, case)
            us = median_us(program, *arrays, rows) / self.layers
            record[f"{form}_us"] = us
            if form != "xla":
                none = median_us(program, *arrays, rows * 0) / self.layers
                record[f"{form}_none_us"] = none
            if self.profiled:
                record[f"{form}_profile"] = self.profile(us, program, *arrays, rows)
        return record

    def profile(self, us: float, program: Callable, *arrays) -> dict[str, Any]:
        """Where a layer's microseconds go; `rest` is wall clock less kernels."""
        found, layers = profile(program, *arrays), self.layers
        return {
            "products_us": found.products / layers,
            "others_us": found.others / layers,
            "gaps_us": found.gaps / layers,
            "rest_us": us - found.busy / layers,
            "kernels": {name: (t / layers, n / layers) for name, (t, n) in found.names.items()},
        }


def compared(record: dict[str, Any], base: dict[str, float]) -> dict[str, Any]:
    """The record of a cell beside the base step's, as far as that is known."""
    record = record | base
    ours = [record[f"{f}_us"] for f in FORMS if f != "xla" and f"{f}_us" in record]
    bases = [record[k] for k in ("base_xla_us", "base_cublas_us") if k in record]
    if ours and bases:
        base_us, mine = min(bases), min(ours)
        record |= {"base_us": base_us, "retention": base_us / mine, "added_us": mine - base_us}
    return record


def show(record: dict[str, Any]) -> None:
    """One line of the table."""
    line = f"T {record['tokens']:4} D {record['adapters']:3} r {record['rank']:10}"
    names = {"base_xla_us": "base xla", "base_cublas_us": "cublas", "products_us": "(products)"}
    names |= {f"{form}_us": form for form in FORMS}
    names |= {"loop_none_us": "none: loop", "unrolled_none_us": "unrolled"}
    for key, name in names.items():
        if key in record:
            line += f"  {name} {record[key]:6.1f}"
    if "retention" in record:
        floor = (record["base_us"] + record["added_us"]) / record["floor_us"]
        line += f"  kept {record['retention']:.3f}  added {record['added_us']:5.1f}"
        line += f"  x floor {floor:.2f}"
    own = next(iter(record["errors"].values()))
    line += f"  error {own:.1e} (merged {record['errors']['merged']:.1e})"
    spent = [f"{f} {record[f'{f}_compile_s']:.1f}" for f in FORMS if f"{f}_compile_s" in record]
    print(f"{line}  compile s: {', '.join(spent)}", flush=True)
    for form in FORMS:
        if f"{form}_profile" in record:
            show_profile(form, record[f"{form}_profile"])


def show_profile(form: str, found: dict[str, Any]) -> None:
    """Where a layer's microseconds go."""
    columns = "  ".join(f"{k[:-3]} {found[k]:6.1f}" for k in found if k != "kernels")
    print(f"    {form:9} us a layer: {columns}")
    for name, (us, launches) in itertools.islice(found["kernels"].items(), 8):
        print(f"        {us:7.2f} us in {launches:5.2f} launches a layer  {name[:80]}", flush=True)


def bench_of(args: argparse.Namespace) -> Bench:
    """The model of the options."""
    forms = tuple(args.forms.split(","))
    return Bench(MODELS[args.model], args.layers, args.implementation, forms, args.profile)


def main(args: argparse.Namespace, cases: list[Case]) -> None:
    """Measures cells, prints them, and writes what was asked for."""
    tokens = sorted({case.tokens for case in cases})
    cublas = {}
    if args.glue != "none":
        cublas = cublas_graph.measure(args.model, tokens, args.layers, args.glue, args.torch_python)
    base = {
        t: {"base_cublas_us": found["layer_us"], "products_us": found["products_us"]}
        for t, found in cublas.items()
    }
    print(f"jax {jax.__version__}, {args.model}, {args.layers} layers, us a layer", flush=True)
    about = {"jax": jax.__version__, "model": args.model, "layers": args.layers}
    records: list[dict[str, Any]] = []
    make_bench, cells = functools.partial(bench_of, args), [*map(Base, tokens), *cases]
    key = functools.partial(shared, cases[0])
    try:
        for cell, record in jobs.in_turn(make_bench, cells, args, key=key):
            about["device"] = record.pop("device")
            if isinstance(cell, Base):
                base[cell.tokens] = record | base.get(cell.tokens, {})
                continue
            records.append(compared(record, base.get(cell.tokens, {})))
            show(records[-1])
            if args.json:
                args.json.write_text(json.dumps(about | {"cells": records}, indent=1) + "\n")
    finally:
        if args.plot and records:
            draw(records, args.plot)
