"""What the generating endpoints share: read, decode, run while the client listens, answer once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeVar

from octavo.core.sampling_params import SamplingParams
from octavo.errors import ModelNotFoundError
from octavo.server.admission import Admission
from octavo.server.answer import AnswerFormat
from octavo.server.api import ServingEngine
from octavo.server.body import ClientDisconnected, read_json_body
from octavo.server.constraint import Constraint
from octavo.server.deadline import Deadline
from octavo.server.decoding import refuse_value
from octavo.server.disconnect import run_while_connected
from octavo.server.errors import send_error
from octavo.server.exchange import Exchange, get_exchange
from octavo.server.fields import FieldReading
from octavo.server.generation import Generation
from octavo.server.responses import Receive, Scope, Send, send_json
from octavo.server.sampling_fields import SamplingFields
from octavo.server.settings import ServerSettings
from octavo.server.sse import send_stream

_Request = TypeVar("_Request")


class GeneratingEndpoint(ABC):
    """An ASGI application for one route. Every request gets exactly one answer, unless its client has left."""

    id_prefix: str

    def __init__(self, engine: ServingEngine, settings: ServerSettings):
        self.engine = engine
        self._settings = settings
        self._truncated_text = asyncio.Semaphore(1)
        self._admission = Admission(engine, settings.max_num_queued_requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = get_exchange(scope)
        try:
            self._admission.check(1)  # before the work of reading and tokenizing
            deadline = Deadline(self._settings.request_timeout_s)
            body = await read_json_body(scope, receive, self._settings.max_request_bytes, self._settings.body_timeout_s)
            cache_salt = scope.get("octavo.cache_salt", "")
            answering = self._answer(body, exchange, cache_salt, deadline, send)
            exchange.has_client_left = not await run_while_connected(answering, receive)
        except ClientDisconnected:
            exchange.has_client_left = True
        except Exception as error:
            # Raised before the answer began: a stream that has begun tells its faults itself.
            await send_error(send, error, exchange)

    @abstractmethod
    async def begin(self, body: bytes, exchange: Exchange, key_salt: str) -> tuple[Generation, AnswerFormat, Any]:
        """Decode and check the request: (generation, format, the request's fields). Raises ClientError.

        key_salt: the cache namespace of the caller's key
        """

    async def _answer(self, body: bytes, exchange: Exchange, cache_salt: str, deadline: Deadline, send: Send) -> None:
        async with deadline:
            generation, format, request = await self.begin(body, exchange, cache_salt)
            exchange.generation = generation
            exchange.model = request.model or self.engine.info.served_model_names[0]
            exchange.is_streamed = request.stream
            self._admission.check(generation.num_generations)
            await generation.prepare()
            if not request.stream:
                async with aclosing(generation.deltas()) as deltas:
                    async for delta in deltas:
                        format.collect(delta)
        if request.stream:
            await send_stream(
                send, generation, format, include_usage=request.include_usage, deadline=deadline, exchange=exchange
            )
        else:
            usage = generation.usage
            whole = await asyncio.to_thread(format.response, usage) if format.is_large else format.response(usage)
            await send_json(send, whole)

    def make_answer_id(self, exchange: Exchange, request: SamplingFields) -> str:
        """As vLLM does, the answer's id is the request's, with the kind of answer before it."""
        if request.request_id is not None:
            exchange.rename(request.request_id)
        return f"{self.id_prefix}-{exchange.request_id}"

    def read(self, decode: Callable[[bytes, FieldReading], _Request], body: bytes, exchange: Exchange) -> _Request:
        """Raises ClientError."""
        return read_request(decode, body, exchange, self._settings)

    def bound_text(self, request: SamplingFields) -> AbstractAsyncContextManager[Any]:
        """A text of any length may be sent to be truncated; such texts are tokenized one after the other."""
        return contextlib.nullcontext() if request.truncate_prompt_tokens is None else self._truncated_text

    def truncate(
        self, prompts: Sequence[Sequence[int]], request: SamplingFields, params: SamplingParams
    ) -> Sequence[Sequence[int]]:
        """The last truncate_prompt_tokens of each; -1 leaves room for max_tokens. Raises InvalidRequestError."""
        limit = request.truncate_prompt_tokens
        if limit is None:
            return prompts
        max_model_len = self.engine.info.max_model_len
        if limit >= max_model_len:
            refuse_value(
                "truncate_prompt_tokens",
                limit,
                f"max_model_len is {max_model_len} for prompt and answer together; send -1 for as many as fit",
            )
        if limit == -1:
            limit = max(max_model_len - (params.max_tokens or 1), 1)
        return [prompt[-limit:] for prompt in prompts]

    def make_generation(
        self,
        prompts: Sequence[Sequence[int]],
        request: SamplingFields,
        params: SamplingParams,
        *,
        prompt_param: str,
        answer_id: str,
        key_salt: str,
        constraint: Constraint | None = None,
        shown_token_ids: Collection[int] = (),
    ) -> Generation:
        """Checked against the engine's limits, but not started.

        params:       of the request
        prompt_param: the field that the prompts came from
        Raises ClientError.
        """
        beams = None
        if request.use_beam_search:
            room = self.engine.info.max_model_len - max(map(len, prompts))
            beams = request.make_beam_search_params(params.max_tokens or max(room, 1))
        generation = Generation(
            self.engine,
            prompts,
            params,
            request_id=answer_id,
            priority=request.priority,
            cache_salt=request.join_salt(key_salt),
            grammar=None if constraint is None else constraint.spec,
            grammar_param="" if constraint is None else constraint.param,
            shown_token_ids=shown_token_ids,
            best_of=request.best_of,
            beams=beams,
            is_scoring_only=request.is_scoring_only,
        )
        with request.own_names():
            generation.validate(prompt_param)
        return generation

    def pick_model(self, name: str | None) -> str:
        """The name the answer carries. A request without a model means the one that is served."""
        served = self.engine.info.served_model_names
        if name is None:
            return served[0]
        check_model(name, served)
        return name


def read_request(
    decode: Callable[[bytes, FieldReading], _Request], body: bytes, exchange: Exchange, settings: ServerSettings
) -> _Request:
    """The body as a request; what was found on the way is noted for the log and the header. Raises ClientError."""
    reading = FieldReading(is_lenient=settings.is_lenient)
    try:
        return decode(body, reading)
    finally:
        exchange.labels.update(reading.labels)
        if reading.ignored:
            exchange.response_headers.append((b"x-octavo-ignored-fields", reading.make_ignored_header()))


def check_model(name: str, served: Any) -> None:
    """Raises ModelNotFoundError that names what is served."""
    if name not in served:
        shown = name if len(name) <= 100 else name[:97] + "..."
        raise ModelNotFoundError(
            f"There is no model {shown!r} here; this server has {', '.join(served)}.",
            param="model",
            value=shown,
            code="model_not_found",
        )


def unix_time() -> int:
    return int(time.time())
