"""Ways to write `lora_linear` in plain XLA for GPUs without a kernel: A100, L4, T4, AMD.

    python benchmarks/gpu_forms.py                        # T 8, 64, 256 with D 8, 64; 8 layers
    python benchmarks/gpu_forms.py --cells 64:8:16 --forms now "x A, one product"

A step is unrolled over arrays of one layer each, with 64 adapters resident. Microseconds a layer
from the wall clock, and what is more than the plain base step; with `--profile` also the kernels'
time. Each product of a form is first checked against float64.
"""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from checks import exact
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


def expand_slices(y, h, B, slices):
    """A product for each slice in float32, then one pass that adds."""
    cuts = np.cumsum(slices)[:-1].tolist()
    parts = [
        jnp.dot(h[g], part, preferred_element_type=jnp.float32)
        for g, part in enumerate(jnp.split(B, cuts, axis=1))
    ]
    return (y.astype(jnp.float32) + jnp.concatenate(parts, axis=1)).astype(y.dtype)


def expand_added(y, h, B, slices):
    """A product for each slice that XLA can give the base product as cuBLAS's C operand."""
    cuts = np.cumsum(slices)[:-1].tolist()
    pairs = zip(jnp.split(y, cuts, axis=1), jnp.split(B, cuts, axis=1), strict=True)
    return jnp.concatenate([own + jnp.dot(h[g], part) for g, (own, part) in enumerate(pairs)], 1)


def expand_one(y, h, B, slices):
    """One product for all slices' h on top of each other: B is read whole, and never sliced."""
    G, T, ranks = h.shape
    every = jnp.dot(h.reshape(G * T, ranks), B, preferred_element_type=jnp.float32)
    every, parts, start = every.reshape(G, T, -1), [], 0
    for g, width in enumerate(slices):
        parts.append(every[g, :, start : start + width])
        start += width
    return (y.astype(jnp.float32) + jnp.concatenate(parts, axis=1)).astype(y.dtype)


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


def errors(shapes: Shapes, case: Case, forms: dict[str, Callable], w, adapters) -> dict[str, float]:
    """The worst relative error of each form over the products of one layer."""
    rows = case.rows(seed=case.tokens)
    active, worst = np.flatnonzero(rows.any(axis=0)), dict.fromkeys(forms, 0.0)
    route = make_routing(jnp.asarray(rows), jnp.arange(case.tokens))
    for seed, (name, (d_in, _)) in enumerate(shapes.modules.items()):
        x = random(jax.random.key(seed), (case.tokens, d_in), 1.0)
        few = jax.tree.map(lambda a: a[:, active], adapters[name])
        with jax.enable_x64(True):
            want = np.asarray(exact(x, w[name][None], few, jnp.asarray(rows[:, active])))
        for form, run in forms.items():
            y = np.asarray(jax.jit(run)(x, w[name], adapters[name], route), np.float64)
            error = float(np.linalg.norm(y - want) / np.linalg.norm(want))
            worst[form] = max(worst[form], error)
    return worst


def measure(shapes: Shapes, case: Case, flat, each, *, names: list[str] | None, profiled: bool):
    """Yields (form, figures) of one cell, the base step first."""
    x, rows = make_inputs(shapes, case)
    program, _ = compiled(functools.partial(base_step, shapes), x, flat)
    base = median_us(program, x, flat) / len(flat)
    yield "base", {"us": base}
    forms = {n: f for n, f in forms_of(case).items() if names is None or n in names}
    found = errors(shapes, case, forms, flat[0], each[0])
    if not max(found.values()) <= 2 * min(found.values()):
        raise ValueError(f"no form may err twice as much as another; got {found} in {case}")
    for name, form in forms.items():
        program, first = compiled(functools.partial(step, shapes, form), x, flat, each, rows)
        us = median_us(program, x, flat, each, rows) / len(flat)
        figures = {"us": us, "added_us": us - base, "error": found[name], "first_s": first}
        if profiled:
            figures["busy_us"] = profile(program, x, flat, each, rows).busy / len(flat)
        yield name, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", default="8:8:16,64:8:16,64:64:16,256:8:16,256:64:16")
    parser.add_argument("--forms", nargs="+", help="only these")
    parser.add_argument("--model", choices=MODELS, default="8B")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shapes, records = MODELS[args.model], []
    flat = unstack(make_weights(shapes, args.layers))
    for case in map(Case.parse, args.cells.split(",")):
        each = unstack(make_adapters(shapes, args.layers, case.slots, case.slot_rank))
        head = f"{case.tokens}:{case.adapters}:{case.rank}"
        cell = measure(shapes, case, flat, each, names=args.forms, profiled=args.profile)
        for name, figures in cell:
            records.append({"cell": head, "form": name} | figures)
            columns = "  ".join(f"{key} {value:.4g}" for key, value in figures.items())
            print(f"{head:10} {name:22} {columns}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
