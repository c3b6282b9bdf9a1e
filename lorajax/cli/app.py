"""The commands, their arguments, and the exit status of every error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import jax
import typer
from rich.console import Console
from rich.markup import escape

from lorajax.cli import options
from lorajax.cli.demo import DemoReport, run_demo
from lorajax.cli.demo_report import print_report
from lorajax.cli.generate import DEFAULT_SLOTS, GenerateOptions
from lorajax.cli.generate import generate as run_generate
from lorajax.cli.inspect_adapter import inspect_adapter
from lorajax.cli.processes import Processes, leave
from lorajax.errors import ImplementationError, LoraError

app = typer.Typer(
    name="lorajax",
    help="Multi-LoRA serving in JAX: any mix of adapters in one compiled step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


InputFile = Annotated[
    Path,
    typer.Option(
        "--input",
        help='JSON lines: {"id": str, "prompt_ids": \\[int], "adapter": null | "NAME" | '
        '{"NAME": weight, ...}, "max_tokens": int}, or "prompt": str if the model has a '
        "tokenizer.json.",
    ),
]
OutputFile = Annotated[
    Path,
    typer.Option(
        "--output",
        help='JSON lines, in the order of the input: {"id", "token_ids"} and with --logprobs '
        '"logprobs"; or {"id", "error"}.',
    ),
]


Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="AXIS=SIZE,...",
        help="Devices to serve on: data (rows), fsdp (rows and weights), tensor (features), "
        "for example data=2,tensor=4. By default one device.",
    ),
]
FullySharded = Annotated[
    bool,
    typer.Option(
        "--fully-sharded",
        help="Keep no whole A or B on any device of the tensor axis: less memory for slots, and a "
        "small collective in every adapted product.",
    ),
]
ImplementationName = Annotated[
    str | None,
    typer.Option(
        "--implementation",
        metavar="xla|mosaic_gpu|mosaic_tpu",
        help="How to compute products with adapters; by default the best for the platform that was "
        "shown to be right and fastest. On Hopper GPUs mosaic_gpu must be asked for.",
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Process 0, where several processes run this command on one mesh.",
    ),
]
ProcessId = Annotated[int | None, typer.Option(help="Which process this is; 0 writes the output.")]
Distributed = Annotated[
    bool,
    typer.Option("--distributed", help="Ask the cluster for these three (TPU pods, Slurm)."),
]
Slots = Annotated[
    int | None,
    typer.Option(
        help=f"Slots on the device; by default {DEFAULT_SLOTS}, or what the largest adapter "
        "or mix takes. More adapters than slots is normal."
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=DIR", help="A PEFT adapter and its name; may be repeated."),
]
NumProcesses = Annotated[int | None, typer.Option(help="How many processes.")]


def run() -> None:
    """Runs the command line."""
    app()


@app.command()
def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the report to this file.")
    ] = None,
) -> None:
    """Serve 10 adapters in one step, offline, and check every row against merged weights."""

    def body() -> int:
        if json_file is not None:
            options.check_output(json_file)
        console, report = Console(), None
        with console.status("starting") as status:
            for event in run_demo():
                if isinstance(event, DemoReport):
                    report = event
                else:
                    status.update(event)
        assert report is not None
        print_report(report, console)
        if json_file is not None:
            json_file.write_text(json.dumps(report.json(), indent=2) + "\n", encoding="utf-8")
        return 0 if all(report.checks.values()) else 1

    _exit_with(body)


@app.command()
def generate(
    model: Annotated[Path, typer.Option(help="Folder of a Hugging Face model.")],
    input_file: InputFile,
    output_file: OutputFile,
    adapter: Adapters = None,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens to generate for lines that do not say.")
    ] = 32,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="float32|bfloat16", help="Element type; by default the model's (or float32)."
        ),
    ] = None,
    slots: Slots = None,
    slot_rank: Annotated[
        int, typer.Option(help="Rank of a slot, a multiple of 8; adapters take several.")
    ] = 16,
    batch_size: Annotated[int, typer.Option(help="Lines served at a time.")] = 16,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Also write each token's log probability.")
    ] = False,
    mesh: Mesh = None,
    fully_sharded: FullySharded = False,
    implementation: ImplementationName = None,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    distributed: Distributed = False,
) -> None:
    """Continue prompts greedily, each with its own adapter, all in shared batches.

    Exit status: 0 all lines served, 1 some lines failed, 2 unusable arguments.
    """
    several = distributed or any(x is not None for x in (coordinator, num_processes, process_id))

    def body() -> int:
        opts = GenerateOptions(
            model=model,
            adapters=options.adapter_folders(adapter or []),
            input=input_file,
            output=output_file,
            max_tokens=max_tokens,
            dtype=dtype,
            slots=slots,
            slot_rank=slot_rank,
            batch_size=batch_size,
            logprobs=logprobs,
            mesh=options.mesh_axes(mesh),
            fully_sharded=fully_sharded,
            implementation=implementation,
            processes=Processes(coordinator, num_processes, process_id) if several else None,
        )
        return run_generate(opts, Console(stderr=True))

    _exit_with(body)


@app.command()
def inspect(
    adapter_dir: Annotated[Path, typer.Argument(help="Folder of a PEFT adapter.")],
    model: Annotated[
        Path | None, typer.Option(help="Folder of the base model, to check that it fits.")
    ] = None,
    slot_rank: Annotated[int, typer.Option(help="Rank of a slot, a multiple of 8.")] = 16,
) -> None:
    """Show what an adapter holds, the slots it takes, and whether it would be refused.

    Exit status: 0 accepted, 1 refused, 2 unusable path.
    """
    _exit_with(lambda: inspect_adapter(adapter_dir, model, slot_rank, Console()))


def _exit_with(body: Callable[[], int]) -> None:
    """Ends with the status that a command returns; an error is one line and status 2."""
    try:
        status = body()
    except (LoraError, ImplementationError, OSError) as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:  # a traceback helps nobody at a command line
        if jax.distributed.is_initialized():
            _fail(f"all processes must go on; got {error}; look for the first error of any", 2)
        _fail(f"unexpected {type(error).__name__}: {error}; please report this", 2)
    else:
        raise typer.Exit(status)


def _fail(message: str, status: int) -> NoReturn:
    console = Console(stderr=True)
    console.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    if jax.distributed.is_initialized():
        leave(status)
    raise typer.Exit(status)
