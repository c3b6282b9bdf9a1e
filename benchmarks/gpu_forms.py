"""Ways to write `lora_linear` in plain XLA for GPUs without a kernel: A100, L4, T4, AMD.

    python benchmarks/gpu_forms.py --jobs 12 --profile    # T 8, 64, 256 with D 8, 64; 8 layers
    python benchmarks/gpu_forms.py --cells 64:8:16 --forms now "x A, one product"

A step is unrolled over arrays of one layer each, with 64 adapters resident. Microseconds a layer
from the wall clock, and what is more than the plain base step; with `--profile` also the kernels'
time. Each form is first checked against float64. At the end, the best form of each cell. XLA times
products to choose among them: processes side by side may disturb that.
"""

import argparse
import functools
import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import jobs
import numpy as np
from checks import compared, distance, exact
from clocks import compiled, median_us, profile
from gpu_layers import (
    base_step,
    layer,
    make_adapters,
    make_inputs,
    make_weights,
    random,
    unstack,
)
from jax import lax
from shapes import MODELS, Case, Shapes

from lorajax.kernels_pallas import LoraWeights, Routing, lora_linear, make_routing
from lorajax.kernels_pallas.lora_delta.xla import expand_apart, expand_together

ROWS_BY_ROWS = (((1,), (1,)), ((), ()))  # contracts the last axes of two matrices


def shrink_xa(x, A, scale, weights):
    """`x Aᵀ`, masked and scaled: `[G, T, S R]`."""
    S, G, R, d_in = A.shape
    rows = A.reshape(S * G * R, d_in)
    h = lax.dot_general(x, rows, ROWS_BY_ROWS, preferred_element_type=jnp.float32)
    w = weights.T[:, :, None, None]
    h = jnp.where(w != 0, h.reshape(-1, S, G, R) * (scale[None] * w), 0.0).astype(x.dtype)
    return h.transpose(2, 0, 1, 3).reshape(G, -1, S * R)


def shrink_ax(x, A, scale, weights):
    """`A xᵀ`, masked and scaled, then transposed: `[G, T, S R]`."""
    S, G, R, d_in = A.shape
    rows = A.reshape(S * G * R, d_in)
    h = lax.dot_general(rows, x, ROWS_BY_ROWS, preferred_element_type=jnp.float32)
    w = weights[:, None, None, :]
    h = jnp.where(w != 0, h.reshape(S, G, R, -1) * (scale[..., None] * w), 0.0).astype(x.dtype)
    return h.transpose(1, 3, 0, 2).reshape(G, -1, S * R)


def added(expand: Callable) -> Callable:
    """The expand of plain XLA in float32, then one pass that adds."""

    def run(y, h, B, slices):
        delta = expand(h.swapaxes(1, 2), B, slices)
        return (y.astype(jnp.float32) + delta).astype(y.dtype)

    return run


expand_slices, expand_one = added(expand_apart), added(expand_together)


def expand_added(y, h, B, slices):
    """A product for each slice that XLA can give the base product as cuBLAS's C operand."""
    cuts = np.cumsum(slices)[:-1].tolist()
    pairs = zip(jnp.split(y, cuts, axis=1), jnp.split(B, cuts, axis=1), strict=True)
    return jnp.concatenate([own + jnp.dot(h[g], part) for g, (own, part) in enumerate(pairs)], 1)


def expand_best(y, h, B, slices):
    """`expand_added` for one slice, `expand_one` for several."""
    return (expand_added if len(slices) == 1 else expand_one)(y, h, B, slices)


def dense(shrink: Callable, expand: Callable) -> Callable:
    """`lora_linear` over all slots."""

    def run(x, w, weights: LoraWeights, routing: Routing, **_):
        A, B, scale = weights.A[0], weights.B[0], weights.scale[0]
        h = shrink(x, A, scale, routing.weights)
        return expand(jnp.dot(x, w), h, B.reshape(-1, B.shape[-1]), weights.slices)

    return run


