"""A chat's answer in the API's shape: reasoning, text and calls, as a message or in chunks.

Both ways run the same pipeline over the same deltas, so that the chunks joined are the message.
"""

from __future__ import annotations

from typing import Any

from octavo.core.interfaces import TokenLogprobs
from octavo.engine.outputs import CompletionDelta
from octavo.server.answer import AnswerFormat, Choice, encode_json
from octavo.server.api import ServingEngine
from octavo.server.chat_prompt import ChatPrompt
from octavo.server.generation import Generation, Usage
from octavo.server.logprobs import chat_logprobs
from octavo.server.protocol import ChatRequest
from octavo.text.pipeline import ChatDelta, ChatMessage, ChatPipeline

# As the message has it: content is null where calls or reasoning come first.
_TEXT_BEGINS = b'"role":"assistant","content":""'
_OTHERS_BEGIN = b'"role":"assistant","content":null'
_GOES_ON = b'},"logprobs":null,"finish_reason":null}'


class ChatFormat(AnswerFormat):
    def __init__(
        self,
        engine: ServingEngine,
        answer_id: str,
        model: str,
        request: ChatRequest,
        prompt: ChatPrompt,
        generation: Generation,
        created: int,
    ):
        head = {"id": answer_id, "object": "chat.completion", "created": created, "model": model}
        super().__init__(head, "chat.completion.chunk", engine.tokenizer, request, generation)
        self._has_logprobs = request.logprobs
        self._shows_ids = request.return_tokens_as_token_ids
        self._readers: list[AnswerReader] | None = None
        if prompt.needs_pipeline:
            self._readers = [
                AnswerReader(prompt.make_pipeline(), request.include_reasoning) for _ in range(generation.num_choices)
            ]
        self._tells_reasoning = prompt.dialect.reasoning is not None

    def chunk(self, delta: CompletionDelta, choice: Choice) -> bytes:
        if self._readers is None:
            has_text = delta.text or delta.finish_reason is None
            parts, is_text = [b'"content":' + encode_json(delta.text)] if has_text else [], True
        else:
            reader = self._readers[delta.index]
            deltas = reader.read(delta)
            parts, is_text = [encode_json(one.as_dict())[1:-1] for one in deltas], reader.begins_with_text
            if not deltas and not self._has_news(delta):
                return b""
            if is_text and not deltas and choice.has_begun:
                parts = [b'"content":""']  # nothing was said: the role was sent with null, and the message has ""
        start = self.chunk_head + b'{"index":%d,"delta":{' % delta.index
        events = []
        if not choice.has_begun:
            choice.has_begun = True
            events.append(start + (_TEXT_BEGINS if is_text else _OTHERS_BEGIN) + _GOES_ON + self.end_chunk())
        for part in parts[:-1]:
            events.append(start + part + _GOES_ON + self.end_chunk())
        logprobs = b"null"
        if self._has_logprobs and delta.logprobs:
            logprobs = encode_json(self._logprobs(delta.logprobs))
        last = parts[-1] if parts else b""
        end = (b'},"logprobs":', logprobs, b",", self.encode_reasons(delta), b"}", self.end_chunk())
        return b"".join((*events, start, last, *end))

    def collect(self, delta: CompletionDelta) -> None:
        if self._readers is not None:
            self._readers[delta.index].collect(delta)
        super().collect(delta)

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        if self._readers is None:
            message = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
        else:
            message = self._readers[index].message.as_dict()
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs) if self._has_logprobs else None,
        }

    def describe_usage(self, usage: Usage) -> dict[str, Any]:
        described = super().describe_usage(usage)
        if self._tells_reasoning and self._readers is not None:
            num_tokens = sum(reader.num_reasoning_tokens for reader in self._readers)
            described["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return described

    def _has_news(self, delta: CompletionDelta) -> bool:
        """Something is to be told although no text is certain yet."""
        return bool(
            delta.finish_reason
            or (self._has_logprobs and delta.logprobs)
            or (self._returns_token_ids and delta.token_ids)
        )

    def _logprobs(self, tokens: list[TokenLogprobs]) -> dict[str, Any]:
        return {"content": chat_logprobs(self._tokenizer, tokens, shows_ids=self._shows_ids), "refusal": None}


class AnswerReader:
    """One choice's text, read as it comes.

    message:              what `collect` has read
    begins_with_text:     what was read last begins the message, with text, or ends one in which nothing was said
    num_reasoning_tokens: tokens after which the reasoning had not ended
    """

    def __init__(self, pipeline: ChatPipeline, includes_reasoning: bool):
        self._pipeline = pipeline
        self._includes_reasoning = includes_reasoning
        self.message = ChatMessage()
        self.begins_with_text = False
        self.num_reasoning_tokens = 0
        self._has_begun = False

    def read(self, delta: CompletionDelta) -> list[ChatDelta]:
        """What is certain by now. With the last one its finish_reason is changed to tool_calls, if that is so."""
        deltas = self._pipeline.push(delta.text) if delta.text else []
        if self._pipeline.is_reasoning:
            self.num_reasoning_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            last, delta.finish_reason = self._pipeline.finish(delta.finish_reason)
            deltas += last
        if not self._includes_reasoning:
            deltas = [kept for one in deltas if (kept := one.without_reasoning())]
        is_text = deltas[0].content is not None if deltas else delta.finish_reason is not None
        has_reasoning = bool(deltas) and deltas[0].reasoning_content is not None
        self.begins_with_text = is_text and not has_reasoning and not self._has_begun
        self._has_begun = self._has_begun or bool(deltas)
        return deltas

    def collect(self, delta: CompletionDelta) -> None:
        self.message.add(self.read(delta))
