"""uvicorn, with its signal handling switched off: `serving` decides when and how the server ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from octavo.server.api import ServingEngine
from octavo.server.app import build_app
from octavo.server.connection import Connection
from octavo.server.settings import ServerSettings
from octavo.server.tls import make_tls_context

# Longer than clients keep their idle connections, so that they close them and not we, in the middle of a request.
_KEEP_ALIVE_S = 75
# What a client may still need to read the end of its answer after the last request is done.
_LAST_BYTES_TIMEOUT_S = 5


class HttpServer:
    """Serves an engine on a bound socket, in this event loop."""

    def __init__(self, engine: ServingEngine, settings: ServerSettings, listener: socket.socket, version: str):
        config = uvicorn.Config(
            build_app(engine, settings, version),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # ours tells more: octavo.server.access_log
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        if settings.tls is not None:
            # uvicorn makes its own context from paths; ours was checked at the start, and explains itself.
            config.load()
            config.ssl = make_tls_context(settings.tls)
        self._listener = listener
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when clients can connect. Raises OSError when another program took the port in the meantime."""
        # uvicorn would report a failed listen() and exit the process; this raises it where it can be explained.
        self._listener.listen(self._server.config.backlog)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        listening = asyncio.ensure_future(self._server.is_listening.wait())
        await asyncio.wait((self._serving, listening), return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listening.cancel()
            self._serving.result()
            raise RuntimeError("the HTTP server ended before it began")

    def stop_accepting(self) -> None:
        """No new connections; open ones are closed when their request is done."""
        self._server.should_exit = True

    async def finish(self) -> None:
        """Wait until the last bytes are out, not for long: whoever does not read is cut off."""
        assert self._serving is not None
        self._server.should_exit = True
        done, _ = await asyncio.wait((self._serving,), timeout=_LAST_BYTES_TIMEOUT_S)
        if not done:
            self._server.force_exit = True
            for task in list(self._server.server_state.tasks):
                task.cancel()
            for connection in list(self._server.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        await self._serving


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[Any]:
        yield
