"""One client's connection, for what happens before there is a request: heads that are broken, endless, or too large.

uvicorn's parser sets no limit to a head and waits for it for ever, and tells a broken one in plain text. Here a head
is bounded in bytes and in time, and every refusal has the shape that OpenAI's clients read.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.server.errors import make_error_body
from octavo.server.request_ids import make_request_id

# What other servers take; the largest honest head is a long key and a few cookies.
MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 60.0

_REASONS = {400: "Bad Request", 431: "Request Header Fields Too Large"}


class Connection(HttpToolsProtocol):
    """A uvicorn protocol. Between two requests the base class's own timer closes an idle connection."""

    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self.url = b""  # the base class sets it only when a request begins
        self._head_timer: asyncio.TimerHandle | None = None  # while a head is awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        # What came before was head and nothing else; of this piece the parser has yet to say where the head ends.
        if self._head_timer is not None and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse_long_head()
            return
        self._num_head_bytes += len(data)
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        # A head may arrive whole, and of its target the parser itself takes no more than this.
        if len(self.url) >= MAX_HEAD_BYTES:
            self._refuse_long_head()
            return
        self._refuse(400, "This is not a valid HTTP/1.1 request; is the address right, with http and not https?")

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: the request is answered as if it had not asked, and the log is no place for a client's wishes."""

    def _await_head(self) -> None:
        self._stop_waiting()
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_long_head(self) -> None:
        self._refuse(431, f"The request line and headers have more than {MAX_HEAD_BYTES} bytes; send less.")

    def _refuse(self, status: int, message: str) -> None:
        self._stop_waiting()
        body = make_error_body(message, "invalid_request_error")
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"x-request-id: {make_request_id()}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
