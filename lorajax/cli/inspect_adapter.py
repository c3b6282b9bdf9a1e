"""`lorajax inspect`: what an adapter folder holds, and whether it can be served."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lorajax.adapters import Explanation, LoraModule, explain
from lorajax.cli import options

#: "model.layers.0.self_attn.q_proj": what comes before the layer, its number, the module.
_IN_LAYER = re.compile(r"(?P<list>.*?)\.(?P<layer>\d+)\.(?P<module>.+)")


def inspect_adapter(adapter_dir: Path, model: Path | None, slot_rank: int, console: Console) -> int:
    """Prints what an adapter holds.

    Args:
        adapter_dir: Folder of the adapter.
        model: Folder of the base model, or None to check only what holds for every base.
        slot_rank: R, to tell how many slots it takes.
        console: Standard output.

    Returns:
        Exit status: 0 if it would be served, 1 if it would be refused.

    Raises:
        LoraError: A path or `slot_rank` is unusable.
    """
    options.check_folder(adapter_dir, "an adapter", "adapter_config.json")
    if slot_rank < 8 or slot_rank % 8:
        raise options.UsageError(
            f"--slot-rank must be a multiple of 8; got {slot_rank}; use 8, 16 or 32"
        )
    spec = None
    if model is not None:
        options.check_folder(model, "a model", "config.json")
        spec = options.spec_for(model, [adapter_dir], slot_rank=slot_rank)
    found = explain(adapter_dir, spec)
    _print(found, model, slot_rank, console)
    return 1 if found.problems else 0


def _print(found: Explanation, model: Path | None, slot_rank: int, console: Console) -> None:
    slots = -(-found.rank // slot_rank)
    facts = [("adapter", found.name)]
    if found.raw.get("base_model_name_or_path"):
        facts.append(("base", str(found.raw["base_model_name_or_path"])))
    if found.modules:
        facts += [
            ("rank", str(found.rank)),
            ("targets", ", ".join(found.module_names)),
            ("slots", f"{slots} of rank {slot_rank}"),
            ("file", f"{_size(found.nbytes)} in {len(found.modules)} modules"),
        ]
    if found.device_bytes is not None:
        facts.append(("device", f"{_size(found.device_bytes)} in its slots"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    for key, value in facts:
        grid.add_row(f"[dim]{key}[/]", escape(value))
    console.print(grid)
    if found.modules:
        console.print()
        console.print(_modules(found.modules))
    for note in found.notes:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False, soft_wrap=True)
    console.print()
    where = "any base model whose layers fit" if model is None else str(model)
    if not found.problems:
        console.print(f"[bold green]accepted[/] for {escape(where)}", highlight=False)
    for problem in found.problems:
        console.print(f"[bold red]refused:[/] {escape(problem)}", highlight=False, soft_wrap=True)


def _modules(modules: Mapping[str, LoraModule]) -> Table:
    """One line for modules that differ only in their layer."""
    groups: dict[tuple[str, int, float, str, str], list[int]] = {}
    for path, m in modules.items():
        match = _IN_LAYER.fullmatch(path)
        name = path if match is None else match["module"]
        key = (name, m.rank, m.scale, f"{m.d_in} -> {m.d_out}", m.dtype)
        groups.setdefault(key, []).extend([] if match is None else [int(match["layer"])])
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("module", "layers", "rank", "scale", "features", "dtype"):
        right = column in ("rank", "scale")
        table.add_column(column, justify="right" if right else "left", no_wrap=column != "layers")
    for (name, rank, scale, shape, dtype), layers in sorted(groups.items()):
        table.add_row(escape(name), ranges(layers) or "-", str(rank), f"{scale:g}", shape, dtype)
    return table


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` as "0-2, 5"."""
    spans: list[list[int]] = []
    for n in sorted(set(numbers)):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"
