"""`lorajax generate`: JSON lines in, greedy continuations out, all lines in shared batches."""

import dataclasses
import hashlib
import io
import itertools
import json
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lorajax import models
from lorajax.adapter import Adapter
from lorajax.adapters import load_adapter
from lorajax.cli import options
from lorajax.cli.lines import Line, read_lines
from lorajax.cli.options import UsageError
from lorajax.cli.processes import Processes, join, partition_of
from lorajax.cli.tokenizer import encoder
from lorajax.engine import Engine, Limits, RequestError, Result, Steps, eos_token_ids
from lorajax.errors import AdapterError, LoraError
from lorajax.runtime import AdapterManager
from lorajax.sharding import agree, state_shardings
from lorajax.spec import LoraSpec

#: Slots, unless an adapter or a mix needs more.
DEFAULT_SLOTS = 8
#: Cache rows are padded to a multiple of this many positions.
_LENGTH_STEP = 64


@dataclass(frozen=True)
class GenerateOptions:
    """Arguments of `lorajax generate`; `slots`, `dtype` and `implementation` None mean: choose.

    `mesh` None is one device; `fully_sharded` cuts slots over it fully. With `processes` other
    processes run the same command.
    """

    model: Path
    adapters: Mapping[str, Path]
    input: Path
    output: Path
    max_tokens: int
    dtype: str | None
    slots: int | None
    slot_rank: int
    batch_size: int
    logprobs: bool
    mesh: Mapping[str, int] | None = None
    fully_sharded: bool = False
    implementation: str | None = None
    processes: Processes | None = None


