"""What the TPU compiler says about the LoRA kernels, without a TPU.

Compiles the fused kernel, the base product alone and XLA's forms for five TPU generations and the
module shapes of Llama-3.1-8B and 70B, and prints two Markdown tables: the static schedule of the
kernel against the base product alone; and bytes, memory and compile time of each form. Needs
`jax[tpu]`. docs/tpu.md says what the numbers mean.

    python benchmarks/tpu_report.py --chips v5e v6e --modules "8B o" "8B gate_up"
"""

import argparse
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    SingleDeviceSharding,
    use_abstract_mesh,
)
from tpu_forms import FORMS, base_kernel
from tpu_schedule import Kernel, kernel_bundles, read_blocks

from lorajax.kernels_pallas import LoraWeights, Routing
from lorajax.kernels_pallas.tpu.problem import Problem, describe
from lorajax.kernels_pallas.tpu.tiles import CHIPS, Chip, Tiles, choose_tiles, vmem_bytes
from lorajax.kernels_pallas.tpu.traffic import floor, traffic

DUMP = Path(tempfile.gettempdir()) / f"tpu_report_{os.getpid()}"
TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
MODULES = {
    "8B qkv": (4096, (4096, 1024, 1024)),
    "8B o": (4096, (4096,)),
    "8B gate_up": (4096, (14336, 14336)),
    "8B down": (14336, (4096,)),
    "70B qkv": (8192, (8192, 1024, 1024)),
    "70B o": (8192, (8192,)),
    "70B gate_up": (8192, (28672, 28672)),
    "70B down": (28672, (8192,)),
}
#: Bytes/s of HBM and cycles/s of the core, where both are published or follow from the peak FLOP/s
#: (275e12 = 8 units x 128 x 128 x 2 x 1.05e9; 197e12 = 4 x ... x 1.5e9; 459e12 = 8 x ... x 1.75e9;
#: 918e12 = 2 x 256 x 256 x 2 x 2 rows x 1.75e9). v4 and v5p: of the chip, whose second core idles.
SPEEDS = {
    "v4": (1228e9, 1.05e9),
    "v5e": (819e9, 1.5e9),
    "v5p": (2765e9, 1.75e9),
    "v6e": (1640e9, 1.75e9),
}
SLOTS, RANK = 64, 16


class Target:
    """One generation to compile for."""

    def __init__(self, name: str):
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[name])
        device = topology.devices[0]
        self.chip: Chip = CHIPS[device.device_kind]
        self.place = SingleDeviceSharding(device)
        kind = AbstractDevice(
            device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu"
        )
        self.mesh = AbstractMesh((), (), abstract_device=kind)

    def compile(self, function, *shapes):
        """The compiled program, and seconds that it took."""
        placed = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.place), shapes
        )
        start = time.perf_counter()
        with use_abstract_mesh(self.mesh):
            lowered = jax.jit(function).lower(*placed)
        return lowered.compile(), time.perf_counter() - start


