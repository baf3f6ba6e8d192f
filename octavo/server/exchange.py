"""One request and its answer, from the first byte to the log line: the outermost layer of the application.

`ExchangeMiddleware` gives every request its id and every answer the header X-Request-Id, takes --root-path off the
path, and writes the access log. What the layers inside learn about the request, they note on its `Exchange`.
"""

from __future__ import annotations

import time
from typing import Protocol

from octavo.server.access_log import AccessLog
from octavo.server.body import find_header
from octavo.server.http_metrics import HttpMetrics
from octavo.server.request_ids import choose_request_id, current_request_id
from octavo.server.responses import App, Message, Receive, Scope, Send

# nginx's number for a client that left before its answer began; it is only logged, nobody is there to read it.
STATUS_CLIENT_LEFT = 499


class UsageCounts(Protocol):
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...


class GenerationRecord(Protocol):
    """What the log tells of a generation, also of one that is not finished. Times in seconds, None if not reached."""

    @property
    def usage(self) -> UsageCounts: ...
    @property
    def finish_reasons(self) -> list[str]: ...
    @property
    def queue_time_s(self) -> float | None: ...
    @property
    def first_token_time_s(self) -> float | None: ...


class Exchange:
    """response_headers: sent with the answer, whoever gives it
    route:            the path in its general form ("/v1/models/{model}"); "" until one is found
    key_label:        which of the server's keys opened the door: "key-1"; never the key
    labels:           the sender's own words for the log (user, metadata)
    has_client_left:  before its answer was complete
    """

    def __init__(self, request_id: str, *, is_chosen: bool = False):
        """is_chosen: the id is the client's own"""
        self.request_id = request_id
        self._is_chosen = is_chosen
        self.started_at = time.monotonic()
        self.response_headers: list[tuple[bytes, bytes]] = [(b"x-request-id", request_id.encode())]
        self.status = 0
        self.route = ""
        self.key_label = ""
        self.model = ""
        self.is_streamed = False
        self.error_code = ""
        self.labels: dict[str, str] = {}
        self.generation: GenerationRecord | None = None
        self.has_client_left = False

    def rename(self, request_id: str) -> None:
        """The body names the request, too. A header's id, which the log may already have, goes before."""
        if not self._is_chosen:
            self.response_headers.remove((b"x-request-id", self.request_id.encode()))
            self.response_headers.append((b"x-request-id", request_id.encode()))
            self.request_id = request_id
            current_request_id.set(request_id)


def get_exchange(scope: Scope) -> Exchange:
    exchange: Exchange = scope["octavo.exchange"]
    return exchange


class ExchangeMiddleware:
    """Pure ASGI. access_log: None writes none."""

    def __init__(self, app: App, root_path: str, metrics: HttpMetrics, access_log: AccessLog | None):
        self._app = app
        self._root_path = root_path
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = find_header(scope, b"x-request-id")
        request_id = choose_request_id(sent)
        exchange = Exchange(request_id, is_chosen=sent == request_id.encode())
        current_request_id.set(exchange.request_id)  # this task is the request's own, so nothing is to be put back
        scope["octavo.exchange"] = exchange
        self._strip_root_path(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message["headers"], *exchange.response_headers]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            current_request_id.set(exchange.request_id)  # it may have been renamed in a task of its own
            if not exchange.status:
                exchange.status = STATUS_CLIENT_LEFT
            seconds = time.monotonic() - exchange.started_at
            self._metrics.push_request(exchange.route, scope["method"], exchange.status, seconds)
            if self._access_log is not None:
                self._access_log.write(exchange, scope, seconds)

    def _strip_root_path(self, scope: Scope) -> None:
        """A proxy may forward the path with its prefix or without; both are understood."""
        path, root = scope["path"], self._root_path
        if root and (path == root or path.startswith(root + "/")):
            scope["path"] = path[len(root) :] or "/"
