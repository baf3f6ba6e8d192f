"""`/v1/completions`: plain prompts, as texts or token ids, one or many, and the older shape of the answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.core.interfaces import TokenLogprobs
from octavo.engine.outputs import CompletionDelta
from octavo.server.api import ServingEngine
from octavo.server.chat import LONG_TEXT_CHARS, encode_stop_reason
from octavo.server.endpoint import AnswerFormat, GeneratingEndpoint, unix_time
from octavo.server.generation import Generation, Usage
from octavo.server.logprobs import CompletionLogprobs
from octavo.server.protocol import CompletionRequest, decode_completion_request

_encode_json = msgspec.json.Encoder().encode


class CompletionEndpoint(GeneratingEndpoint):
    id_prefix = "cmpl"

    async def begin(
        self, body: bytes, request_id: str, cache_salt: str
    ) -> tuple[Generation, AnswerFormat, CompletionRequest]:
        request = decode_completion_request(body)
        model = self.pick_model(request.model)
        with request.own_names():
            params = request.sampling_params
        prompts = await self._encode(request.prompts)
        generation = Generation(
            self.engine,
            prompts,
            params,
            request_id=request_id,
            priority=request.priority,
            cache_salt=cache_salt,
        )
        with request.own_names():
            generation.validate("prompt")
        format = CompletionFormat(self.engine, request_id, model, request, generation.num_choices, unix_time())
        return generation, format, request

    async def _encode(self, prompts: list[str | list[int]]) -> list[list[int]]:
        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(self._encode_now, prompts)
        return self._encode_now(prompts)

    def _encode_now(self, prompts: list[str | list[int]]) -> list[list[int]]:
        encode = self.engine.tokenizer.encode
        return [list(encode(prompt)) if isinstance(prompt, str) else prompt for prompt in prompts]


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class CompletionFormat(AnswerFormat):
    def __init__(
        self,
        engine: ServingEngine,
        request_id: str,
        model: str,
        request: CompletionRequest,
        num_choices: int,
        created: int,
    ):
        self._head = {"id": request_id, "object": "text_completion", "created": created, "model": model}
        self._choices = [_Choice() for _ in range(num_choices)]
        self._logprobs: list[CompletionLogprobs] | None = None
        if request.logprobs is not None:
            self._logprobs = [CompletionLogprobs(engine.tokenizer, request.logprobs) for _ in range(num_choices)]
        self._chunk_head = b"data: " + _encode_json(self._head)[:-1] + b',"choices":['
        self._chunk_end = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"

    def chunks(self, delta: CompletionDelta) -> bytes:
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return b""
        logprobs = b"null"
        if self._logprobs is not None and delta.logprobs:
            logprobs = _encode_json(self._logprobs[delta.index].add(delta.logprobs))
        finish = b"null"
        if delta.finish_reason is not None:
            finish = _encode_json(delta.finish_reason) + encode_stop_reason(delta)
        return b"".join(
            (
                self._chunk_head,
                b'{"index":%d,"text":' % delta.index,
                _encode_json(delta.text),
                b',"logprobs":',
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
        return {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": None if self._logprobs is None else self._logprobs[index].add(choice.logprobs),
            "finish_reason": choice.finish_reason,
            **({} if choice.stop_reason is None else {"stop_reason": choice.stop_reason}),
        }
