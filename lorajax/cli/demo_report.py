"""The demo's report, for people."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lorajax.cli.demo import MAX_ERROR, NUM_ROWS, NUM_SLOTS, SLOT_RANK, DemoReport

#: Tokens of a row in the table: what fits 80 columns.
_SHOWN = 3


def print_report(report: DemoReport, console: Console) -> None:
    """Prints the table of rows, the checks and the times."""
    console.print(Group(_table(report), "", _checks(report), "", _times(report)))


def _table(report: DemoReport) -> Table:
    table = Table(
        title=f"{len(report.rows)} requests, {report.adapters} adapters, {NUM_SLOTS} slots of rank "
        f"{SLOT_RANK}, one step of {NUM_ROWS} rows",
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column("row", justify="right", no_wrap=True)
    table.add_column("adapter", style="cyan", no_wrap=True)
    table.add_column("form", style="dim", no_wrap=True)
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("slots", justify="right", no_wrap=True)
    table.add_column("tokens", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    for number, row in enumerate(report.rows):
        good = row.error <= MAX_ERROR and row.same_tokens
        table.add_row(
            str(number),
            row.adapter,
            row.about,
            row.rank,
            str(row.slots),
            " ".join(map(str, row.token_ids[:_SHOWN])) + " ...",
            Text(f"{row.error:.1e}", "green" if good else "bold red"),
        )
    return table


def _checks(report: DemoReport) -> Table:
    details = (
        f"error of logits {report.max_rel_err:.1e} <= {MAX_ERROR:.0e}",
        "prefill and decode",
        f"{report.evictions} times: {report.slots_needed} slots needed, {NUM_SLOTS} there",
        f"{report.new_compiles} new compiles",
    )
    grid = Table.grid(padding=(0, 2, 0, 0))
    for (what, holds), detail in zip(report.checks.items(), details, strict=True):
        mark = Text("ok", "green") if holds else Text("FAILED", "bold red")
        grid.add_row(mark, what, Text(detail, "dim"))
    return grid


def _times(report: DemoReport) -> RenderableType:
    ratio = report.step_ms_lora / report.step_ms_base
    return Text.assemble(
        f"decode step of {NUM_ROWS} rows: ",
        (f"{report.step_ms_base:.2f} ms", "bold"),
        " plain, ",
        (f"{report.step_ms_lora:.2f} ms", "bold"),
        f" with LoRA (x {ratio:.2f})\n",
        ("a model this small is mostly dispatch: benchmarks/ measures larger ones\n", "dim"),
        (f"done in {report.seconds:.1f} s", "dim"),
    )
