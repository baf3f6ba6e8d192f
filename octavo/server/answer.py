"""An answer in the API's shape, whole or in chunks: what the endpoint families have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.core.interfaces import TokenLogprobs
from octavo.engine.outputs import CompletionDelta
from octavo.server.generation import Generation, Usage
from octavo.server.protocol import SamplingFields

encode_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Choice:
    """What has been said so far. has_begun: its first chunk has been sent."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    has_begun: bool = False


class AnswerFormat(ABC):
    """One answer; `collect` and `response` for one that is sent whole, `chunks` and `usage_chunk` for a stream.

    A chunk is joined from bytes that are the same for the whole stream and the few that are not: building and encoding
    a dict for every token of every stream would be most of what this process does.
    """

    def __init__(self, head: dict[str, Any], chunk_object: str, request: SamplingFields, generation: Generation):
        """head: id, object, created and model. chunk_object: what `object` says in a chunk."""
        self._head = head
        self._choices = [Choice() for _ in range(generation.num_choices)]
        self.chunk_head = b"data: " + encode_json({**head, "object": chunk_object})[:-1] + b',"choices":['
        # In a stream with usage every chunk has the field, and only the last one a value.
        self._chunk_end = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"

    @abstractmethod
    def chunk(self, delta: CompletionDelta, choice: Choice) -> bytes:
        """The event or events for a delta that has something to tell."""

    @abstractmethod
    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """An entry of `choices` in a whole answer, without the reasons for its end."""

    def chunks(self, delta: CompletionDelta) -> bytes:
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return b""
        return self.chunk(delta, self._choices[delta.index])

    def end_chunk(self) -> bytes:
        """What ends one event after its choice. To be called once an event."""
        return self._chunk_end

    def encode_reasons(self, delta: CompletionDelta) -> bytes:
        """The last pairs of a chunk's choice: why it ended, and what a request may ask to be told of every chunk."""
        return encode_reasons(delta)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self.chunk_head + b'],"usage":' + encode_json(usage.as_dict()) + b"}\n\n"

    def collect(self, delta: CompletionDelta) -> None:
        choice = self._choices[delta.index]
        choice.texts.append(delta.text)
        choice.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def response(self, usage: Usage) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self._choices):
            entry = {**self.choice(index, choice), "finish_reason": choice.finish_reason}
            if choice.stop_reason is not None:
                entry["stop_reason"] = choice.stop_reason
            choices.append(entry)
        return {**self._head, "choices": choices, "usage": usage.as_dict()}


def encode_reasons(delta: CompletionDelta) -> bytes:
    """`"finish_reason":...`, and what ended it as vLLM tells: the stop string or the stop token's id, if one did."""
    if delta.finish_reason is None:
        return b'"finish_reason":null'
    reasons = b'"finish_reason":' + encode_json(delta.finish_reason)
    return reasons if delta.stop_reason is None else reasons + b',"stop_reason":' + encode_json(delta.stop_reason)
