"""`/health`, `/version` and `/metrics`: for whoever watches the server."""

from __future__ import annotations

from octavo.errors import OctavoError
from octavo.server.api import ServingEngine
from octavo.server.errors import send_error
from octavo.server.exchange import get_exchange
from octavo.server.http_metrics import HttpMetrics
from octavo.server.responses import Receive, Scope, Send, send_bytes, send_json
from octavo.server.settings import ServerSettings


class MonitorEndpoints:
    def __init__(self, engine: ServingEngine, settings: ServerSettings, version: str, http_metrics: HttpMetrics):
        self._engine = engine
        self._settings = settings
        self._version = version
        self._http_metrics = http_metrics

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A round trip through the engine; 503 with a sentence when it is dead, stuck or being started again."""
        try:
            await self._engine.check_health(self._settings.health_timeout_s)
        except OctavoError as error:
            await send_error(send, error, get_exchange(scope))
        else:
            await send_json(send, {"status": "ok"})

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"version": self._version})

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        content_type = b"text/plain; version=0.0.4; charset=utf-8"
        body = self._engine.metrics.render() + self._http_metrics.render()
        await send_bytes(send, 200, body, ((b"content-type", content_type),))
