"""The life of a server process: load, listen, serve, drain, leave.

    start the engine process -> import the HTTP side meanwhile -> listen -> ... -> a signal -> drain -> shut down

The first SIGTERM or SIGINT drains: no new requests, and the running ones may end within the shutdown timeout; whatever
is left then is aborted and told so. A second one aborts at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from octavo.errors import ConfigError
from octavo.server.api import ServingEngine
from octavo.server.settings import ServerSettings

logger = logging.getLogger("octavo.server")

# The shell's way to say "ended by SIGINT".
EXIT_INTERRUPTED = 130

EngineT = TypeVar("EngineT", bound=ServingEngine)


async def serve(
    start_engine: Callable[[], Awaitable[EngineT]],
    settings: ServerSettings,
    listener: socket.socket,
    *,
    version: str,
    on_ready: Callable[[EngineT], None],
) -> int:
    """Returns the exit status. Raises what starting the engine raises, and ConfigError when the port is lost."""
    signals = StopSignals()
    with signals.listening():
        starting = asyncio.ensure_future(start_engine())
        # A few tenths of a second of imports, while the engine process reads the weights.
        importing = asyncio.ensure_future(asyncio.to_thread(importlib.import_module, "octavo.server.http"))
        engine = await _unless_stopped(starting, signals)
        if engine is None:
            await asyncio.wait((importing,))
            return EXIT_INTERRUPTED
        try:
            server = (await importing).HttpServer(engine, settings, listener, version)
            try:
                await server.start()
            except OSError as error:
                raise ConfigError(
                    f"The port was taken by another program while the model was loading ({error.strerror}); "
                    "choose another one with --port.",
                    option="--port",
                ) from None
            on_ready(engine)
            await signals.first.wait()
            server.stop_accepting()
            await _drain(engine, signals, settings.shutdown_timeout_s)
        finally:
            # Whatever still runs is answered with an error by this, so that no client waits for nothing.
            await engine.shutdown()
        await server.finish()
    return 0


class StopSignals:
    """SIGTERM and SIGINT, as two events: asked once, asked again."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def receive(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        try:
            for number in numbers:
                loop.add_signal_handler(number, self.receive)
        except (NotImplementedError, RuntimeError, ValueError):
            # Windows, or not the main thread (a test): whoever started us ends us.
            yield
            return
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


async def _unless_stopped(starting: asyncio.Future[EngineT], signals: StopSignals) -> EngineT | None:
    """The started engine; None if we were asked to stop before it was ready."""
    stopped = asyncio.ensure_future(signals.first.wait())
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
        return None
    finally:
        stopped.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,))


async def _drain(engine: ServingEngine, signals: StopSignals, timeout_s: float) -> None:
    logger.info("stopping: running requests may end within %g s; once more to abort them", timeout_s)
    draining = asyncio.ensure_future(engine.drain(timeout_s))
    asked_again = asyncio.ensure_future(signals.second.wait())
    try:
        await asyncio.wait((draining, asked_again), return_when=asyncio.FIRST_COMPLETED)
        if draining.done():
            draining.result()
    finally:
        asked_again.cancel()
        draining.cancel()
        await asyncio.wait((draining,))
