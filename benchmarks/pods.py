"""Compiles a sharded decode step for TPU pods that are not here, and prints memory and collectives.

    python benchmarks/pods.py [--model 8B] [--pod v5e:2x4] [--form kernel] [--slots 32]
        [--layers 4] [--json FILE]

Needs `jax[tpu]` (libtpu holds the compiler) and no TPU. Each row of the output is one program: a
model's decode step of 32 rows a data shard with 2048 positions each, bfloat16, in one of four
forms: without adapters, or with slots of rank 16 over all seven linear modules, by the plain XLA
ops, by the Pallas TPU kernel, or fully sharded (plain XLA ops). Which kernels ran and which
collectives there are is read from the compiled program; memory is what the compiler gives to one
chip. A model too large for a chip is a row that says so.
"""

import argparse
import json
import math
import os
import re
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh

import lorajax as lj
from lorajax import models
from lorajax.sharding import Partition, abstract_slots
from lorajax.state import LoraState

_LLAMA = {
    "model_type": "llama",
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "8B": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70B": _LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
#: Topology and devices of the tensor axis; the others are the data axis.
PODS = {"v5e:2x4": 8, "v6e:4x4": 16, "v5p:4x4x4": 8, "v5e:16x16": 16, "v5p:8x8x4": 8}
ROWS, LENGTH = 32, 2048
#: (implementation of the ops, fully sharded), or None without adapters.
FORMS = {
    "base": None,
    "xla": ("xla", False),
    "kernel": ("mosaic_tpu", False),
    "fully sharded": ("xla", True),
}
#: Products of a layer that adapters may change, each one call of the kernel.
PRODUCTS = 4
COLLECTIVE = r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
_KERNEL = r'%(\w+)[.\d]* = .* custom_call_target="tpu_custom_call"'
_GIB = 2**30


def partition_of(pod: str) -> Partition:
    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=pod).devices)
    return Partition.of(Mesh(devices.reshape(-1, PODS[pod]), ("data", "tensor")))


def lowered(
    config: dict[str, Any], partition: Partition, slots: LoraState | None, implementation: str
) -> Any:
    """The decode step, from shapes alone; without slots, that of the plain model."""
    sizes = models.ModelConfig.from_hf(config)
    model = models.abstract_model(sizes, partition, implementation=implementation)
    graphdef, params = nnx.split(model)
    rows = ROWS * partition.shard.row_shards

    def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=partition.sharding("rows"))

    def greedy(*args: Any) -> tuple[jax.Array, Any]:
        logits, cache = models.decode(graphdef, *args)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

    step = models.on_devices(greedy, params, partition)
    return jax.jit(step, donate_argnums=2).lower(
        params,
        slots,
        models.abstract_cache(sizes, partition, rows, LENGTH),
        struct((rows,), np.int32),
        struct((rows,), np.int32),
        None if slots is None else struct((rows, slots.num_slots), np.float32),
    )


def bytes_on_a_chip(tree: Any) -> int:
    shapes = ((a.sharding.shard_shape(a.shape), a.dtype) for a in jax.tree.leaves(tree))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


def measure(model: str, pod: str, form: str, num_slots: int, layers: int | None) -> dict[str, Any]:
    config = MODELS[model] | ({} if layers is None else {"num_hidden_layers": layers})
    partition = partition_of(pod)
    row: dict[str, Any] = {
        "model": model,
        "layers": config["num_hidden_layers"],
        "pod": pod,
        "mesh": dict(partition.mesh.shape),
        "form": form,
    }
    slots, (implementation, fully) = None, FORMS[form] or ("xla", False)
    if FORMS[form]:
        spec = lj.LoraSpec.from_hf_config(config, num_slots=num_slots)
        slots = abstract_slots(spec, partition, fully_sharded=fully)
        row |= {"slots": num_slots, "slots_gib": round(bytes_on_a_chip(slots) / _GIB, 3)}
    program = lowered(config, partition, slots, implementation)
    start = time.perf_counter()
    try:
        compiled = program.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        sizes = re.search(r"\((\S+)\) exceeds available HBM \((\S+)\)", str(error))
        return row | {"error": "does not fit" + (f": {sizes[1]} of {sizes[2]}" if sizes else "")}
    memory, text = compiled.memory_analysis(), compiled.as_text()
    kernels = Counter(re.findall(_KERNEL, text))
    calls = {"lora_linear_tpu": PRODUCTS * row["layers"]}
    assert kernels == (calls if implementation == "mosaic_tpu" else {}), kernels
    return row | {
        "compile_s": round(time.perf_counter() - start, 1),
        "arguments_gib": round(memory.argument_size_in_bytes / _GIB, 3),
        "peak_gib": round(memory.peak_memory_in_bytes / _GIB, 3),
        "collectives": dict(Counter(re.findall(COLLECTIVE, text))),
        "kernels": dict(kernels),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--pod", choices=PODS, action="append", help="default: all")
    parser.add_argument("--form", choices=FORMS, action="append", help="default: all")
    parser.add_argument("--slots", type=int, default=32, help="slots of rank 16")
    parser.add_argument("--layers", type=int, help="fewer layers, to compile faster")
    parser.add_argument("--json", help="append each row to this file, one JSON object a line")
    args = parser.parse_args()
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    for model in args.model or MODELS:
        for pod in args.pod or PODS:
            for form in args.form or FORMS:
                row = measure(model, pod, form, args.slots, args.layers)
                print(json.dumps(row), flush=True)
                if args.json:
                    with open(args.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