def generate(opts: GenerateOptions, console: Console) -> int:
    """Serves a file of lines.

    Args:
        opts: Arguments.
        console: Standard error: progress (on a terminal) and the summary.

    Returns:
        Exit status: 0 if all lines were served, 1 if some failed.

    Raises:
        LoraError: Model, adapters or arguments are unusable; the output was not touched.
        ImplementationError: The implementation cannot run this; nor was it then.
        OSError: Input or output cannot be read or written.
    """
    _check_paths(opts)
    first = join(opts.processes)
    partition = partition_of(opts.mesh)
    config = models.ModelConfig.from_hf(opts.model)
    dtype = options.dtype(opts.dtype, config.dtype)
    lines = _read_input(opts, Limits(config.vocab_size, config.max_positions))
    spec, adapters = _load_adapters(opts, dtype, lines, console)
    eos_ids = eos_token_ids(opts.model)
    agree(_alike(opts, spec, adapters, eos_ids))
    model = models.load_model(
        opts.model, dtype=dtype, partition=partition, implementation=opts.implementation
    )
    steps = Steps(model, partition=partition)
    shardings = None
    if partition is not None:
        shardings = state_shardings(spec, partition.mesh, fully_sharded=opts.fully_sharded)
    manager = AdapterManager(spec, sources=adapters, shardings=shardings, agree=agree)
    requests = [line.request for line in lines if line.request is not None]
    lengths = [len(r.prompt_ids) + r.max_tokens for r in requests]
    longest = -(-max(lengths, default=1) // _LENGTH_STEP) * _LENGTH_STEP
    engine = Engine(
        steps,
        manager,
        num_rows=_rows(opts.batch_size, len(requests), steps.row_shards),
        max_length=min(longest, config.max_positions),
        eos_ids=eos_ids,
    )
    start = time.perf_counter()
    results = _started(_with_progress(engine.serve(requests), len(requests), console))
    with opts.output.open("w", encoding="utf-8") if first else io.StringIO() as out:
        failed = _write_in_order(lines, results, out, logprobs=opts.logprobs)
    if first:
        _summary(console, engine, spec, len(lines), failed, time.perf_counter() - start)
    return 1 if failed else 0


def _started(results: Iterator[Result]) -> Iterator[Result]:
    """The same results, after the first of them: what cannot run fails before that."""
    return itertools.chain(list(itertools.islice(results, 1)), results)


def _alike(
    opts: GenerateOptions, spec: LoraSpec, adapters: Mapping[str, Adapter], eos_ids: Iterable[int]
) -> list[str]:
    """What every process must have alike, for `lorajax.sharding.agree`."""
    files = {"input": opts.input, "model config": opts.model / "config.json"}
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    return [
        *(f"{name} {digest[:16]}" for name, digest in hashes.items()),
        f"{spec.num_slots} slots of rank {spec.slot_rank}, {spec.dtype}"
        + ", fully sharded" * opts.fully_sharded,
        f"implementation {opts.implementation}",
        f"batch size {opts.batch_size}, max tokens {opts.max_tokens}",
        f"end of sequence {sorted(eos_ids)}",
        *(f"adapter {name!r} {adapter.digest[:16]}" for name, adapter in sorted(adapters.items())),
    ]


def _rows(batch_size: int, requests: int, row_shards: int) -> int:
    """Rows of the batch: no more than there are requests, and a multiple of the mesh's shards."""
    return max(1, -(-min(batch_size, requests) // row_shards)) * row_shards


def _check_paths(opts: GenerateOptions) -> None:
    options.check_folder(opts.model, "a model", "config.json")
    if not opts.input.exists() or opts.input.is_dir():
        raise UsageError(
            f"an input must be a file of JSON lines; got {opts.input}; correct the path"
        )
    options.check_output(opts.output)
    if opts.output.exists() and opts.output.samefile(opts.input):
        raise UsageError(
            f"input and output must be two files; got {opts.input} for both; name another output"
        )
    if opts.fully_sharded and opts.mesh is None:
        raise UsageError(
            "--fully-sharded must come with a mesh that cuts slots; got no --mesh; give one, for "
            "example --mesh tensor=4"
        )
    for name, value in (
        ("--slots", opts.slots),
        ("--batch-size", opts.batch_size),
        ("--max-tokens", opts.max_tokens),
    ):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1; got {value}; give a larger number")


def _read_input(opts: GenerateOptions, limits: Limits) -> list[Line]:
    encode = encoder(opts.model / "tokenizer.json")
    with opts.input.open("rb") as file:
        lines = read_lines(file, encode=encode, max_tokens=opts.max_tokens)
    return [_checked(line, limits) for line in lines]


def _checked(line: Line, limits: Limits) -> Line:
    if line.request is None:
        return line
    try:
        limits.check(line.request)
    except RequestError as error:
        return Line(line.id, error=str(error))
    return line


def _load_adapters(
    opts: GenerateOptions, dtype: Any, lines: Sequence[Line], console: Console
) -> tuple[LoraSpec, dict[str, Adapter]]:
    """Reads every adapter, and chooses the number of slots if it was not given."""
    folders = opts.adapters.values()
    spec = options.spec_for(opts.model, folders, slot_rank=opts.slot_rank, dtype=dtype)
    adapters = {name: _load(name, path, spec, console) for name, path in opts.adapters.items()}
    if opts.slots is None:
        return dataclasses.replace(spec, num_slots=_enough_slots(adapters, lines)), adapters
    for name, adapter in adapters.items():
        if adapter.num_slots > opts.slots:
            raise UsageError(
                f"an adapter's rank must fit the slots; got rank {adapter.rank} of {name!r} for "
                f"{opts.slots} slots of rank {spec.slot_rank} (together rank "
                f"{opts.slots * spec.slot_rank}); give --slots {adapter.num_slots} or more"
            )
    return dataclasses.replace(spec, num_slots=opts.slots), adapters


def _enough_slots(adapters: Mapping[str, Adapter], lines: Sequence[Line]) -> int:
    """The default, or what the largest adapter or mix takes."""
    sizes = [DEFAULT_SLOTS, *(adapter.num_slots for adapter in adapters.values())]
    for line in lines:
        choice = None if line.request is None else line.request.adapter
        if isinstance(choice, Mapping):
            sizes.append(sum(adapters[name].num_slots for name in choice if name in adapters))
    return max(sizes)


def _load(name: str, path: Path, spec: LoraSpec, console: Console) -> Adapter:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            adapter = load_adapter(path, spec, name=name)
        except AdapterError as error:
            text = str(error)
            raise UsageError(text if repr(name) in text else f"adapter {name!r}: {text}") from error
    for warning in caught:
        console.print(f"[yellow]warning:[/] {escape(str(warning.message))}", soft_wrap=True)
    return adapter


def _with_progress(results: Iterator[Result], total: int, console: Console) -> Iterator[Result]:
    """The same results, with a progress bar while they come, if the console is a terminal."""
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        task, tokens = progress.add_task("serving", total=total, tokens=0), 0
        for result in results:
            tokens += len(result.token_ids)
            progress.update(task, advance=1, tokens=tokens)
            yield result


def _write_in_order(
    lines: Sequence[Line], results: Iterator[Result], out: TextIO, *, logprobs: bool
) -> int:
    """Writes each line's result as soon as those of all lines before it are there.

    Returns:
        How many lines failed.
    """
    done: dict[str, Result] = {}
    failed = 0
    for line in lines:
        if line.request is None:
            record: dict[str, Any] = {"id": line.id, "error": line.error}
        else:
            while line.request.id not in done:
                result = next(results)
                done[result.request.id] = result
            record = _record(done.pop(line.request.id), logprobs)
        failed += "error" in record
        out.write(json.dumps(record) + "\n")
        out.flush()
    # Runs the iterator to its end, so that it closes what it holds.
    for _ in results:
        raise LoraError("the engine gave a result twice; this is a fault of lorajax; report it")
    return failed


def _record(result: Result, logprobs: bool) -> dict[str, Any]:
    if result.error is not None:
        return {"id": result.request.id, "error": result.error}
    record: dict[str, Any] = {"id": result.request.id, "token_ids": list(result.token_ids)}
    return record | {"logprobs": list(result.logprobs)} if logprobs else record


def _summary(
    console: Console, engine: Engine, spec: LoraSpec, lines: int, failed: int, seconds: float
) -> None:
    stats, pool = engine.stats, engine.manager.stats
    rate = stats.tokens / seconds if seconds > 0 else 0.0
    colour = "red" if failed else "green"
    console.print(
        f"[{colour}]served {lines - failed} of {lines} lines[/] in {seconds:.1f} s: "
        f"{stats.tokens} tokens, {rate:.1f} a second; {stats.prefill_steps} prefill and "
        f"{stats.decode_steps} decode steps of {engine.num_rows} rows\n"
        f"{spec.num_slots} slots of rank {spec.slot_rank} ({spec.total_bytes / 2**20:.1f} MiB): "
        f"{pool.loads} adapter loads, {pool.hits} hits, {pool.evictions} evictions",
        highlight=False,
        soft_wrap=True,
    )
