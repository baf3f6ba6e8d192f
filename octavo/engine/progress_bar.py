"""A progress bar for many prompts: on standard error, on a terminal, and only when it takes long enough to wonder."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

# A bar that flashes by tells nothing.
_SHOWN_AFTER_S = 1.0


class PromptProgress:
    """Counts finished prompts and generated tokens; a context manager. Silent where standard error is no terminal."""

    def __init__(self, num_prompts: int, is_wanted: bool = True):
        self._num_prompts = num_prompts
        self._num_finished = 0
        self._num_tokens = 0
        self._start = time.monotonic()
        self._is_wanted = is_wanted and sys.stderr is not None and sys.stderr.isatty()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> PromptProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def push(self, num_finished: int, num_tokens: int) -> None:
        """What one step added."""
        self._num_finished += num_finished
        self._num_tokens += num_tokens
        if not self._is_wanted:
            return
        elapsed = time.monotonic() - self._start
        if self._bar is None:
            if elapsed < _SHOWN_AFTER_S:
                return
            self._show()
        assert self._bar is not None
        speed = f"{self._num_tokens / elapsed:.0f} tokens/s"
        self._bar.update(self._task, completed=self._num_finished, speed=speed)

    def _show(self) -> None:
        self._bar = Progress(
            TextColumn("Prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("prompts", total=self._num_prompts, speed="")
        self._bar.start()