def arguments(tokens: int, d_in: int, slices: tuple[int, ...], S: int, R: int):
    """Shapes of x, w, the slots, the routing and the layer."""
    struct, bf16, f32, i32 = jax.ShapeDtypeStruct, jnp.bfloat16, jnp.float32, jnp.int32
    G, d_out, block = len(slices), sum(slices), min(tokens, 256)
    P = -(-tokens // block)
    weights = LoraWeights(
        A=struct((1, S, G, R, d_in), bf16),
        B=struct((1, S, R, d_out), bf16),
        scale=struct((1, S, G, R), f32),
        slices=slices,
    )
    routing = Routing(
        weights=struct((S, tokens), f32),
        active=struct((P, S), i32),
        count=struct((P,), i32),
        block=block,
    )
    w = struct((1, d_in, d_out), bf16)
    return struct((tokens, d_in), bf16), w, weights, routing, struct((), i32)


def problem_and_tiles(args, chip: Chip) -> tuple[Problem, Tiles]:
    """The kernel's own view of the arguments."""
    x, _, weights, routing, _ = args
    problem = describe(x, weights, routing, base="product", out_dtype=x.dtype)
    tiles = choose_tiles(problem, chip)
    if tiles is None:
        raise SystemExit(f"no tiles fit {problem} on {chip.name}")
    return problem, tiles


def schedule_of(name: str) -> list:
    """Blocks of the last compiled kernel of a name; clears the dump."""
    files = sorted(DUMP.glob(f"*-{name}*final_bundles.txt"))
    blocks = read_blocks(next(f for f in files[::-1] if "schedule-analysis" not in f.name))
    clear_dump()
    return blocks


def clear_dump() -> None:
    """A compile leaves hundreds of files."""
    for path in DUMP.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def estimated_cycles(compiled) -> str:
    """Cycles that XLA estimates for its own fusions, in thousands; it knows none for a kernel."""
    found = [int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', compiled.as_text())]
    found = [n for n in found if n < 2**48]  # the compiler's mark of an unknown
    return f"{sum(found) / 1e3:.1f}" if found else "-"


def report_forms(target: Target, module: str, tokens: int, active: int) -> None:
    """One row for each form: what is compiled, and the bytes that it moves."""
    args = arguments(tokens, *MODULES[module], SLOTS, RANK)
    problem, tiles = problem_and_tiles(args, target.chip)
    blocks = problem.blocks
    least = floor(problem, active)
    for name, form in FORMS.items():
        jax.clear_caches()
        clear_dump()
        row = f"| {target.chip.name} | {module} | {tokens} | {name} | "
        try:
            compiled, seconds = target.compile(form, *args)
        except jax.errors.JaxRuntimeError as error:  # XLA's own ragged_dot may find no room
            if "Ran out of memory" not in str(error):
                raise
            print(row + "out of memory | - | - | - | - | - |", flush=True)
            continue
        vmem = "-"
        if name == "fused kernel":
            vmem = f"{vmem_bytes(problem, tiles) / 2**20:.1f}"
            counts = [active if blocks == 1 else min(active, 2)] * blocks
            moved, cycles = traffic(problem, tiles, counts).total, "-"
        else:
            moved, cycles = compiled.cost_analysis()["bytes accessed"], estimated_cycles(compiled)
        temporary = compiled.memory_analysis().temp_size_in_bytes
        print(
            f"{row}{seconds:.1f} | {vmem} | {temporary / 2**20:.1f} | {moved / 1e6:.1f} | "
            f"{moved / least:.2f} | {cycles} |",
            flush=True,
        )


def report_schedule(target: Target, module: str, tokens: int) -> None:
    """One row for each number of active slots: bundles, against the base product alone."""
    args = arguments(tokens, *MODULES[module], SLOTS, RANK)
    problem, tiles = problem_and_tiles(args, target.chip)
    grid = tiles.grid(problem)[1:]
    clear_dump()
    target.compile(base_kernel(tiles, target.chip.vmem), args[0], args[1], args[4])
    alone = kernel_bundles(schedule_of("base_tpu"), grid, copies=0, units=0, chunks=1)
    target.compile(FORMS["fused kernel"], *args)
    blocks, chunks = schedule_of("lora_linear_tpu"), problem.d_in // tiles.shrink
    for active in (8, 64):
        units = -(-active // problem.per_pack)
        copies = active * (chunks + grid[0])
        whole = kernel_bundles(blocks, grid, copies=copies, units=units, chunks=chunks)
        print(schedule_row(target.chip.name, module, tokens, active, whole, alone, problem, tiles))


def schedule_row(
    chip: str,
    module: str,
    tokens: int,
    active: int,
    whole: Kernel,
    alone: Kernel,
    problem: Problem,
    tiles: Tiles,
) -> str:
    """A line of the second table."""
    moved = traffic(problem, tiles, [active]).total
    cells = [chip, module, tokens, active, alone.total, whole.total]
    cells += [f"{whole.total / alone.total:.2f}"]
    cells += [whole.control, whole.base, whole.shrink, whole.expand, whole.copies]
    if chip in SPEEDS:
        bandwidth, clock = SPEEDS[chip]
        cycles = moved / bandwidth * clock
        cells += [f"{cycles:.0f}", f"{whole.total / cycles:.2f}"]
    else:
        cells += ["-", "-"]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def prepare(schedule: bool) -> None:
    """Sets what libtpu reads once, when it is loaded. A dump makes every compile slow."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")
    DUMP.mkdir()
    if schedule:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", default=list(TOPOLOGIES), choices=TOPOLOGIES)
    parser.add_argument("--modules", nargs="+", default=list(MODULES), choices=MODULES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[64])
    parser.add_argument("--tables", nargs="+", default=["schedule", "forms"])
    options = parser.parse_args()
    prepare("schedule" in options.tables)
    targets = [Target(name) for name in options.chips]
    cases = [(t, m, n) for t in targets for m in options.modules for n in options.tokens]
    if "schedule" in options.tables:
        print(
            "| chip | module | tokens | active | base alone | fused | fused / base | control | "
            "base | shrink | expand | copies | cycles of the copies | bundles / cycles |"
        )
        print("|---" * 14 + "|")
        for target, module, tokens in cases:
            if tokens <= 256:
                report_schedule(target, module, tokens)
    if "forms" in options.tables:
        print(
            "\n| chip | module | tokens | form | compile s | VMEM MiB | temporary MiB | MB moved | "
            "/ floor | XLA's kilocycles |"
        )
        print("|---" * 10 + "|")
        for target, module, tokens in cases:
            report_forms(target, module, tokens, active=8)
    shutil.rmtree(DUMP)


if __name__ == "__main__":
    main()
