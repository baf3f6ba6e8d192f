"""Stop strings in streamed text: `StopChecker`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """text: may be sent now. stop: the stop string that ended the generation, or None while it goes on."""

    text: str
    stop: str | None = None


class StopChecker:
    """Finds the first stop string in a growing text and never lets a part of it out.

    The match that *ends* first wins, as if the text came character by character: waiting for a longer stop string
    that began earlier could last for ever. Of those that end at the same place the longest wins, so the least is sent.
    The result does not depend on how the text is cut into chunks. The stop string is not part of the text, and what
    comes after it is dropped.

    Held back is the longest end of the text that is a proper beginning of a stop string: no more, no less.
    """

    def __init__(self, stop: Sequence[str]):
        self._automata = [(text, _failure_table(text)) for text in stop if text]
        self._matched = [0] * len(self._automata)  # how much of each stop string the end of the text is
        self._held = ""
        self._is_stopped = False

    def push(self, text: str) -> StopMatch:
        """After a match everything pushed is dropped."""
        if self._is_stopped:
            return StopMatch("")
        if not self._automata:
            return StopMatch(text)
        pending = self._held + text
        num_held = len(self._held)
        matched = self._matched
        for position, character in enumerate(text, start=num_held + 1):
            found = ""
            for index, (stop, failure) in enumerate(self._automata):
                length = matched[index]
                while length and stop[length] != character:
                    length = failure[length]
                if stop[length] == character:
                    length += 1
                if length == len(stop):
                    found = max(found, stop, key=len)
                    length = failure[length]
                matched[index] = length
            if found:
                self._is_stopped = True
                self._held = ""
                return StopMatch(pending[: position - len(found)], found)
        keep = len(pending) - max(matched)
        self._held = pending[keep:]
        return StopMatch(pending[:keep])

    def finish(self) -> str:
        """What was held back, once it is certain that no more text comes."""
        held, self._held = self._held, ""
        return held


def _failure_table(text: str) -> list[int]:
    """table[n]: the longest proper beginning of text[:n] that is also its end (Knuth, Morris and Pratt 1977)."""
    table = [0] * (len(text) + 1)
    length = 0
    for position in range(1, len(text)):
        while length and text[position] != text[length]:
            length = table[length]
        if text[position] == text[length]:
            length += 1
        table[position + 1] = length
    return table
