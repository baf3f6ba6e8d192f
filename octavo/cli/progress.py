"""What is being waited for, once the wait has lasted a second. Standard library: it is shown while others import."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

from octavo.cli.cells import cell_width, cut_to_width
from octavo.report import format_bytes

_SILENT_S = 1.0
_REPAINT_S = 0.1
_BAR_WIDTH = 24
# Counts of other things (files, layers) stay far below.
_BYTES_FROM = 2**20


class ProgressLine:
    """One line on a terminal, painted over; in a log, one line for each stage."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._started_at = time.monotonic()
        self._painted_at = 0.0
        self._what = ""
        self._width = 0

    def show(self, what: str, num_done: int = 0, num_total: int = 0) -> None:
        """num_total: 0 while it is not known; large numbers are bytes"""
        now = time.monotonic()
        if now - self._started_at < _SILENT_S:
            return
        if not self._is_terminal:
            if what != self._what:
                self._what = what
                self._write(f"{what} ...\n")
        elif now - self._painted_at >= _REPAINT_S or what != self._what:
            self._what, self._painted_at = what, now
            line = what + (" " + _describe(num_done, num_total) if num_total else " ...")
            # A line that wraps could not be painted over.
            line = cut_to_width(line, shutil.get_terminal_size().columns - 1)
            width = cell_width(line)
            self._write("\r" + line + " " * (self._width - width))
            self._width = width

    def clear(self) -> None:
        """Leave a clean line behind."""
        if self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _describe(num_done: int, num_total: int) -> str:
    share = min(num_done / num_total, 1.0)
    filled = round(_BAR_WIDTH * share)
    bar = "━" * filled + "╌" * (_BAR_WIDTH - filled)
    size = f", {format_bytes(num_done)} of {format_bytes(num_total)}" if num_total >= _BYTES_FROM else ""
    return f"{bar} {share:4.0%}{size}"
