"""`decode.py --mesh tensor=4`: the step on a mesh, under shard_map, through lorajax.sharding.

For each cell: microseconds a layer of the base step, of the step with adapters and of the same with
none active; the collectives of a step, which must be the base's; and the milliseconds of a step, of
one that follows the upload of an adapter into a slot, and of the upload alone.

The base is unrolled plain XLA. `xla` is unrolled over arrays of one layer each; a kernel runs in a
loop over stacked arrays. On a CPU the mesh is of virtual devices.
"""

import argparse
import functools
import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clocks import median_us
from gpu_layers import BF16, layer, make_inputs
from jax import lax
from jax.sharding import Mesh
from pods import COLLECTIVE
from shapes import MODELS, Case, Shapes

import lorajax as lj
from lorajax.adapter import Adapter, PackedWeights
from lorajax.sharding import Partition, abstract_slots
from lorajax.sharding.state import state_specs

ROW = ("o", "down")  #: Modules whose d_in is cut; the others' d_out is.


def partition_of(text: str) -> Partition:
    """A mesh of the first devices, from "tensor=4" or "data=2,tensor=4"."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    jax.config.update("jax_num_cpu_devices", math.prod(sizes.values()))
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    return Partition.of(Mesh(devices.reshape(*sizes.values()), tuple(sizes)))


def spec_of(shapes: Shapes, layers: int, case: Case, *, stacked: bool) -> lj.LoraSpec:
    """The four products as targets."""
    heads = {
        "qkv": tuple(width // shapes.head for width in (shapes.q, shapes.kv, shapes.kv)),
        "o": (shapes.q // shapes.head,),
    }
    targets = tuple(
        lj.Target(
            name,
            d_in,
            slices,
            modules=tuple(f"{name}.{g}" for g in range(len(slices))),
            parallel="row" if name in ROW else "column",
            heads=heads.get(name, ()),
        )
        for name, (d_in, slices) in shapes.modules.items()
    )
    return lj.LoraSpec(
        targets, layers, case.slots, case.slot_rank, "bfloat16", stack_layers=stacked
    )


@functools.cache
def maker(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable:
    """From a key to small random numbers, each device making its own share."""

    def make(key):
        return (jax.random.normal(key, shape, dtype) * 0.02).astype(dtype)

    return jax.jit(make, out_shardings=sharding)


def fill(tree: Any) -> Any:
    """Random arrays for shapes with shardings."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [maker(a.shape, a.dtype, a.sharding)(key) for a, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, made)


