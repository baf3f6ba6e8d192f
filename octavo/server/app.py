"""The HTTP application: which path leads where, who may pass, and what the rest gets."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable
from typing import Any

from octavo.server.api import ServingEngine
from octavo.server.auth import KeyMiddleware
from octavo.server.chat import ChatEndpoint
from octavo.server.completions import CompletionEndpoint
from octavo.server.errors import send_error, send_status_error
from octavo.server.models import ModelsEndpoint
from octavo.server.monitor import MonitorEndpoints
from octavo.server.responses import Receive, Scope, Send
from octavo.server.settings import ServerSettings

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]
_MODEL_PREFIX = "/v1/models/"


def build_app(engine: ServingEngine, settings: ServerSettings, version: str) -> Endpoint:
    """An ASGI application over a started engine. It neither starts nor stops the engine."""
    models = ModelsEndpoint(engine)
    monitor = MonitorEndpoints(engine, settings, version)
    router = Router(
        {
            "/v1/chat/completions": ("POST", ChatEndpoint(engine, settings)),
            "/v1/completions": ("POST", CompletionEndpoint(engine, settings)),
            "/v1/models": ("GET", models),
            "/health": ("GET", monitor.health),
            "/version": ("GET", monitor.version),
            "/metrics": ("GET", monitor.metrics),
        },
        one_model=models.one,
    )
    return KeyMiddleware(router, settings.api_keys)


class Router:
    """Exact paths in a dict, and the one path with a name in it. Model names may hold slashes.

    GET also answers HEAD: the protocol server leaves out the body.
    """

    def __init__(self, routes: dict[str, tuple[str, Any]], one_model: Endpoint):
        self._routes = routes
        self._one_model = one_model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _run_lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003, "reason": "there are no websockets here"})
            return
        try:
            await self._route(scope, receive, send)
        except Exception as error:  # an endpoint that answers tells its own faults; this is our mistake
            await send_error(send, error)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith(_MODEL_PREFIX) and len(path) > len(_MODEL_PREFIX):
            scope["path_params"] = {"model": path[len(_MODEL_PREFIX) :]}
            allowed, endpoint = "GET", self._one_model
        elif path in self._routes:
            allowed, endpoint = self._routes[path]
        else:
            await send_status_error(send, 404, self._no_such_path(path))
            return
        method = scope["method"]
        if method != allowed and not (method == "HEAD" and allowed == "GET"):
            message = f"{path} takes {allowed}, not {method[:20]}."
            await send_status_error(send, 405, message, ((b"allow", allowed.encode()),))
            return
        await endpoint(scope, receive, send)

    def _no_such_path(self, path: str) -> str:
        nearest = difflib.get_close_matches(path[:100], self._routes, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(self._routes)}."
        return f"There is nothing at {path[:100]}; {hint}"


async def _run_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
