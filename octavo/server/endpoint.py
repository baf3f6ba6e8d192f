"""What the generating endpoints share: read, decode, run while the client listens, answer once."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import Any

from octavo.errors import ModelNotFoundError
from octavo.server.answer import AnswerFormat
from octavo.server.api import ServingEngine
from octavo.server.body import ClientDisconnected, read_json_body
from octavo.server.disconnect import run_while_connected
from octavo.server.errors import send_error
from octavo.server.generation import Generation
from octavo.server.responses import Receive, Scope, Send, send_json
from octavo.server.settings import ServerSettings
from octavo.server.sse import send_stream


class GeneratingEndpoint(ABC):
    """An ASGI application for one route. Every request gets exactly one answer, unless its client has left."""

    id_prefix: str

    def __init__(self, engine: ServingEngine, settings: ServerSettings):
        self.engine = engine
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        headers = ((b"x-request-id", request_id.encode()),)
        try:
            body = await read_json_body(scope, receive, self._settings.max_request_bytes)
            cache_salt = scope.get("octavo.cache_salt", "")
            await run_while_connected(self._answer(body, request_id, cache_salt, send), receive)
        except ClientDisconnected:
            pass
        except Exception as error:
            # Raised before the answer began: a stream that has begun tells its faults itself.
            await send_error(send, error, request_id, headers)

    @abstractmethod
    async def begin(self, body: bytes, request_id: str, cache_salt: str) -> tuple[Generation, AnswerFormat, Any]:
        """Decode and check the request: (generation, format, the request's fields). Raises ClientError."""

    async def _answer(self, body: bytes, request_id: str, cache_salt: str, send: Send) -> None:
        generation, format, request = await self.begin(body, request_id, cache_salt)
        headers = ((b"x-request-id", request_id.encode()),)
        if request.stream:
            await send_stream(send, generation, format, include_usage=request.include_usage, headers=headers)
            return
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                format.collect(delta)
        await send_json(send, format.response(generation.usage), headers)

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
