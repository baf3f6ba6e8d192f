"""`/v1/models` and `/v1/models/{id}`: what is served, under which names, and how long a sequence may be."""

from __future__ import annotations

from typing import Any

from octavo.errors import ClientError
from octavo.server.api import ServingEngine
from octavo.server.endpoint import check_model
from octavo.server.errors import send_error
from octavo.server.exchange import get_exchange
from octavo.server.responses import Receive, Scope, Send, send_json


class ModelsEndpoint:
    def __init__(self, engine: ServingEngine):
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info = self._engine.info
        await send_json(send, {"object": "list", "data": [self._entry(name) for name in info.served_model_names]})

    async def one(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["model"]
        try:
            check_model(name, self._engine.info.served_model_names)
        except ClientError as error:
            await send_error(send, error, get_exchange(scope))
        else:
            await send_json(send, self._entry(name))

    def _entry(self, name: str) -> dict[str, Any]:
        info = self._engine.info
        return {
            "id": name,
            "object": "model",
            "created": info.created,
            "owned_by": "octavo",
            "root": info.served_model_names[0],
            "parent": None,
            "max_model_len": info.max_model_len,
        }
