"""Pages of other origins: closed unless --allowed-origins opens it. A preflight is answered without a key.

A browser sends no key with a preflight, and asks for nothing but whether it may ask.
"""

from __future__ import annotations

from octavo.server.body import find_header
from octavo.server.errors import send_status_error
from octavo.server.exchange import get_exchange
from octavo.server.responses import App, Receive, Scope, Send, send_bytes
from octavo.server.settings import CorsSettings

_MAX_AGE_S = 600
_EXPOSED = b"x-request-id, retry-after, x-octavo-ignored-fields"


class CorsMiddleware:
    """Pure ASGI. Answers preflights, and adds to every other answer the headers that let a page read it."""

    def __init__(self, app: App, settings: CorsSettings):
        self._app = app
        self._settings = settings
        self._allows_all = "*" in settings.allowed_origins
        self._origins = frozenset(origin.encode() for origin in settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = find_header(scope, b"origin") if scope["type"] == "http" else None
        if origin is None:
            await self._app(scope, receive, send)
            return
        asked_method = find_header(scope, b"access-control-request-method")
        if scope["method"] == "OPTIONS" and asked_method is not None:
            await self._answer_preflight(origin, asked_method, scope, send)
            return
        if self._is_allowed(origin):
            get_exchange(scope).response_headers += self._origin_headers(origin)
            get_exchange(scope).response_headers.append((b"access-control-expose-headers", _EXPOSED))
        await self._app(scope, receive, send)

    async def _answer_preflight(self, origin: bytes, method: bytes, scope: Scope, send: Send) -> None:
        if not self._is_allowed(origin):
            message = "This origin may not use the server; start it with --allowed-origins to allow it."
            await send_status_error(send, 403, message, ((b"vary", b"Origin"),))
            return
        allowed_methods = self._settings.allowed_methods
        if "*" not in allowed_methods and method.decode("latin-1").upper() not in allowed_methods:
            message = f"The method is not among --allowed-methods; allowed are {', '.join(allowed_methods)}."
            await send_status_error(send, 403, message, ((b"vary", b"Origin"),))
            return
        headers = [
            *self._origin_headers(origin),
            (b"access-control-allow-methods", self._methods(method)),
            (b"access-control-max-age", b"%d" % _MAX_AGE_S),
        ]
        asked_headers = find_header(scope, b"access-control-request-headers")
        allowed_headers = self._headers(asked_headers)
        if allowed_headers:
            headers.append((b"access-control-allow-headers", allowed_headers))
        await send_bytes(send, 204, b"", headers)

    def _is_allowed(self, origin: bytes) -> bool:
        return self._allows_all or origin in self._origins

    def _origin_headers(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        headers = [(b"vary", b"Origin")]
        if self._settings.allow_credentials:
            headers.append((b"access-control-allow-credentials", b"true"))
        # With credentials a browser takes no star; and "null" (a file, a sandbox) is an origin like any other.
        is_star = self._allows_all and not self._settings.allow_credentials
        headers.append((b"access-control-allow-origin", b"*" if is_star else origin))
        return headers

    def _methods(self, asked: bytes) -> bytes:
        allowed = self._settings.allowed_methods
        return asked if "*" in allowed else ", ".join(allowed).encode()

    def _headers(self, asked: bytes | None) -> bytes:
        allowed = self._settings.allowed_headers
        return (asked or b"") if "*" in allowed else ", ".join(allowed).encode()
