"""`/v1/chat/completions`: messages through the model's chat template, and the answer as a message or its chunks."""

from __future__ import annotations

from typing import Any

from octavo.core.interfaces import TokenLogprobs
from octavo.engine.outputs import CompletionDelta
from octavo.server.answer import AnswerFormat, Choice, encode_json
from octavo.server.api import ServingEngine
from octavo.server.endpoint import GeneratingEndpoint, unix_time
from octavo.server.exchange import Exchange
from octavo.server.generation import Generation
from octavo.server.logprobs import chat_logprobs
from octavo.server.prompts import encode_messages
from octavo.server.protocol import ChatRequest, decode_chat_request


class ChatEndpoint(GeneratingEndpoint):
    id_prefix = "chatcmpl"

    async def begin(
        self, body: bytes, exchange: Exchange, key_salt: str
    ) -> tuple[Generation, AnswerFormat, ChatRequest]:
        request = decode_chat_request(body)
        answer_id = self.make_answer_id(exchange, request)
        model = self.pick_model(request.model)
        with request.own_names():
            params = request.sampling_params
        prompt = await encode_messages(self.engine, request.messages, add_generation_prompt=True)
        generation = Generation(
            self.engine,
            [prompt],
            params,
            request_id=answer_id,
            priority=request.priority,
            cache_salt=request.join_salt(key_salt),
        )
        with request.own_names():
            generation.validate("messages")
        format = ChatFormat(self.engine, answer_id, model, request, generation, unix_time())
        return generation, format, request


class ChatFormat(AnswerFormat):
    def __init__(
        self,
        engine: ServingEngine,
        answer_id: str,
        model: str,
        request: ChatRequest,
        generation: Generation,
        created: int,
    ):
        head = {"id": answer_id, "object": "chat.completion", "created": created, "model": model}
        super().__init__(head, "chat.completion.chunk", request, generation)
        self._tokenizer = engine.tokenizer
        self._has_logprobs = request.logprobs

    def chunk(self, delta: CompletionDelta, choice: Choice) -> bytes:
        start = self.chunk_head + b'{"index":%d,"delta":{' % delta.index
        opening = b""
        if not choice.has_begun:
            choice.has_begun = True
            opening = (
                start + b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' + self.end_chunk()
            )
        content = b'"content":' + encode_json(delta.text) if delta.text else b""
        logprobs = b"null"
        if self._has_logprobs and delta.logprobs:
            logprobs = encode_json(self._logprobs(delta.logprobs))
        end = (b'},"logprobs":', logprobs, b",", self.encode_reasons(delta), b"}", self.end_chunk())
        return b"".join((opening, start, content, *end))

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": self._logprobs(choice.logprobs) if self._has_logprobs else None,
        }

    def _logprobs(self, tokens: list[TokenLogprobs]) -> dict[str, Any]:
        return {"content": chat_logprobs(self._tokenizer, tokens), "refusal": None}
