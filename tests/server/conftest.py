from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest

from octavo.server import chat, completions
from octavo.server.http import HttpServer
from octavo.server.listener import bind_listener
from octavo.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine

CREATED = 1700000001


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def _fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chat, completions):
        monkeypatch.setattr(module, "unix_time", lambda: CREATED)


Serving = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def serving(_fixed_time: None) -> Serving:
    """`async with serving(engine) as client`: a real HTTP server on a free port, in this event loop."""

    @asynccontextmanager
    async def serve(engine: FakeEngine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        listener: socket.socket = bind_listener("127.0.0.1", 0)
        server = HttpServer(engine, ServerSettings(**settings), listener, "9.9.9")
        await server.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
                yield client
        finally:
            await engine.shutdown()
            await server.finish()

    return serve
