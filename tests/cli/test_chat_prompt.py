"""The prompt of `octavo chat`: what Ctrl-C and Ctrl-D do there."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from octavo.cli import chat


def raise_interrupt(_: str) -> str:
    signal.raise_signal(signal.SIGINT)
    return "the line went on"


def raise_end_of_file(_: str) -> str:
    raise EOFError


@pytest.mark.parametrize(
    ("read", "turn"),
    [(lambda _: " hello ", "hello"), (raise_interrupt, ""), (raise_end_of_file, None)],
    ids=["a line", "Ctrl-C takes the line back", "Ctrl-D leaves"],
)
def test_the_prompt(monkeypatch: pytest.MonkeyPatch, read: Callable[[str], str], turn: str | None) -> None:
    # Under asyncio another handler is installed, which only takes note: the prompt must not leave it to that one.
    noted: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        monkeypatch.setattr("builtins.input", read)
        assert chat._ask_turn() == turn
        assert noted == []
        signal.raise_signal(signal.SIGINT)
        assert noted == [signal.SIGINT], "the handler was not put back"
    finally:
        signal.signal(signal.SIGINT, previous)