@dataclass
class Sharded:
    """A model on a mesh.

    Attributes:
        shapes: Widths of the whole model.
        layers: L.
        partition: The mesh.
        implementation: Of the products with adapters.
    """

    shapes: Shapes
    layers: int
    partition: Partition
    implementation: str

    def __post_init__(self):
        self.flat = fill([self.weight_shapes() for _ in range(self.layers)])
        self.weights = self.flat if self.unrolled else fill(self.weight_shapes(self.layers))

    @property
    def unrolled(self) -> bool:
        """Whether each layer has its own arrays."""
        return self.implementation == "xla"

    def weight_specs(self, *lead: None) -> dict[str, Any]:
        """The `PartitionSpec` of each product's weight, after some whole axes."""
        spec = self.partition.rules.spec
        column, row = spec(*lead, None, "tensor"), spec(*lead, "tensor", None)
        return {name: row if name in ROW else column for name in self.shapes.modules}

    def weight_shapes(self, *lead: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Weights as abstract arrays, columns as the slots have them."""
        spec = spec_of(self.shapes, self.layers, Case.of(1, 1, 16), stacked=True)
        slots, specs = (
            abstract_slots(spec, self.partition),
            self.weight_specs(*(None for _ in lead)),
        )
        of = lambda name, d_in: jax.ShapeDtypeStruct(
            (*lead, d_in, slots[name].columns.width),
            BF16,
            sharding=jax.NamedSharding(self.partition.mesh, specs[name]),
        )
        return {name: of(name, d_in) for name, (d_in, _) in self.shapes.modules.items()}

    def local(self, x, weights, state, rows):
        """The layers on one device's share; without a state, of the base alone."""
        shard = self.partition.shard
        share = replace(self.shapes, q=self.shapes.q // shard.tensor_shards)
        route = None if state is None else lj.make_routing(rows, jnp.arange(x.shape[0]))

        def one(i, x, w):
            def linear(name, x):
                if state is None:
                    y = jnp.dot(x, w[name])
                else:
                    how = {"layer": i, "implementation": self.implementation}
                    y = lj.lora_linear(x, w[name], state[name], route, **how)
                return shard.sum(y) if name in ROW else y

            return layer(share, x, linear)

        if isinstance(weights, dict):
            return lax.fori_loop(0, self.layers, lambda i, x: one(i, x, weights), x)
        for i, w in enumerate(weights):
            x = one(i, x, w)
        return x

    def compiled(self, x, weights, state, rows) -> Callable:
        """The step on the mesh."""
        rules = self.partition.rules
        stacked = isinstance(weights, dict)
        of_weights = self.weight_specs(None) if stacked else [self.weight_specs()] * self.layers
        of_state = None if state is None else state_specs(state, rules)
        in_specs = (rules.spec("rows"), of_weights, of_state, rules.spec("rows"))
        step = self.partition.per_device(self.local, in_specs, rules.spec("rows"))
        return jax.jit(step).lower(x, weights, state, rows).compile()

    def collectives(self, program: Callable, *, looped: bool) -> dict[str, int]:
        """Collectives of a step, by kind; those in the body of a loop run once a layer."""
        times = self.layers if looped else 1
        found = Counter(re.findall(COLLECTIVE, program.as_text()))
        return {kind: times * count for kind, count in sorted(found.items())}


def make_adapter(spec: lj.LoraSpec) -> lj.Adapter:
    """An adapter of one slot over all targets, in host memory."""
    rng, arrays = np.random.default_rng(0), {}
    L, R = spec.num_layers, spec.slot_rank
    for target in spec.targets:
        G, d_out = len(target.slices), sum(target.slices)
        draw = lambda *shape: (0.02 * rng.random(shape, np.float32)).astype(BF16)
        arrays[target.name] = PackedWeights(
            A=draw(1, L, G, R, target.d_in),
            B=draw(1, L, R, d_out),
            scale=np.ones((1, L, G, R), np.float32),
        )
    return Adapter("loaded", digest="0" * 64, rank=R, num_slots=1, arrays=arrays)


def load_ms(step: Callable, state: lj.LoraState, adapter: lj.Adapter, repeats: int = 9) -> dict:
    """Median milliseconds of a step, of an upload, and of a step right after one.

    The upload goes to a slot that no token uses: a server loads ahead of need.
    """
    times: dict[str, list[float]] = {"step_ms": [], "upload_ms": [], "loading_step_ms": []}

    def clock(name: str, upload: bool, run: bool) -> None:
        nonlocal state
        start = time.perf_counter()
        if upload:
            state = lj.write_slots(state, [0], adapter)
        jax.block_until_ready(step(state) if run else state)
        times[name].append(time.perf_counter() - start)

    for _ in range(repeats + 1):
        clock("step_ms", upload=False, run=True)
        clock("upload_ms", upload=True, run=False)
        clock("loading_step_ms", upload=True, run=True)
    return {name: 1e3 * statistics.median(found[1:]) for name, found in times.items()}


def cell(model: Sharded, case: Case) -> dict[str, Any]:
    """All figures of one cell.

    Raises:
        ValueError: Adapters add a collective.
    """
    x, rows = make_inputs(model.shapes, case)
    x, rows = (jax.device_put(a, model.partition.sharding("rows")) for a in (x, rows))
    spec = spec_of(model.shapes, model.layers, case, stacked=not model.unrolled)
    state = fill(abstract_slots(spec, model.partition))
    base = model.compiled(x, model.flat, None, None)
    ours = model.compiled(x, model.weights, state, rows)
    counts = [
        model.collectives(program, looped=looped)
        for program, looped in ((base, False), (ours, not model.unrolled))
    ]
    if counts[0] != counts[1]:
        raise ValueError(f"adapters must add no collective; base {counts[0]}, with {counts[1]}")
    record: dict[str, Any] = {
        "tokens": case.tokens,
        "adapters": case.adapters,
        "rank": case.rank,
        "base_us": median_us(base, x, model.flat, None, None) / model.layers,
        "slots_us": median_us(ours, x, model.weights, state, rows) / model.layers,
        "none_us": median_us(ours, x, model.weights, state, rows * 0) / model.layers,
        "collectives": counts[1],
    }
    record["retention"] = record["base_us"] / record["slots_us"]
    unused = rows.at[:, 0].set(0.0)
    step = functools.partial(_step, ours, x, model.weights, unused)
    return record | load_ms(step, state, make_adapter(spec))


def _step(program, x, weights, rows, state):
    return program(x, weights, state, rows)


def main(args: argparse.Namespace, cases: list[Case]) -> list[dict[str, Any]]:
    """Measures cells on a mesh, prints them, and writes what was asked for."""
    partition, deadline = partition_of(args.mesh), time.monotonic() + args.seconds
    device = jax.devices()[0].device_kind
    print(f"jax {jax.__version__}, {device}, mesh {args.mesh}, {args.model}, {args.layers} layers")
    model = Sharded(MODELS[args.model], args.layers, partition, args.implementation)
    about = {"device": device, "jax": jax.__version__, "model": args.model, "mesh": args.mesh}
    about |= {"layers": args.layers, "implementation": args.implementation}
    records: list[dict[str, Any]] = []
    for case in cases:
        if records and time.monotonic() > deadline:
            print(f"out of time: {len(cases) - len(records)} of {len(cases)} cells not measured")
            break
        records.append(cell(model, case))
        columns = ((k, f"{v:.4g}" if isinstance(v, float) else v) for k, v in records[-1].items())
        print("  ".join(f"{key} {value}" for key, value in columns), flush=True)
        if args.json:
            args.json.write_text(json.dumps(about | {"cells": records}, indent=1) + "\n")
    return records
