"""A result as a picture, PNG or SVG by the file's name. matplotlib is an extra: pip install 'octavo[bench]'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench.result import BenchResult, Row
from octavo.errors import ConfigError

SUFFIXES = (".png", ".svg")
_MAX_SERIES = 10  # as many as there are colours


@dataclass(frozen=True, slots=True)
class Panel:
    """is_stacked: bars, one a value of x, made of the series; else one line a series"""

    metric: str
    title: str
    scale: float = 1.0
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class PlotSpec:
    x_label: str
    panels: tuple[Panel, ...]


PLOTS: dict[str, PlotSpec] = {
    "serve": PlotSpec(
        "users or requests a second",
        (
            Panel("output_tokens_per_s", "output tokens/s"),
            Panel("ttft_p50_ms", "first token, p50 ms"),
            Panel("inter_token_p99_ms", "between tokens, p99 ms"),
        ),
    ),
    "throughput": PlotSpec(
        "sequences at once",
        (
            Panel("decode_tokens_per_s", "decode tokens/s"),
            Panel("prefill_tokens_per_s", "prefill tokens/s"),
            Panel("output_tokens_per_s", "output tokens/s"),
        ),
    ),
    "step": PlotSpec(
        "sequences in the step", (Panel("time_us", "ms a step", 1e-3, True), Panel("share", "% of the step", 100, True))
    ),
    "kernels": PlotSpec("rows", (Panel("limit_share", "% of the machine's limit", 100), Panel("gops", "GOP/s"))),
}


def check_plot_path(path: Path) -> None:
    """Before anything is measured. Raises ConfigError for a name we cannot write, or without matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"--plot is {str(path)!r}, but its name must end in {' or '.join(SUFFIXES)}.", option="--plot"
        )
    _import_pyplot()


def save_plot(result: BenchResult, path: Path) -> None:
    """Raises ConfigError when it cannot be drawn or written."""
    check_plot_path(path)
    pyplot = _import_pyplot()
    spec = PLOTS[result.kind]
    figure, axes = pyplot.subplots(1, len(spec.panels), figsize=(4.6 * len(spec.panels), 4.2), squeeze=False)
    series = pick_series(result.rows, spec.panels[0].metric)
    for panel, ax in zip(spec.panels, axes[0], strict=True):
        (_draw_bars if panel.is_stacked else _draw_lines)(ax, panel, result.rows, series)
        ax.set_title(panel.title, fontsize=10)
        ax.set_xlabel(spec.x_label, fontsize=9)
        ax.set_ylim(bottom=0)
    axes[0][-1].legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(f"octavo bench {result.kind}: {result.subject} ({result.environment.machine})", fontsize=10)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=144)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}.", option="--plot") from error
    finally:
        pyplot.close(figure)


def pick_series(rows: Sequence[Row], metric: str) -> list[str]:
    """At most as many as can be told apart: the largest ones, in the order of the rows."""
    largest: dict[str, float] = {}
    for row in rows:
        largest[row.series] = max(largest.get(row.series, 0.0), row.get(metric) or 0.0)
    kept = set(sorted(largest, key=lambda name: -largest[name])[:_MAX_SERIES])
    return [name for name in largest if name in kept]


def points_of(rows: Sequence[Row], series: str, panel: Panel) -> list[tuple[float, float]]:
    """(x, y) in order of x, where the metric is known."""
    points = [(row.x, row.get(panel.metric)) for row in rows if row.series == series]
    return sorted((x, y * panel.scale) for x, y in points if y is not None)


def _draw_lines(ax: Any, panel: Panel, rows: Sequence[Row], series: Sequence[str]) -> None:
    for name in series:
        points = points_of(rows, name, panel)
        if points:
            ax.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, label=name)
    ticks = sorted({row.x for row in rows})
    if len(ticks) > 1 and ticks[0] > 0:
        ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.grid(alpha=0.3)


def _draw_bars(ax: Any, panel: Panel, rows: Sequence[Row], series: Sequence[str]) -> None:
    ticks = sorted({row.x for row in rows})
    bottom = [0.0] * len(ticks)
    for name in series:
        height_of = dict(points_of(rows, name, panel))
        heights = [height_of.get(tick, 0.0) for tick in ticks]
        ax.bar(range(len(ticks)), heights, bottom=bottom, width=0.7, label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    ax.set_xticks(range(len(ticks)), [f"{tick:g}" for tick in ticks])


def _import_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'octavo[bench]', or leave --plot out; "
            "--json FILE keeps all the numbers.",
            option="--plot",
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
