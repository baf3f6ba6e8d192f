"""Bytes to an ASGI `send`, without a response object: one message for the head, one for the body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

JSON_HEADERS: Headers = ((b"content-type", b"application/json"),)


async def send_json(send: Send, value: Any, headers: Headers = ()) -> None:
    await send_bytes(send, 200, msgspec.json.encode(value), (*JSON_HEADERS, *headers))


async def send_bytes(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    head = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
