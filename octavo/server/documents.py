"""`/openapi.json` and `/docs`: the API, described by itself. Made when they are first asked for."""

from __future__ import annotations

import functools

import msgspec

from octavo.server.docs_page import make_docs_page
from octavo.server.openapi import make_openapi
from octavo.server.responses import JSON_HEADERS, Receive, Scope, Send, send_bytes
from octavo.server.settings import ServerSettings

_PAGE_HEADERS = (
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'"),
)


class DocumentEndpoints:
    def __init__(self, settings: ServerSettings, version: str):
        self._settings = settings
        self._version = version

    async def openapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, 200, self._document, JSON_HEADERS)

    async def page(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, 200, self._page, _PAGE_HEADERS)

    @functools.cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(make_openapi(self._settings, self._version))

    @functools.cached_property
    def _page(self) -> bytes:
        return make_docs_page(make_openapi(self._settings, self._version)).encode()
