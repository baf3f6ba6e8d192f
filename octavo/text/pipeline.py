"""From an answer's text to what the API sends: reasoning is split off, calls are found, the rest is content.

Stop strings have been cut off before, on the raw text (`octavo.text.stop`). Whatever ends the answer, a stop string
too, `finish` sends what was held back: nothing that was sampled and kept is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.text.reasoning import ReasoningSplitter
from octavo.text.tool_calls.events import ArgumentsDelta, CallEnded, CallStarted, Content, Event, Reasoning
from octavo.text.tool_calls.parser import ToolCallParser


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """One entry of `delta.tool_calls`. The first of a call has call_id and name; arguments add up."""

    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        if self.call_id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What one chunk adds; None and () where it adds nothing."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def without_reasoning(self) -> ChatDelta | None:
        """None when there is nothing else."""
        if self.content is None and not self.tool_calls:
            return None
        return ChatDelta(self.content, None, self.tool_calls)

    def as_dict(self) -> dict[str, Any]:
        """`delta` of a chunk, without the role."""
        fields: dict[str, Any] = {}
        if self.reasoning_content is not None:
            fields["reasoning_content"] = self.reasoning_content
        if self.content is not None:
            fields["content"] = self.content
        if self.tool_calls:
            fields["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return fields


class ChatPipeline:
    """One choice's way from text to deltas. `push` each delta's text, then `finish` once.

    reasoning, parser: None leaves that step out
    is_named:          tool_choice named a function: the end is then "stop" as OpenAI has it, plain and streamed alike
    """

    def __init__(
        self,
        reasoning: ReasoningSplitter | None = None,
        parser: ToolCallParser | None = None,
        is_named: bool = False,
    ):
        self._reasoning = reasoning
        self._parser = parser
        self._is_named = is_named
        self._is_in_call = False

    @property
    def is_reasoning(self) -> bool:
        """What was pushed so far ends in the reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    def push(self, text: str) -> list[ChatDelta]:
        events = self._reasoning.push(text) if self._reasoning else [Content(text)]
        return make_deltas(self._parse(events))

    def finish(self, reason: str) -> tuple[list[ChatDelta], str]:
        """What was held, and the reason to send: "tool_calls" in place of "stop" when there were calls.

        A call that a stop string, or the model itself, has cut off leaves it at "stop": nobody can make that call.
        """
        events = self._parse(self._reasoning.finish()) if self._reasoning else []
        if self._parser is not None:
            is_cut = self._is_in_call
            events += self._parser.finish()
            if reason == "stop" and self._parser.num_calls and not self._is_named and not is_cut:
                reason = "tool_calls"
        return make_deltas(events), reason

    def _parse(self, events: Iterable[Event]) -> list[Event]:
        if self._parser is None:
            return list(events)
        parsed: list[Event] = []
        for event in events:
            parsed += self._parser.push(event.text) if isinstance(event, Content) else [event]
        for event in parsed:
            if isinstance(event, (CallStarted, CallEnded)):
                self._is_in_call = isinstance(event, CallStarted)
        return parsed


def make_deltas(events: Iterable[Event]) -> list[ChatDelta]:
    """As few deltas as keep the order: reasoning, content, calls; what comes in another order starts the next one."""
    deltas: list[ChatDelta] = []
    reasoning, content, calls = "", "", {}  # type: ignore[var-annotated]

    def close() -> None:
        nonlocal reasoning, content, calls
        if reasoning or content or calls:
            deltas.append(ChatDelta(content or None, reasoning or None, tuple(calls.values())))
        reasoning, content, calls = "", "", {}

    for event in events:
        if isinstance(event, Reasoning):
            if content or calls:
                close()
            reasoning += event.text
        elif isinstance(event, Content):
            if calls:
                close()
            content += event.text
        elif isinstance(event, CallStarted):
            calls[event.index] = ToolCallDelta(event.index, call_id=event.call_id, name=event.name)
        elif isinstance(event, ArgumentsDelta):
            before = calls.get(event.index, ToolCallDelta(event.index))
            calls[event.index] = ToolCallDelta(event.index, before.arguments + event.text, before.call_id, before.name)
    close()
    return deltas


@dataclass(slots=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatMessage:
    """Deltas added up: the message of an answer that is not streamed."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, deltas: Sequence[ChatDelta]) -> None:
        for delta in deltas:
            self.content += delta.content or ""
            self.reasoning_content += delta.reasoning_content or ""
            for call in delta.tool_calls:
                if call.call_id is not None:
                    self.tool_calls.append(ToolCall(call.call_id, call.name or ""))
                self.tool_calls[call.index].arguments += call.arguments

    def as_dict(self) -> dict[str, Any]:
        """`message` of a choice. Content is null in a message that has calls, or reasoning, and no text."""
        has_others = bool(self.tool_calls or self.reasoning_content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if has_others and not self.content else self.content,
            "refusal": None,
        }
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message
