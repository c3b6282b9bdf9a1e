"""Device time of each product of a layer alone, from the profile: launch gaps do not count.

    python benchmarks/modules.py --cells 8:8:16,64:8:16

Microseconds a launch: the base product in plain XLA, base and adapters with `xla` and with
`mosaic_gpu`, and `mosaic_gpu` with no adapter active.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from clocks import profile
from gpu_layers import make_adapters, make_inputs, make_weights, random, unstack
from jax import lax
from shapes import MODELS, Case

from lorajax.kernels_pallas import lora_linear, make_routing


def base(x, weights):
    return [jnp.dot(x, w) for w in weights]


def stacked(implementation, x, w, adapters, rows):
    """A loop over layers of one product; only the last result is kept."""
    route = make_routing(rows, jnp.arange(x.shape[0]))

    def step(i, _):
        at = lax.rem(i, jnp.int32(adapters.A.shape[0]))
        keywords = {"layer": at, "base_layer": i, "implementation": implementation}
        return lora_linear(x, w, adapters, route, **keywords)

    return lax.fori_loop(0, w.shape[0], step, jnp.zeros((x.shape[0], w.shape[-1]), x.dtype))


def unstacked(x, weights, adapters, rows):
    route = make_routing(rows, jnp.arange(x.shape[0]))
    pairs = zip(weights, adapters, strict=False)
    return [lora_linear(x, w, a, route, implementation="xla") for w, a in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", default="8:1:16,8:8:16,64:8:16,64:64:16,256:8:16")
    parser.add_argument("--model", choices=MODELS, default="8B")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shapes, records = MODELS[args.model], []
    weights = make_weights(shapes, args.layers)
    flat = unstack(weights)
    for case in map(Case.parse, args.cells.split(",")):
        adapters = make_adapters(shapes, args.layers, case.slots, case.slot_rank)
        each, (_, rows) = unstack(adapters), make_inputs(shapes, case)
        fused = jax.jit(functools.partial(stacked, "mosaic_gpu"))
        for name, (d_in, _) in shapes.modules.items():
            x = random(jax.random.key(7), (case.tokens, d_in), 1.0)
            ws, pool = [w[name] for w in flat], [a[name] for a in each]
            whole = x, weights[name], adapters[name]
            found = {
                "base": profile(jax.jit(base), x, ws).busy / args.layers,
                "xla": profile(jax.jit(unstacked), x, ws, pool, rows).busy / len(pool),
                "mosaic_gpu": profile(fused, *whole, rows).busy / args.layers,
                "none active": profile(fused, *whole, rows * 0).busy / args.layers,
            }
            records.append(
                {"cell": [case.tokens, case.adapters, case.rank], "module": name} | found
            )
            columns = "  ".join(f"{key} {us:6.1f}" for key, us in found.items())
            head = f"{case.tokens}:{case.adapters}:{case.rank}"
            print(f"{head:10} {name:8} {columns}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