def some(form: Callable, count: int) -> Callable:
    """A form on the first `count` of the active slots, gathered; for one block of tokens."""

    def run(x, w, weights: LoraWeights, routing: Routing, **_):
        slots = routing.active[0, :count]
        few = jax.tree.map(lambda a: a[:, slots], weights)
        mine = Routing(routing.weights[slots], routing.active, routing.count, routing.block)
        return form(x, w, few, mine)

    return run


def switched(form: Callable, sizes: list[int]) -> Callable:
    """A form on the smallest of some numbers of slots that holds the active ones."""

    def run(x, w, weights: LoraWeights, routing: Routing, **_):
        index = jnp.searchsorted(jnp.array(sizes), routing.count[0])
        branches = [some(form, size) for size in sizes]
        return lax.switch(index, branches, x, w, weights, routing)

    return run


def forms_of(case: Case) -> dict[str, Callable]:
    """Every form; those on active slots know, as a host could, a power of two that holds them."""
    best = dense(shrink_xa, expand_best)
    active = int(case.groups()[0].any(axis=0).sum())
    sizes = [1 << i for i in range(3, (case.slots - 1).bit_length())] + [case.slots]
    held = next(size for size in sizes if size >= active)
    return {
        "now": functools.partial(lora_linear, implementation="xla"),
        "A x, slices": dense(shrink_ax, expand_slices),
        "x A, slices": dense(shrink_xa, expand_slices),
        "x A, slices added": dense(shrink_xa, expand_added),
        "x A, one product": dense(shrink_xa, expand_one),
        "A x, one product": dense(shrink_ax, expand_one),
        "x A, best expand": best,
        "active, count on host": some(best, held),
        "active, switch": switched(best, sizes),
    }


def step(shapes: Shapes, form: Callable, x, weights, adapters, rows):
    """All layers, unrolled."""
    route = make_routing(rows, jnp.arange(x.shape[0]))
    for i, w in enumerate(weights):
        a = adapters[i % len(adapters)]
        x = layer(shapes, x, lambda name, x, w=w, a=a: form(x, w[name], a[name], route))
    return x


def error(shapes: Shapes, case: Case, form: Callable, w, adapters) -> float:
    """The worse relative error of a form in two products of a layer, of three slices and of one."""
    rows, found = case.rows(seed=case.tokens), []
    active = np.flatnonzero(rows.any(axis=0))
    route = make_routing(jnp.asarray(rows), jnp.arange(case.tokens))
    for seed, name in enumerate(("qkv", "down")):
        x = random(jax.random.key(seed), (case.tokens, shapes.modules[name][0]), 1.0)
        few = jax.tree.map(lambda a: a[:, active], adapters[name])
        with jax.enable_x64(True):
            want = np.asarray(exact(x, w[name][None], few, jnp.asarray(rows[:, active])))
        found.append(distance(compared(form)(x, w[name], adapters[name], route), want))
    return max(found)


@dataclass(frozen=True)
class Cell:
    """One form of one case, or the step without LoRA as "base"."""

    case: Case
    form: str

    def __str__(self) -> str:
        return f"{self.case!s:10} {self.form}"


def shared(first: Case, cell: Cell) -> Hashable:
    """A form shares nothing; a base step, compiled in turn, joins the first form."""
    return cell if cell.form != "base" else Cell(first, "now")


def cells_of(cases: list[Case], names: list[str] | None) -> list[Cell]:
    """The base step of each number of tokens; then every form, or those named, of each case."""
    bases = {case.tokens: Cell(case, "base") for case in cases}
    forms = [Cell(c, n) for c in cases for n in forms_of(c) if names is None or n in names]
    return [*bases.values(), *forms]


