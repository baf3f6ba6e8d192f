"""An answer in the API's shape, whole or in chunks: what the endpoint families have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.core.interfaces import TokenLogprobs
from octavo.engine.outputs import CompletionDelta
from octavo.server.api import TokenTexts
from octavo.server.generation import Generation, Usage
from octavo.server.logprobs import prompt_logprobs
from octavo.server.sampling_fields import SamplingFields

encode_json = msgspec.json.Encoder().encode

# Entries of log-probabilities: about 10 ms of work.
_MANY_ENTRIES = 4096


@dataclass(slots=True)
class Choice:
    """What has been said so far. has_begun: its first chunk has been sent."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    has_begun: bool = False


class AnswerFormat(ABC):
    """One answer; `collect` and `response` for one that is sent whole, `chunks` and `usage_chunk` for a stream.

    A chunk is joined from bytes that are the same for the whole stream and the few that are not: building and encoding
    a dict for every token of every stream would be most of what this process does.

    tells_prompt_in_choices: where vLLM's prompt_token_ids and prompt_logprobs stand; else beside the choices
    """

    tells_prompt_in_choices = False

    def __init__(
        self,
        head: dict[str, Any],
        chunk_object: str,
        tokenizer: TokenTexts,
        request: SamplingFields,
        generation: Generation,
    ):
        """head: id, object, created and model. chunk_object: what `object` says in a chunk."""
        self._head = head
        self._choices = [Choice() for _ in range(generation.num_choices)]
        self._tokenizer = tokenizer
        self._generation = generation
        self._num_prompt_logprobs = request.prompt_logprobs
        self._returns_token_ids = request.return_token_ids
        self._has_continuous_usage = request.has_continuous_usage
        self._tells_prompt = request.return_token_ids or request.prompt_logprobs is not None
        self.chunk_head = b"data: " + encode_json({**head, "object": chunk_object})[:-1] + b',"choices":['
        # In a stream with usage every chunk has the field, and only the last one a value.
        self._chunk_end = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._described_prompts: dict[int, dict[str, Any]] = {}
        self._scored_prompts: list[list[TokenLogprobs | None]] = [[] for _ in generation.prompts]

    @abstractmethod
    def chunk(self, delta: CompletionDelta, choice: Choice) -> bytes:
        """The event or events for a delta that has something to tell; sets choice.has_begun."""

    @abstractmethod
    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """An entry of `choices` in a whole answer, without the reasons for its end."""

    def chunks(self, delta: CompletionDelta) -> bytes:
        if delta.prompt_logprobs is not None:
            self._scored_prompts[self.prompt_number(delta.index)] = delta.prompt_logprobs
        # A token without text, such as half an emoji, is an event with an empty text: its reader sees that all goes on.
        if not (delta.text or delta.token_ids or delta.logprobs or delta.finish_reason):
            return b""
        if self._has_continuous_usage:
            self._chunk_end = b'],"usage":' + encode_json(self.describe_usage(self._generation.usage)) + b"}\n\n"
        return self.chunk(delta, self._choices[delta.index])

    def end_chunk(self) -> bytes:
        """What ends one event after its choice. To be called once an event."""
        if self._tells_prompt and not self.tells_prompt_in_choices:
            self._tells_prompt = False
            return b"]," + encode_json(self._describe_prompt(0))[1:-1] + self._chunk_end[1:]
        return self._chunk_end

    def encode_reasons(self, delta: CompletionDelta) -> bytes:
        """The last pairs of a chunk's choice: why it ended, and what a request may ask to be told of every chunk.

        To be called before choice.has_begun is set.
        """
        reasons = encode_reasons(delta)
        if self._returns_token_ids:
            reasons += b',"token_ids":' + encode_json(delta.token_ids)
        if self._tells_prompt and self.tells_prompt_in_choices and not self._choices[delta.index].has_begun:
            reasons += b"," + encode_json(self._describe_prompt(self.prompt_number(delta.index)))[1:-1]
        return reasons

    def usage_chunk(self, usage: Usage) -> bytes:
        return self.chunk_head + b'],"usage":' + encode_json(self.describe_usage(usage)) + b"}\n\n"

    def describe_usage(self, usage: Usage) -> dict[str, Any]:
        """What a kind of answer may add to."""
        return usage.as_dict()

    def collect(self, delta: CompletionDelta) -> None:
        if delta.prompt_logprobs is not None:
            self._scored_prompts[self.prompt_number(delta.index)] = delta.prompt_logprobs
        choice = self._choices[delta.index]
        choice.texts.append(delta.text)
        choice.logprobs += delta.logprobs
        if self._returns_token_ids:
            choice.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def response(self, usage: Usage) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self._choices):
            entry = {**self.choice(index, choice), "finish_reason": choice.finish_reason}
            if choice.stop_reason is not None:
                entry["stop_reason"] = choice.stop_reason
            if self._returns_token_ids:
                entry["token_ids"] = choice.token_ids
            if self._tells_prompt and self.tells_prompt_in_choices:
                entry |= self._describe_prompt(self.prompt_number(index))
            choices.append(entry)
        answer = {**self._head, "choices": choices, "usage": self.describe_usage(usage)}
        if self._tells_prompt and not self.tells_prompt_in_choices:
            answer |= self._describe_prompt(0)
        return answer

    def prompt_number(self, index: int) -> int:
        """Of which prompt the choice is."""
        return index // self._generation.params.n

    @property
    def is_large(self) -> bool:
        """Making the whole answer takes long enough to hold up everybody's streams."""
        num_entries = sum(map(len, self._scored_prompts)) * (1 + (self._generation.params.prompt_logprobs or 0))
        return num_entries * self._generation.params.n > _MANY_ENTRIES

    def _describe_prompt(self, number: int) -> dict[str, Any]:
        """The same for all choices of a prompt."""
        if number not in self._described_prompts:
            self._described_prompts[number] = self._make_prompt_description(number)
        return self._described_prompts[number]

    def _make_prompt_description(self, number: int) -> dict[str, Any]:
        described: dict[str, Any] = {}
        if self._num_prompt_logprobs is not None:
            scored = self._scored_prompts[number]
            described["prompt_logprobs"] = prompt_logprobs(self._tokenizer, scored, self._num_prompt_logprobs)
        if self._returns_token_ids:
            described["prompt_token_ids"] = self._generation.prompts[number]
        return described


def encode_reasons(delta: CompletionDelta) -> bytes:
    """`"finish_reason":...`, and what ended it as vLLM tells: the stop string or the stop token's id, if one did."""
    if delta.finish_reason is None:
        return b'"finish_reason":null'
    reasons = b'"finish_reason":' + encode_json(delta.finish_reason)
    return reasons if delta.stop_reason is None else reasons + b',"stop_reason":' + encode_json(delta.stop_reason)
