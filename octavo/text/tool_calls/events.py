"""What a model's output turns out to be, piece by piece: text, reasoning, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """index: 0, 1, ... in the order of the calls of one answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """text: the next piece of the JSON text of the arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    index: int


Event: TypeAlias = Content | Reasoning | CallStarted | ArgumentsDelta | CallEnded


def join_events(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbours of one kind made into one."""
    joined: list[Event] = []
    pieces: list[str] = []
    for event in events:
        last = joined[-1] if joined else None
        if last is not None and _is_same_text(last, event):
            assert isinstance(event, (Content, Reasoning, ArgumentsDelta)), event
            pieces.append(event.text)
        else:
            _close(joined, pieces)
            joined.append(event)
    _close(joined, pieces)
    return joined


def _is_same_text(last: Event, event: Event) -> bool:
    if isinstance(event, ArgumentsDelta):
        return isinstance(last, ArgumentsDelta) and last.index == event.index
    return isinstance(event, (Content, Reasoning)) and type(event) is type(last)


def _close(joined: list[Event], pieces: list[str]) -> None:
    """Append the collected pieces to the last event."""
    if pieces:
        last = joined[-1]
        assert isinstance(last, (Content, Reasoning, ArgumentsDelta)), last
        text = last.text + "".join(pieces)
        joined[-1] = ArgumentsDelta(last.index, text) if isinstance(last, ArgumentsDelta) else type(last)(text)
        pieces.clear()