@dataclass
class Bench:
    """The model that every cell runs on.

    Attributes:
        shapes: Widths.
        layers: L.
        profiled: Also profile every form.
    """

    shapes: Shapes
    layers: int
    profiled: bool
    programs: dict[Cell, tuple[Callable, float]] = field(default_factory=dict, init=False)
    errors: dict[Cell, float] = field(default_factory=dict, init=False)

    def prepare(self, cell: Cell) -> None:
        """Checks and compiles a form; the base step waits until it has the GPU for itself."""
        if cell.form != "base":
            self.check(cell)
            self.program(cell)

    def measure(self, cell: Cell) -> dict[str, float]:
        """Microseconds a layer, seconds to compile, and the error of a form."""
        record = {} if cell.form == "base" else {"error": self.check(cell)}
        program, record["compile_s"] = self.program(cell)
        arrays = self.operands(cell)
        record["us"] = median_us(program, *arrays) / self.layers
        if self.profiled:
            record["busy_us"] = profile(program, *arrays).busy / self.layers
        return record

    def check(self, cell: Cell) -> float:
        """The error of a form, computed once."""
        if cell not in self.errors:
            case, form = cell.case, forms_of(cell.case)[cell.form]
            (w,) = unstack(make_weights(self.shapes, 1))
            (a,) = unstack(make_adapters(self.shapes, 1, case.slots, case.slot_rank))
            self.errors[cell] = error(self.shapes, case, form, w, a)
        return self.errors[cell]

    def program(self, cell: Cell) -> tuple[Callable, float]:
        """The step of a form, compiled once, and the seconds it took."""
        if cell not in self.programs:
            arrays = jax.eval_shape(functools.partial(self.operands, cell))
            form = forms_of(cell.case).get(cell.form)
            parts = (base_step, self.shapes) if form is None else (step, self.shapes, form)
            self.programs[cell] = compiled(functools.partial(*parts), *arrays)
        return self.programs[cell]

    def operands(self, cell: Cell) -> tuple:
        """Fresh arrays of a step."""
        x, rows = make_inputs(self.shapes, cell.case)
        weights = unstack(make_weights(self.shapes, self.layers))
        if cell.form == "base":
            return x, weights
        slots = cell.case.slots, cell.case.slot_rank
        return x, weights, unstack(make_adapters(self.shapes, self.layers, *slots)), rows


def show_best(found: dict[Cell, dict[str, float]]) -> None:
    """The fastest form of each case.

    Raises:
        ValueError: A form errs twice as much as another of the same case.
    """
    for case in {cell.case: None for cell in found if cell.form != "base"}:
        forms = {c.form: r for c, r in found.items() if c.case == case and c.form != "base"}
        errors = {name: record["error"] for name, record in forms.items()}
        if not max(errors.values()) <= 2 * min(errors.values()):
            raise ValueError(f"no form may err twice as much as another; got {errors} in {case}")
        line = f"{case!s:10} best"
        for key, title in (("us", "by wall clock"), ("busy_us", "by device time")):
            if all(key in record for record in forms.values()):
                best = min(forms, key=lambda name: forms[name][key])
                line += f"  {title}: {best} {forms[best][key]:.1f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", default="8:8:16,64:8:16,64:64:16,256:8:16,256:64:16")
    parser.add_argument("--forms", nargs="+", help="only these")
    parser.add_argument("--model", choices=MODELS, default="8B")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    jobs.add_options(parser)
    args = parser.parse_args()
    make_bench = functools.partial(Bench, MODELS[args.model], args.layers, args.profile)
    cases = [Case.parse(text) for text in args.cells.split(",")]
    cells, key = cells_of(cases, args.forms), functools.partial(shared, cases[0])
    found: dict[Cell, dict[str, float]] = {}
    base: dict[int, float] = {}
    try:
        for cell, record in jobs.in_turn(make_bench, cells, args, key=key):
            base |= {cell.case.tokens: record["us"]} if cell.form == "base" else {}
            if cell.case.tokens in base:
                record["added_us"] = record["us"] - base[cell.case.tokens]
            found[cell] = record
            columns = "  ".join(f"{key} {value:.4g}" for key, value in record.items())
            print(f"{cell!s:33} {columns}", flush=True)
            if args.json:
                every = [{"cell": str(c.case), "form": c.form} | r for c, r in found.items()]
                args.json.write_text(json.dumps(every, indent=1) + "\n")
    finally:
        show_best(found)


if __name__ == "__main__":
    main()
