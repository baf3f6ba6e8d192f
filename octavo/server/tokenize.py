"""`/tokenize` and `/detokenize`: exactly the tokens that the model would get, and back, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from octavo.errors import InvalidRequestError
from octavo.server.api import ServingEngine
from octavo.server.body import ClientDisconnected, read_json_body
from octavo.server.chat_prompt import ChatPrompter
from octavo.server.decoding import convert_fields, decode_json_object
from octavo.server.endpoint import check_model, read_request
from octavo.server.errors import send_error
from octavo.server.exchange import Exchange, get_exchange
from octavo.server.fields import FieldReading
from octavo.server.messages import check_messages
from octavo.server.prompts import LONG_TEXT_CHARS, encode_prompts
from octavo.server.responses import Receive, Scope, Send, send_json
from octavo.server.settings import ServerSettings


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either prompt or messages.

    add_special_tokens: BOS and the like; true for a prompt, false for messages, whose template prints them

    Messages go with all fields of a chat that change its prompt.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    return_token_strs: bool = False


_FIELDS_OF_MESSAGES = frozenset(TokenizeRequest.__struct_fields__) - {
    "model",
    "prompt",
    "messages",
    "add_special_tokens",
    "return_token_strs",
}


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class TextEndpoint(ABC):
    """An ASGI application for a route that only reads a body and answers with JSON."""

    def __init__(self, engine: ServingEngine, settings: ServerSettings):
        self.engine = engine
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = get_exchange(scope)
        try:
            body = await read_json_body(scope, receive, self._settings.max_request_bytes, self._settings.body_timeout_s)
            answer = await self.answer(body, exchange)
        except ClientDisconnected:
            exchange.has_client_left = True
        except Exception as error:
            await send_error(send, error, exchange)
        else:
            await send_json(send, answer)

    @abstractmethod
    async def answer(self, body: bytes, exchange: Exchange) -> dict[str, Any]:
        """Raises ClientError."""


class TokenizeEndpoint(TextEndpoint):
    def __init__(self, engine: ServingEngine, settings: ServerSettings, prompter: ChatPrompter):
        super().__init__(engine, settings)
        self._prompter = prompter
        # Texts of any length are counted, but the long ones one after the other: generating goes before.
        self._long_text = asyncio.Semaphore(1)

    async def answer(self, body: bytes, exchange: Exchange) -> dict[str, Any]:
        request = read_request(decode_tokenize_request, body, exchange, self._settings)
        if request.model is not None:
            check_model(request.model, self.engine.info.served_model_names)
        if len(body) > LONG_TEXT_CHARS:
            async with self._long_text:
                tokens = await self._encode(request)
        else:
            tokens = await self._encode(request)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self.engine.info.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        if request.return_token_strs:
            answer["token_strs"] = [self.engine.tokenizer.token_text(token_id) for token_id in tokens]
        return answer

    async def _encode(self, request: TokenizeRequest) -> list[int]:
        if request.prompt is not None:
            adds = request.add_special_tokens is not False
            [tokens] = await encode_prompts(self.engine, [request.prompt], add_special_tokens=adds, is_bounded=False)
            return tokens
        return (await self._prompter.encode(request, is_bounded=False)).token_ids


class DetokenizeEndpoint(TextEndpoint):
    async def answer(self, body: bytes, exchange: Exchange) -> dict[str, Any]:
        request = read_request(decode_detokenize_request, body, exchange, self._settings)
        if request.model is not None:
            check_model(request.model, self.engine.info.served_model_names)
        vocab_size = self.engine.info.vocab_size
        for position, token_id in enumerate(request.tokens):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"tokens[{position}] is {token_id}, but this model's vocabulary has the ids 0 to {vocab_size - 1}.",
                    param=f"tokens[{position}]",
                    value=token_id,
                    code="token_id_out_of_range",
                )
        return {"prompt": self.engine.tokenizer.decode(request.tokens, skip_special_tokens=False)}


def decode_tokenize_request(body: bytes, reading: FieldReading | None = None) -> TokenizeRequest:
    """Raises InvalidRequestError."""
    fields = (reading or FieldReading()).keep_supported(decode_json_object(body), TokenizeRequest.__struct_fields__)
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidRequestError(
            "Send either prompt, a text, or messages, a chat; this request has "
            f"{'both' if 'prompt' in fields else 'neither'}.",
            param="prompt",
            code="missing_field" if "prompt" not in fields else "invalid_value",
        )
    if "messages" in fields:
        fields["messages"] = check_messages(fields["messages"])
    else:
        for name in fields:
            if name in _FIELDS_OF_MESSAGES:
                raise InvalidRequestError(f"{name} goes with messages; a prompt is taken as it is.", param=name)
    return convert_fields(fields, TokenizeRequest)


def decode_detokenize_request(body: bytes, reading: FieldReading | None = None) -> DetokenizeRequest:
    """Raises InvalidRequestError."""
    fields = (reading or FieldReading()).keep_supported(decode_json_object(body), DetokenizeRequest.__struct_fields__)
    return convert_fields(fields, DetokenizeRequest)
