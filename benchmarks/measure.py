"""Shared by decode.py and prefill.py: their options, and the times of a cell.

Base step, without LoRA: plain XLA, unrolled, from the wall clock; and cuBLAS in a CUDA graph, where
torch with CUDA is installed (`cublas_graph.py`). `base` is the faster of the two.

Step with LoRA, from the wall clock of several calls queued together: `xla`, unrolled; `loop`, the
kernel in a loop over stacked arrays; `unrolled`, the same layers one after the other, each through
one inner `jax.jit`. The last two also with no adapter active. `first_s` is the time from nothing to
the first result. `kept` is base / the fastest kernel form, `added` their difference.
"""

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after this time")
    parser.add_argument("--glue", choices=("compiled", "eager", "none"), default="compiled")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile side by side")
    parser.add_argument("--torch-python", default=sys.executable, help="for cuBLAS")
    return parser


@dataclass
class Bench:
    """The model that every cell runs on.

    Attributes:
        shapes: Widths.
        layers: L.
        implementation: Of the forms `loop` and `unrolled`.
        forms: Which forms to time.
        cublas: Records of `cublas_graph.measure`.
        profiled: Also profile every form.
    """

    shapes: Shapes
    layers: int
    implementation: str
    forms: tuple[str, ...]
    cublas: dict[int, dict]
    profiled: bool = False

    def __post_init__(self):
        self.weights = make_weights(self.shapes, self.layers)
        self.flat = unstack(self.weights)
        self.base_us: dict[int, float] = {}
        self.programs: dict[tuple, tuple[Callable, float]] = {}
        self.errors: dict[Case, dict[str, float]] = {}

    def arrays(self, cases: Iterable[Case]) -> Iterator[tuple[Case, Any, list]]:
        """Each cell with its adapters; those that share them come one after the other."""
        slots_of = lambda case: (case.slot_rank, case.slots)
        for (rank, slots), group in itertools.groupby(sorted(cases, key=slots_of), slots_of):
            adapters = make_adapters(self.shapes, self.layers, slots, rank)
            each = unstack(adapters) if "xla" in self.forms else []
            for case in sorted(group, key=lambda case: case.tokens):
                yield case, adapters, each

    def prepare(self, cases: Iterable[Case]) -> None:
        """Checks cells and compiles what they need, so that `run` has only to time it."""
        for case, adapters, each in self.arrays(cases):
            self.check(case, adapters)
            self.base_program(case)
            for form in self.forms:
                self.program(form, case, adapters, each)

    def run(self, cases: Iterable[Case]) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name of the device, record) of each cell."""
        for case, adapters, each in self.arrays(cases):
            yield jax.devices()[0].device_kind, self.cell(case, adapters, each)

    def check(self, case: Case, adapters) -> dict[str, float]:
        """The errors of a cell, computed once."""
        if case not in self.errors:
            self.errors[case] = check(
                self.shapes, case, self.weights, adapters, self.implementation
            )
        return self.errors[case]

    def base_program(self, case: Case) -> Callable:
        """The base step of a cell's tokens, compiled once."""
        key = ("base", case.tokens)
        if key not in self.programs:
            x, _ = make_inputs(self.shapes, case)
            step = functools.partial(base_step, self.shapes)
            self.programs[key] = compiled(step, x, self.flat)
        return self.programs[key][0]

    def program(self, form: str, case: Case, adapters, each) -> tuple[Callable, float]:
        """The step of a form, compiled once for its tokens and slots, and seconds to the first."""
        key = (form, case.tokens, case.slots, case.slot_rank)
        if key not in self.programs:
            x, rows = make_inputs(self.shapes, case)
            step = functools.partial(*self.step(form))
            self.programs[key] = compiled(step, x, *self.operands(form, adapters, each), rows)
        return self.programs[key]

    def operands(self, form: str, adapters, each) -> tuple:
        """Weights and adapters as a form takes them."""
        return (self.flat, each) if form == "xla" else (self.weights, adapters)

    def base(self, case: Case) -> dict[str, float]:
        """Microseconds a layer of the base step, by way to compute it."""
        if case.tokens not in self.base_us:
            x, _ = make_inputs(self.shapes, case)
            program = self.base_program(case)
            self.base_us[case.tokens] = median_us(program, x, self.flat) / self.layers
        found = {"base_xla_us": self.base_us[case.tokens]}
        if case.tokens in self.cublas:
            record = self.cublas[case.tokens]
            found |= {"base_cublas_us": record["layer_us"], "products_us": record["products_us"]}
        return found

    def cell(self, case: Case, adapters, each) -> dict[str, Any]:
        """All figures of one cell."""
        record = {"tokens": case.tokens, "adapters": case.adapters, "rank": case.rank}
        record |= {"slot_rank": case.slot_rank, "slots": case.slots}
        record["floor_us"] = case.floor_us(self.shapes)
        record["errors"] = self.check(case, adapters)
        record |= self.base(case)
        base = min(record[k] for k in ("base_xla_us", "base_cublas_us") if k in record)
        x, rows = make_inputs(self.shapes, case)
        for form in self.forms:
            arrays = self.operands(form, adapters, each)
            program, record[f"{form}_first_s"] = self.program(form, case, adapters, each)
            record[f"{form}_us"] = median_us(program, x, *arrays, rows) / self.layers
            if form != "xla":
                none = median_us(program, x, *arrays, rows * 0) / self.layers
                record[f"{form}_none_us"] = none
            if self.profiled:
                found = profile(program, x, *arrays, rows)
                record[f"{form}_profile"] = show_profile(case, form, found, record, self.layers)
        mine = min((record[f"{f}_us"] for f in self.forms if f != "xla"), default=None)
        if mine is not None:
            record |= {"base_us": base, "retention": base / mine, "added_us": mine - base}
        show(record)
        return record

    def step(self, form: str) -> tuple:
        """The function of a form, and its first arguments."""
        if form == "xla":
            return xla_step, self.shapes
        steps = {"loop": loop_step, "unrolled": unrolled_step}
        return steps[form], self.shapes, self.implementation


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
    first = [f"{f} {record[f'{f}_first_s']:.1f}" for f in FORMS if f"{f}_first_s" in record]
    print(f"{line}  first s: {', '.join(first)}", flush=True)


