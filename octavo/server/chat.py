"""`/v1/chat/completions`: messages through the model's chat template, and the answer as a message or its chunks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.core.interfaces import TokenLogprobs
from octavo.engine.outputs import CompletionDelta
from octavo.errors import InvalidRequestError
from octavo.server.api import ServingEngine
from octavo.server.endpoint import AnswerFormat, GeneratingEndpoint, unix_time
from octavo.server.generation import Generation, Usage
from octavo.server.logprobs import chat_logprobs
from octavo.server.protocol import ChatRequest, decode_chat_request
from octavo.text.chat_template import encode_chat

_encode_json = msgspec.json.Encoder().encode

# Above this many characters the tokenizer works in a thread: it would hold up everybody's streams for milliseconds.
LONG_TEXT_CHARS = 8192


class ChatEndpoint(GeneratingEndpoint):
    id_prefix = "chatcmpl"

    async def begin(
        self, body: bytes, request_id: str, cache_salt: str
    ) -> tuple[Generation, AnswerFormat, ChatRequest]:
        request = decode_chat_request(body)
        model = self.pick_model(request.model)
        with request.own_names():
            params = request.sampling_params
        prompt = await self._encode(request.messages)
        generation = Generation(
            self.engine,
            [prompt],
            params,
            request_id=request_id,
            priority=request.priority,
            cache_salt=cache_salt,
        )
        with request.own_names():
            generation.validate("messages")
        format = ChatFormat(self.engine, request_id, model, request, unix_time())
        return generation, format, request

    async def _encode(self, messages: list[dict[str, Any]]) -> list[int]:
        tokenizer, template = self.engine.tokenizer, self.engine.chat_template
        if template is None:
            raise InvalidRequestError(
                "This model has no chat template, so it cannot take messages; send a prompt to /v1/completions.",
                param="messages",
            )
        if sum(len(message["content"]) for message in messages) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(encode_chat, tokenizer, template, messages, add_generation_prompt=True)
        return encode_chat(tokenizer, template, messages, add_generation_prompt=True)


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    has_begun: bool = False


class ChatFormat(AnswerFormat):
    def __init__(self, engine: ServingEngine, request_id: str, model: str, request: ChatRequest, created: int):
        self._tokenizer = engine.tokenizer
        self._head = {"id": request_id, "object": "chat.completion", "created": created, "model": model}
        self._has_logprobs = request.logprobs
        self._choices = [_Choice() for _ in range(max(request.n, 1))]
        # A chunk is joined from bytes that are the same for the whole stream and the few that are not.
        head = _encode_json({**self._head, "object": "chat.completion.chunk"})[:-1]
        self._chunk_head = b"data: " + head + b',"choices":['
        self._chunk_end = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"

    def chunks(self, delta: CompletionDelta) -> bytes:
        choice = self._choices[delta.index]
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return b""
        index = b'{"index":%d,"delta":{' % delta.index
        opening = b""
        if not choice.has_begun:
            choice.has_begun = True
            opening = b"".join(
                (
                    self._chunk_head,
                    index,
                    b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null}',
                    self._chunk_end,
                )
            )
        content = b'"content":' + _encode_json(delta.text) if delta.text else b""
        logprobs = b"null"
        if self._has_logprobs and delta.logprobs:
            logprobs = _encode_json({"content": chat_logprobs(self._tokenizer, delta.logprobs), "refusal": None})
        finish = b"null"
        if delta.finish_reason is not None:
            finish = _encode_json(delta.finish_reason) + encode_stop_reason(delta)
        return b"".join(
            (
                opening,
                self._chunk_head,
                index,
                content,
                b'},"logprobs":',
                logprobs,
                b',"finish_reason":',
                finish,
                b"}",
                self._chunk_end,
            )
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._chunk_head + b'],"usage":' + _encode_json(usage.as_dict()) + b"}\n\n"

    def collect(self, delta: CompletionDelta) -> None:
        choice = self._choices[delta.index]
        choice.texts.append(delta.text)
        choice.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def response(self, usage: Usage) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._choice(index, choice) for index, choice in enumerate(self._choices)],
            "usage": usage.as_dict(),
        }

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        logprobs = None
        if self._has_logprobs:
            logprobs = {"content": chat_logprobs(self._tokenizer, choice.logprobs), "refusal": None}
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            **({} if choice.stop_reason is None else {"stop_reason": choice.stop_reason}),
        }


def encode_stop_reason(delta: CompletionDelta) -> bytes:
    """What ended it, as vLLM tells: the stop string or the stop token's id. Left out if it was neither."""
    return b"" if delta.stop_reason is None else b',"stop_reason":' + _encode_json(delta.stop_reason)
