"""The page that `octavo serve` prints when it is ready: what runs, where the memory and the time went, how to ask."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from octavo.report import MemoryLedger, StartReport, format_bytes

_MAX_WIDTH = 100
_LABEL_WIDTH = 8


def print_start_page(
    report: StartReport,
    *,
    url: str,
    version: str,
    is_open: bool,
    stream: TextIO | None = None,
    width: int | None = None,
) -> None:
    """is_open: others can reach the server, and no key is set."""
    out = stream or sys.stdout
    console = Console(file=out, width=width, highlight=False)
    if console.width > _MAX_WIDTH:
        console.width = _MAX_WIDTH
    with console.capture() as captured:
        console.print(make_start_page(report, url=url, version=version, is_open=is_open))
    # rich fills lines up with blanks, which only make a log larger.
    out.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))
    out.flush()


def make_start_page(report: StartReport, *, url: str, version: str, is_open: bool) -> RenderableType:
    page = Table.grid(padding=(0, 2))
    page.add_column(width=_LABEL_WIDTH, style="dim")
    page.add_column(overflow="fold")
    page.add_row("model", _describe_model(report))
    page.add_row("memory", _make_ledger_table(report.ledger, report.kv_cache_dtype))
    page.add_row("cache", _describe_cache(report))
    page.add_row(
        "batch", f"up to {report.max_num_seqs:,} sequences and {report.max_num_batched_tokens:,} tokens a step"
    )
    page.add_row("machine", f"{report.device}, {_count(report.threads, 'thread')}, {report.isa}")
    page.add_row("start", _describe_timeline(report))
    for note in report.notes:
        page.add_row(Text("note", style="yellow"), Text(note))
    if is_open:
        warning = "Anybody who can reach this address can use this server: no key is set. Give it one with --api-key."
        page.add_row(Text("WARNING", style="bold red"), Text(warning, style="bold red"))
    title = Text.assemble(("Octavo ", "bold"), version)
    names = ", ".join(report.served_model_names)
    ready = Text.assemble(("Ready at ", "bold green"), (f"{url}/v1", "bold"), " for ", (names, "bold"))
    return Group(title, Padding(page, (0, 0, 0, 2)), ready)


def _describe_model(report: StartReport) -> Text:
    size = _short_count(report.num_parameters)
    return Text(f"{report.model} ({report.architecture}, {size} parameters, {_weights(report)})")


def _weights(report: StartReport) -> str:
    return f"weights {report.weights_dtype}"


def _make_ledger_table(ledger: MemoryLedger, kv_cache_dtype: str) -> Table:
    """Rows that add up, with the sum under a line. All in MiB, so that they can be added by eye."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    names = {"KV cache": f"KV cache ({kv_cache_dtype})"}
    sizes = round_to_sum([row.size_bytes for row in ledger.rows], ledger.budget_bytes)
    for row, size in zip(ledger.rows, sizes, strict=True):
        table.add_row(names.get(row.name, row.name), f"{size:,} MiB", row.note)
    total = f"{round(ledger.budget_bytes / 2**20):,} MiB"
    table.add_row("", "─" * max(len(total), *(len(f"{size:,} MiB") for size in sizes)))
    table.add_row("all that we may use", total)
    return table


def round_to_sum(sizes_bytes: list[int], sum_bytes: int) -> list[int]:
    """Whole MiB that add up to the rounded sum: the largest remainders are rounded up."""
    total = round(sum_bytes / 2**20)
    rounded = [size // 2**20 for size in sizes_bytes]
    by_remainder = sorted(range(len(sizes_bytes)), key=lambda index: -(sizes_bytes[index] % 2**20))
    for index in by_remainder[: total - sum(rounded)]:
        rounded[index] += 1
    return rounded


def _describe_cache(report: StartReport) -> Text:
    ledger = report.ledger
    fitted = {
        "typed": "",
        "model": ", the model's window",
        "memory": f", fitted to memory; the model's window is {report.model_window:,}",
    }
    return Text(
        f"{report.num_blocks:,} blocks of {report.block_size} tokens ({format_bytes(ledger.block_bytes)} each), "
        f"{ledger.num_tokens:,} tokens at once: {_count(report.max_full_length_sequences, 'sequence')} "
        f"of the full {report.max_model_len:,} tokens{fitted.get(report.max_model_len_reason, '')}"
    )


def _describe_timeline(report: StartReport) -> Text:
    total = sum(entry.seconds for entry in report.timeline)
    parts = ", ".join(f"{entry.what} {entry.seconds:.2f}" for entry in report.timeline)
    return Text(f"{total:.2f} s" + (f": {parts}" if parts else ""))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _short_count(number: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"
