"""What the generating endpoints share: read, decode, run while the client listens, answer once."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import Any

from octavo.errors import ModelNotFoundError
from octavo.server.admission import Admission
from octavo.server.answer import AnswerFormat
from octavo.server.api import ServingEngine
from octavo.server.body import ClientDisconnected, read_json_body
from octavo.server.deadline import Deadline
from octavo.server.disconnect import run_while_connected
from octavo.server.errors import send_error
from octavo.server.exchange import Exchange, get_exchange
from octavo.server.generation import Generation
from octavo.server.protocol import SamplingFields
from octavo.server.responses import Receive, Scope, Send, send_json
from octavo.server.settings import ServerSettings
from octavo.server.sse import send_stream


class GeneratingEndpoint(ABC):
    """An ASGI application for one route. Every request gets exactly one answer, unless its client has left."""

    id_prefix: str

    def __init__(self, engine: ServingEngine, settings: ServerSettings):
        self.engine = engine
        self._settings = settings
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
            self._admission.check(generation.num_choices)
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
            await send_json(send, format.response(generation.usage))

    def make_answer_id(self, exchange: Exchange, request: SamplingFields) -> str:
        """As vLLM does, the answer's id is the request's, with the kind of answer before it."""
        return f"{self.id_prefix}-{exchange.request_id}"

    def pick_model(self, name: str | None) -> str:
        """The name the answer carries. A request without a model means the one that is served."""
        served = self.engine.info.served_model_names
        if name is None:
            return served[0]
        check_model(name, served)
        return name


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