def show_profile(case: Case, form: str, found, record, layers: int) -> dict[str, Any]:
    """Prints and returns where a layer's microseconds go; `rest` is wall clock less kernels."""
    parts = {
        "products_us": found.products / layers,
        "others_us": found.others / layers,
        "gaps_us": found.gaps / layers,
        "rest_us": record[f"{form}_us"] - found.busy / layers,
    }
    columns = "  ".join(f"{name[:-3]} {us:6.1f}" for name, us in parts.items())
    print(f"    {case.tokens}:{case.adapters}:{case.rank} {form:9} us a layer: {columns}")
    kernels = {name: (us / layers, n / layers) for name, (us, n) in found.names.items()}
    for name, (us, launches) in itertools.islice(kernels.items(), 8):
        print(f"        {us:7.2f} us in {launches:5.2f} launches a layer  {name[:80]}", flush=True)
    return parts | {"kernels": kernels}


def bench_of(args: argparse.Namespace, cublas: dict[int, dict]) -> Bench:
    """The model of the options."""
    forms = tuple(args.forms.split(","))
    return Bench(MODELS[args.model], args.layers, args.implementation, forms, cublas, args.profile)


def main(args: argparse.Namespace, cases: list[Case]) -> list[dict[str, Any]]:
    """Measures cells, prints them, and writes what was asked for."""
    deadline = time.monotonic() + args.seconds
    tokens = sorted({case.tokens for case in cases})
    cublas = {}
    if args.glue != "none":
        cublas = cublas_graph.measure(args.model, tokens, args.layers, args.glue, args.torch_python)
    print(f"jax {jax.__version__}, {args.model}, {args.layers} layers, us a layer", flush=True)
    records: list[dict[str, Any]] = []
    make_bench = functools.partial(bench_of, args, cublas)
    one = args.jobs == 1
    measured = make_bench().run(cases) if one else jobs.in_turn(make_bench, cases, args.jobs)
    for device, record in measured:
        records.append(record)
        about = {"device": device, "jax": jax.__version__, "model": args.model}
        if args.json:
            whole = about | {"layers": args.layers, "cells": records}
            args.json.write_text(json.dumps(whole, indent=1) + "\n")
        if time.monotonic() > deadline:
            break
    measured.close()
    if len(records) < len(cases):
        print(f"out of time: {len(cases) - len(records)} of {len(cases)} cells not measured")
    if args.plot:
        draw(records, args.plot)
    return records
