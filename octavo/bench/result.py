"""The one form of every measurement, `BenchResult`, and how it is written to JSON and read. Standard library only."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and how it was measured.

    cores, cpus:   physical cores and logical processors that we may use
    isa, threads:  of our kernels; "" and 0 where another process computes
    foreign_share: of all processors' time during the run, the part that others took (0.05: a twentieth);
                   None where the system does not tell
    """

    machine: str
    cores: int
    cpus: int
    memory_bytes: int
    isa: str
    threads: int
    python: str
    version: str
    started_at: str
    foreign_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table, one point of the plot.

    series:   what is drawn as one curve: a server, an op, a part of the step
    x:        where on the axis: users, sequences, rows
    name:     the line's name in the table
    group:    rows of one group make one table; "" where there is one table
    metrics:  numbers by name, the unit at the name's end (_ms, _us, _s, _per_s, _gbs, _gops, _share); None is unknown
    failures: what went wrong, to how often
    marks:    words about the whole row: "exact", "noisy"
    """

    series: str
    x: float
    name: str
    metrics: Mapping[str, float | None]
    failures: Mapping[str, int] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    group: str = ""

    def get(self, metric: str) -> float | None:
        return self.metrics.get(metric)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """kind:    "serve", "throughput", "step" or "kernels"
    subject: the model or the URL
    options: what was asked for, as typed or resolved
    notes:   sentences to read beside the numbers
    """

    kind: str
    subject: str
    environment: Environment
    options: Mapping[str, Any]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def num_failures(self) -> int:
        return sum(sum(row.failures.values()) for row in self.rows)


def to_json(result: BenchResult) -> str:
    """NaN and infinity, which JSON does not have, become null."""
    body = {"format_version": FORMAT_VERSION, **dataclasses.asdict(result)}
    return json.dumps(_finite(body), indent=1, ensure_ascii=False) + "\n"


def from_json(text: str) -> BenchResult:
    """Raises ConfigError for what is not a result of ours, or is of another version."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"The result is not JSON: {error}.") from error
    version = body.pop("format_version", None) if isinstance(body, dict) else None
    if version != FORMAT_VERSION:
        raise ConfigError(f"The result has format_version {version!r}, but {FORMAT_VERSION} is what can be read.")
    try:
        environment = Environment(**body.pop("environment"))
        rows = tuple(Row(**{**row, "marks": tuple(row["marks"])}) for row in body.pop("rows"))
        return BenchResult(**{**body, "environment": environment, "rows": rows, "notes": tuple(body["notes"])})
    except (KeyError, TypeError) as error:
        raise ConfigError(f"The result lacks a field or has one too many: {error}.") from error


def write_json(result: BenchResult, path: Path) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        path.write_text(to_json(result), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}.", option="--json") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
