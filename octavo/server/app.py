"""The HTTP application: which path leads where, who may pass, and what the rest gets.

exchange (id, access log) -> CORS -> keys -> router -> endpoint
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from octavo.server.access_log import AccessLog
from octavo.server.api import ServingEngine
from octavo.server.auth import KeyMiddleware
from octavo.server.chat import ChatEndpoint
from octavo.server.chat_prompt import ChatPrompter
from octavo.server.completions import CompletionEndpoint
from octavo.server.cors import CorsMiddleware
from octavo.server.documents import DocumentEndpoints
from octavo.server.errors import send_error, send_status_error
from octavo.server.exchange import ExchangeMiddleware, get_exchange
from octavo.server.http_metrics import HttpMetrics
from octavo.server.models import ModelsEndpoint
from octavo.server.monitor import MonitorEndpoints
from octavo.server.other_apis import explain_path
from octavo.server.responses import App, Receive, Scope, Send
from octavo.server.settings import ServerSettings
from octavo.server.tokenize import DetokenizeEndpoint, TokenizeEndpoint

Routes = Sequence[tuple[str, str, App]]


def build_app(engine: ServingEngine, settings: ServerSettings, version: str) -> App:
    """An ASGI application over a started engine. It neither starts nor stops the engine."""
    http_metrics = HttpMetrics()
    app: App = Router(make_routes(engine, settings, version, http_metrics))
    app = KeyMiddleware(app, settings.api_keys)
    if settings.cors.allowed_origins:
        app = CorsMiddleware(app, settings.cors)
    access_log = AccessLog() if settings.access_log else None
    return ExchangeMiddleware(app, settings.root_path, http_metrics, access_log)


def make_routes(engine: ServingEngine, settings: ServerSettings, version: str, http_metrics: HttpMetrics) -> Routes:
    """(method, path, endpoint). A path may end in {name}, which stands for all the rest, slashes included."""
    models = ModelsEndpoint(engine)
    monitor = MonitorEndpoints(engine, settings, version, http_metrics)
    prompter = ChatPrompter(engine, settings)
    documents = DocumentEndpoints(settings, version)
    return (
        ("POST", "/v1/chat/completions", ChatEndpoint(engine, settings, prompter)),
        ("POST", "/v1/completions", CompletionEndpoint(engine, settings)),
        ("GET", "/v1/models", models),
        ("GET", "/v1/models/{model}", models.one),
        ("POST", "/tokenize", TokenizeEndpoint(engine, settings, prompter)),
        ("POST", "/detokenize", DetokenizeEndpoint(engine, settings)),
        ("GET", "/health", monitor.health),
        ("GET", "/version", monitor.version),
        ("GET", "/metrics", monitor.metrics),
        ("GET", "/openapi.json", documents.openapi),
        ("GET", "/docs", documents.page),
    )


class Router:
    """Exact paths in a dict, and the few with a name at the end by their prefix. Model names may hold slashes.

    GET also answers HEAD: the protocol server leaves out the body.
    """

    def __init__(self, routes: Routes):
        self._exact = {path: (path, method, endpoint) for method, path, endpoint in routes if "{" not in path}
        self._prefixes = {
            path.partition("{")[0]: (path, method, endpoint) for method, path, endpoint in routes if "{" in path
        }

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
            await send_error(send, error, get_exchange(scope))

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._find(scope)
        if found is None:
            await send_status_error(send, 404, self._no_such_path(scope["path"]))
            return
        path, allowed, endpoint = found
        get_exchange(scope).route = path
        method = scope["method"]
        if method != allowed and not (method == "HEAD" and allowed == "GET"):
            message = f"{path} takes {allowed}, not {method[:20]}."
            await send_status_error(send, 405, message, ((b"allow", allowed.encode()),))
            return
        await endpoint(scope, receive, send)

    def _find(self, scope: Scope) -> tuple[str, str, App] | None:
        path = scope["path"]
        found = self._exact.get(path)
        if found is None:
            for prefix, route in self._prefixes.items():
                if path.startswith(prefix) and len(path) > len(prefix):
                    name = route[0][len(prefix) + 1 : -1]
                    scope["path_params"] = {name: path[len(prefix) :]}
                    return route
        return found

    def _no_such_path(self, path: str) -> str:
        if (sentence := explain_path(path)) is not None:
            return sentence
        nearest = difflib.get_close_matches(path[:100], self._exact, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(self._exact)}."
        return f"There is nothing at {path[:100]}; {hint}"


async def _run_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
