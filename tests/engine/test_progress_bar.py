"""The progress bar: only on a terminal, only after a while."""

from __future__ import annotations

import io
import sys

import pytest

from octavo.engine import progress_bar
from octavo.engine.progress_bar import PromptProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, is_wanted: bool = True) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with PromptProgress(4, is_wanted) as progress:
        progress.push(num_finished=1, num_tokens=10)
        progress.push(num_finished=2, num_tokens=10)
    return stream.getvalue()


def test_a_long_run_on_a_terminal_shows_how_many_prompts_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_SHOWN_AFTER_S", 0.0)
    assert "3/4" in shown_on(Terminal(), monkeypatch)


def test_a_quick_run_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_SHOWN_AFTER_S", 3600.0)
    assert shown_on(Terminal(), monkeypatch) == ""


def test_nothing_is_shown_where_no_terminal_is_or_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_SHOWN_AFTER_S", 0.0)
    assert shown_on(io.StringIO(), monkeypatch) == ""
    assert shown_on(Terminal(), monkeypatch, is_wanted=False) == ""
