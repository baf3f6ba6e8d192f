"""A model's thinking is split off its answer while both come: `ReasoningSplitter`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.text.tool_calls.events import Content, Event, Reasoning

_WHITE_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    start: str
    end: str


_THINK = ReasoningMarkers("<think>", "</think>")
FORMATS: Mapping[str, ReasoningMarkers] = {
    "think": _THINK,
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
}


def get_reasoning_markers(name: str) -> ReasoningMarkers:
    """Raises ConfigError for a name we do not have."""
    if name not in FORMATS:
        raise ConfigError(
            f"There is no reasoning parser {name!r}; there are {', '.join(sorted(FORMATS))}, and none.",
            option="--reasoning-parser",
        )
    return FORMATS[name]


def detect_reasoning(chat_template_source: str | None) -> ReasoningMarkers | None:
    """The markers that the template itself writes or looks for; None for a model that does not think aloud."""
    source = chat_template_source or ""
    for markers in (_THINK, FORMATS["mistral"]):
        if markers.start in source or markers.end in source:
            return markers
    return None


def opens_reasoning(prompt: str, markers: ReasoningMarkers) -> bool:
    """Whether the prompt ends inside reasoning: templates of models that always think write the marker themselves."""
    return prompt.rstrip(_WHITE_SPACE).endswith(markers.start)


class ReasoningSplitter:
    """One answer's text into Reasoning and Content; `push` what comes, then `finish`.

    Reasoning is what stands between the markers at the beginning of the answer; markers further on are content.
    White space at both ends of the reasoning, and between it and the content, is dropped; an answer without reasoning
    is content to the character. Reasoning that never ends is all reasoning. Held back is white space, and what may
    still become a marker. The result does not depend on how the text is cut.

    starts_inside: the prompt ended with the opening marker (`opens_reasoning`); a model that writes it again is
                   forgiven
    """

    def __init__(self, markers: ReasoningMarkers = _THINK, starts_inside: bool = False):
        self._markers = markers
        self._state = "opening"
        self._starts_inside = starts_inside
        self._has_reasoning = False
        self._pending = ""

    @property
    def is_reasoning(self) -> bool:
        """What was pushed so far ends in the reasoning, as far as can be told."""
        return self._state == "inside" or (self._state == "opening" and self._starts_inside)

    def push(self, text: str) -> list[Event]:
        if self._state == "content":
            return [Content(text)] if text else []
        self._pending += text
        events: list[Event] = []
        if self._state == "opening":
            self._read_opening()
        if self._state == "inside":
            self._read_inside(events)
        if self._state == "after":
            self._pending = self._pending.lstrip(_WHITE_SPACE)
            if self._pending:
                self._state = "content"
        if self._state == "content" and self._pending:
            events.append(Content(self._pending))
            self._pending = ""
        return events

    def finish(self) -> list[Event]:
        pending, self._pending = self._pending, ""
        if self._state == "inside" or (self._state == "opening" and self._starts_inside):
            pending = pending.rstrip(_WHITE_SPACE) if self._has_reasoning else pending.strip(_WHITE_SPACE)
            return [Reasoning(pending)] if pending else []
        return [Content(pending)] if pending and self._state != "after" else []

    def _read_opening(self) -> None:
        begun = self._pending.lstrip(_WHITE_SPACE)
        if begun.startswith(self._markers.start):
            self._state, self._pending = "inside", begun[len(self._markers.start) :]
        elif not self._markers.start.startswith(begun):
            self._state = "inside" if self._starts_inside else "content"

    def _read_inside(self, events: list[Event]) -> None:
        if not self._has_reasoning:
            self._pending = self._pending.lstrip(_WHITE_SPACE)
        end = self._markers.end
        position = self._pending.find(end)
        if position >= 0:
            shown, rest = self._pending[:position].rstrip(_WHITE_SPACE), self._pending[position + len(end) :]
            self._state = "after"
        else:
            num_marker = next(n for n in range(len(end) - 1, -1, -1) if self._pending.endswith(end[:n]))
            shown = self._pending[: len(self._pending) - num_marker].rstrip(_WHITE_SPACE)
            rest = self._pending[len(shown) :]
        if shown:
            self._has_reasoning = True
            events.append(Reasoning(shown))
        self._pending = rest
