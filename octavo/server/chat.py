"""`/v1/chat/completions`: messages through the model's chat template, and the answer as a message or its chunks."""

from __future__ import annotations

import asyncio
from typing import Any

from octavo.core.interfaces import TokenLogprobs
from octavo.engine.outputs import CompletionDelta
from octavo.errors import InvalidRequestError
from octavo.server.answer import AnswerFormat, Choice, encode_json, encode_reasons
from octavo.server.api import ServingEngine
from octavo.server.endpoint import GeneratingEndpoint, unix_time
from octavo.server.generation import Generation
from octavo.server.logprobs import chat_logprobs
from octavo.server.protocol import ChatRequest, decode_chat_request
from octavo.text.chat_template import encode_chat

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
        num_chars = sum(len(message["content"]) for message in messages)
        if num_chars > LONG_TEXT_CHARS:
            check_text_length(self.engine, num_chars, "messages")
            return await asyncio.to_thread(encode_chat, tokenizer, template, messages, add_generation_prompt=True)
        return encode_chat(tokenizer, template, messages, add_generation_prompt=True)


def check_text_length(engine: ServingEngine, num_chars: int, param: str) -> None:
    """Refuse what cannot fit before it is tokenized: that costs a second for every megabyte, and everybody's.

    Raises InvalidRequestError.
    """
    max_model_len = engine.info.max_model_len
    if num_chars > max_model_len * engine.tokenizer.longest_token_chars:
        raise InvalidRequestError(
            f"The {param} has {num_chars} characters, more than {max_model_len} tokens can hold, which is "
            "max_model_len for prompt and answer together; shorten it.",
            param=param,
            value=num_chars,
            code="context_length_exceeded",
        )


class ChatFormat(AnswerFormat):
    def __init__(self, engine: ServingEngine, request_id: str, model: str, request: ChatRequest, created: int):
        head = {"id": request_id, "object": "chat.completion", "created": created, "model": model}
        super().__init__(head, "chat.completion.chunk", request.n, request.include_usage)
        self._tokenizer = engine.tokenizer
        self._has_logprobs = request.logprobs

    def chunk(self, delta: CompletionDelta, choice: Choice) -> bytes:
        start = self.chunk_head + b'{"index":%d,"delta":{' % delta.index
        opening = b""
        if not choice.has_begun:
            choice.has_begun = True
            opening = start + b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' + self.chunk_end
        content = b'"content":' + encode_json(delta.text) if delta.text else b""
        logprobs = b"null"
        if self._has_logprobs and delta.logprobs:
            logprobs = encode_json(self._logprobs(delta.logprobs))
        end = (b'},"logprobs":', logprobs, b",", encode_reasons(delta), b"}", self.chunk_end)
        return b"".join((opening, start, content, *end))

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": self._logprobs(choice.logprobs) if self._has_logprobs else None,
        }

    def _logprobs(self, tokens: list[TokenLogprobs]) -> dict[str, Any]:
        return {"content": chat_logprobs(self._tokenizer, tokens), "refusal": None}
