"""What the start-up page tells: where the memory goes, what fits, and where the time went.

Plain data that msgspec can carry from the engine process to whoever prints it. Standard library only; imports nothing
of ours.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """note: how the number came about, in a few words."""

    name: str
    size_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """How the memory that we may use is spent; the rows add up to `budget_bytes`.

    budget_note:           how the budget came about, in a few words
    rows:                  weights, LoRA adapters where they are on, KV cache, workspace, rest, in this order
    num_tokens:            what the cache holds at once when no window has let a token go: a slot of every group each
    max_full_length_sequences: how many sequences of max_model_len tokens fit at once
    """

    budget_bytes: int
    rows: tuple[LedgerRow, ...]
    block_bytes: int
    num_blocks: int
    num_tokens: int
    max_full_length_sequences: int
    budget_note: str = ""

    def __post_init__(self) -> None:
        total = sum(row.size_bytes for row in self.rows)
        assert total == self.budget_bytes, (total, self.budget_bytes)

    def get_bytes(self, name: str) -> int:
        return next(row.size_bytes for row in self.rows if row.name == name)


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    what: str
    seconds: float


@dataclass(slots=True)
class Timeline:
    """Where the start-up time went, in order."""

    entries: list[TimelineEntry] = field(default_factory=list)

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.entries.append(TimelineEntry(what, time.perf_counter() - start))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """Everything that the start-up page shows.

    weights_dtype:        the formats of the weight matrices, largest first: "4-bit 76 MiB, 8-bit 28 MiB"; only a name
                          where there is one format
    model_window:         the longest sequence that the model was made for
    max_model_len_reason: "typed", "model" (the model's whole window), "memory" (cut to what the cache holds) or "step"
                          (cut to max_num_batched_tokens, without chunked prefill)
    notes:                sentences the user should read: options without effect, what was fitted, oversubscription
    """

    model: str
    served_model_names: tuple[str, ...]
    architecture: str
    num_parameters: int
    weights_dtype: str
    weights_bytes: int
    ledger: MemoryLedger
    block_size: int
    num_blocks: int
    kv_cache_dtype: str
    max_model_len: int
    max_model_len_reason: str
    model_window: int
    max_full_length_sequences: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    threads: int
    isa: str
    timeline: tuple[TimelineEntry, ...] = ()
    notes: tuple[str, ...] = ()


def describe_formats(bytes_by_format: Mapping[str, int]) -> str:
    """For StartReport.weights_dtype."""
    if len(bytes_by_format) == 1:
        return next(iter(bytes_by_format))
    by_size = sorted(bytes_by_format.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(size_bytes)}" for name, size_bytes in by_size)


def format_bytes(size_bytes: float) -> str:
    """ "1.5 GiB": three digits or so, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024 or unit == "GiB":
            digits = 0 if unit == "B" else (2 if abs(size_bytes) < 10 else 1 if abs(size_bytes) < 100 else 0)
            return f"{size_bytes:.{digits}f} {unit}"
        size_bytes /= 1024
    raise AssertionError("unreachable")
