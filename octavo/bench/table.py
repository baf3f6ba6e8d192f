"""A result as tables for the terminal: at most 80 columns wide, with a bar for the number that matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from octavo.bench.result import BenchResult, Environment, Row
from octavo.report import format_bytes

_BAR_WIDTH = 12
_NAME_WIDTH = 20  # longer names are folded where there is no room
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True)
class Column:
    """metrics:  one, or several shown as "1/2/3"
    scale:    what a metric is multiplied with to be shown: 1e-3 shows ms as s, 100 shows a share as percent
    is_bar:   the metric (the first) as a bar, the longest for the largest in the table
    """

    heading: str
    metrics: tuple[str, ...]
    scale: float = 1.0
    is_bar: bool = False


@dataclass(frozen=True, slots=True)
class TableSpec:
    """names: the heading of the rows' names. A table none of whose metrics is known is not shown."""

    title: str
    names: str
    columns: tuple[Column, ...]
    has_status: bool = False


def _percentiles(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_p{percent}_ms" for percent in (50, 90, 99))


TABLES: dict[str, tuple[TableSpec, ...]] = {
    "serve": (
        TableSpec(
            "Throughput",
            "load",
            (
                Column("output tok/s", ("output_tokens_per_s",)),
                Column("", ("output_tokens_per_s",), is_bar=True),
                Column("total", ("total_tokens_per_s",)),
                Column("req/s", ("requests_per_s",)),
                Column("A/B", ("ratio_to_b",)),
            ),
            has_status=True,
        ),
        TableSpec(
            "Latency in ms: p50/p90/p99",
            "load",
            (
                Column("first token", _percentiles("ttft")),
                Column("between tokens", _percentiles("inter_token")),
                Column("per token", _percentiles("tpot")),
                Column("whole answer", _percentiles("end_to_end")),
            ),
        ),
        TableSpec(
            "While the long prompt is read",
            "load",
            (
                Column("worst gap ms", ("worst_gap_ms",)),
                Column("its first token ms", ("long_ttft_ms",)),
                Column("chats alive", ("chats_alive",)),
            ),
        ),
    ),
    "throughput": (
        TableSpec(
            "Tokens per second",
            "sequences",
            (
                Column("prefill", ("prefill_tokens_per_s",)),
                Column("decode", ("decode_tokens_per_s",)),
                Column("", ("decode_tokens_per_s",), is_bar=True),
                Column("output", ("output_tokens_per_s",)),
                Column("total", ("total_tokens_per_s",)),
                Column("ms/step", ("decode_step_ms",)),
            ),
        ),
    ),
    "step": (
        TableSpec(
            "One decode step",
            "part",
            (
                Column("calls", ("calls_per_step",)),
                Column("µs", ("time_us",)),
                Column("% of step", ("share",), 100),
                Column("", ("share",), is_bar=True),
                Column("µs/call", ("time_per_call_us",)),
                Column("step µs", ("step_us",)),
            ),
        ),
    ),
    "kernels": (
        TableSpec(
            "Kernels",
            "op",
            (
                Column("µs", ("time_us",)),
                Column("GB/s", ("read_gbs",)),
                Column("% bw", ("bandwidth_share",), 100),
                Column("GOP/s", ("gops",)),
                Column("% peak", ("peak_share",), 100),
                Column("of limit", ("limit_share",), is_bar=True),
                Column("× NumPy", ("ratio_to_numpy",)),
            ),
        ),
    ),
}


def print_result(result: BenchResult, stream: TextIO, width: int | None = None) -> None:
    """width: of the terminal when None, and 80 where there is none."""
    console = Console(file=stream, width=width, highlight=False, soft_wrap=False)
    console.print(Text(f"octavo bench {result.kind}: {result.subject}", style="bold"))
    console.print(Text(describe(result.environment), style="dim"))
    for spec in TABLES[result.kind]:
        for group, rows in _groups(result.rows):
            table = make_table(spec, group, rows)
            if table is not None:
                console.print(table)
    for name, count in _failures(result.rows):
        console.print(Text(f"failed {count} x: {name}", style="red"))
    for note in result.notes:
        console.print(Text(note))


def make_table(spec: TableSpec, group: str, rows: Sequence[Row]) -> Table | None:
    columns = [column for column in spec.columns if any(row.get(column.metrics[0]) is not None for row in rows)]
    if not columns:
        return None
    title = f"{spec.title}, {group}" if group else spec.title
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    longest = max(len(row.name) for row in rows)
    table.add_column(spec.names, overflow="fold", min_width=min(longest, _NAME_WIDTH))
    for column in columns:
        table.add_column(column.heading, justify="left" if column.is_bar else "right", no_wrap=True)
    if spec.has_status:
        table.add_column("answers", no_wrap=True)
    for row in rows:
        cells = [_cell(column, row, rows) for column in columns]
        table.add_row(row.name, *cells, *([_status(row)] if spec.has_status else []))
    return table


def describe(environment: Environment) -> str:
    kernels = f", {environment.isa}, {environment.threads} threads" if environment.threads else ""
    foreign = "" if environment.foreign_share is None else f", others used {environment.foreign_share:.0%}"
    return (
        f"{environment.machine}, {environment.cores} cores, {format_bytes(environment.memory_bytes)}{kernels}; "
        f"octavo {environment.version}, Python {environment.python}{foreign}"
    )


def format_number(value: float | None) -> str:
    """Three digits or so: 0.123, 1.23, 12.3, 123, 12,345."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size == int(size):
        return f"{value:.0f}"
    digits = 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}"


def draw_bar(share: float, width: int = _BAR_WIDTH) -> str:
    """share: of the whole width, cut to [0, 1]; in eighths of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def _cell(column: Column, row: Row, rows: Sequence[Row]) -> str:
    values = [row.get(metric) for metric in column.metrics]
    if column.is_bar:
        largest = max((row.get(column.metrics[0]) or 0.0) for row in rows)
        # A share is a part of 1, whatever the largest in the table is.
        full = max(largest, 1.0) if column.metrics[0].endswith("_share") else largest
        return draw_bar((values[0] or 0.0) / full) if full > 0 else ""
    shown = [None if value is None else value * column.scale for value in values]
    if len(shown) == 1:
        return format_number(shown[0])
    return "-" if None in shown else "/".join(_short(value) for value in shown if value is not None)


def _short(value: float) -> str:
    """For three numbers in one cell: 1.5, 23, 456, 12k."""
    if value >= 9_999.5:
        return f"{value / 1000:.0f}k"
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def _status(row: Row) -> str:
    failed = sum(row.failures.values())
    if failed:
        return f"{failed} failed"
    return "exact" if "exact" in row.marks else "inexact"


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return list(groups.items())


def _failures(rows: Sequence[Row]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for row in rows:
        for name, count in row.failures.items():
            counts[name] = counts.get(name, 0) + count
    return sorted(counts.items(), key=lambda item: -item[1])
