"""What is being waited for, once the wait has lasted a second. Standard library: it is shown while others import."""

from __future__ import annotations

import time
from typing import TextIO

_SILENT_S = 1.0
_REPAINT_S = 0.1
_BAR_WIDTH = 30


class ProgressLine:
    """One line on a terminal, painted over; in a log, one line for each stage."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._started_at = time.monotonic()
        self._painted_at = 0.0
        self._stage = ""
        self._width = 0

    def show(self, stage: str, fraction: float | None = None) -> None:
        """fraction: in [0, 1], or None while it is not known"""
        now = time.monotonic()
        if now - self._started_at < _SILENT_S:
            return
        if not self._is_terminal:
            if stage != self._stage:
                self._stage = stage
                self._write(f"{stage} ...\n")
        elif now - self._painted_at >= _REPAINT_S or stage != self._stage:
            self._stage, self._painted_at = stage, now
            line = stage + (f" {make_bar(fraction)} {fraction:4.0%}" if fraction is not None else " ...")
            self._write(f"\r{line:<{self._width}}")
            self._width = len(line)

    def clear(self) -> None:
        """Leave a clean line behind."""
        if self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def make_bar(fraction: float) -> str:
    filled = round(_BAR_WIDTH * min(max(fraction, 0.0), 1.0))
    return "━" * filled + "╌" * (_BAR_WIDTH - filled)
