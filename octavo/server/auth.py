"""The door: with keys set, every route asks for one, except those in OPEN_PATHS. What is not listed is closed."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from octavo.server.body import find_header
from octavo.server.errors import send_status_error
from octavo.server.exchange import get_exchange
from octavo.server.responses import Receive, Scope, Send

# Probes of a load balancer carry no key, and the answer tells nothing about anybody.
OPEN_PATHS = frozenset({"/health"})


class KeyMiddleware:
    """Pure ASGI. Puts the cache namespace of the caller's key into the scope, as `octavo.cache_salt`.

    Users of different keys never share cached blocks: how fast an answer comes would tell what others have asked.
    """

    def __init__(self, app: Any, keys: Sequence[str]):
        self._app = app
        self._keys = [_key_bytes(key) for key in keys]
        # With one key there is one tenant, and the cache is as it would be without a key.
        self._salts = [hashlib.sha256(key).hexdigest()[:16] if len(self._keys) > 1 else "" for key in self._keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._keys:
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008, "reason": "a key is needed"})
            return
        number = self._find_key(scope)
        if number is None and scope["path"] not in OPEN_PATHS:
            await _refuse(scope, send)
            return
        if number is not None:
            scope["octavo.cache_salt"] = self._salts[number]
            get_exchange(scope).key_label = f"key-{number + 1}"
        await self._app(scope, receive, send)

    def _find_key(self, scope: Scope) -> int | None:
        """Which key the caller has; None without a valid one. All keys are compared, in constant time each."""
        scheme, _, sent = (find_header(scope, b"authorization") or b"").partition(b" ")
        sent = sent.strip()
        found = None
        for number, key in enumerate(self._keys):
            if hmac.compare_digest(sent, key) and scheme.lower() == b"bearer":
                found = number
        return found


def _key_bytes(key: str) -> bytes:
    # An environment variable may hold bytes that are not UTF-8; Python keeps them as surrogates.
    return key.strip().encode("utf-8", "surrogateescape")


async def _refuse(scope: Scope, send: Send) -> None:
    if find_header(scope, b"authorization") is None:
        message = "This server needs an API key; send the header Authorization: Bearer KEY."
    else:
        message = "The API key is not one of this server's; check the header Authorization: Bearer KEY."
    await send_status_error(send, 401, message, ((b"www-authenticate", b"Bearer"),))
