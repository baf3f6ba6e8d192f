"""The life of the server process, in this one: loading, serving, and the ways to end. Real signals, a fake engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable

import httpx
import pytest

from octavo.errors import ConfigError, ModelSourceError
from octavo.server.api import ServingEngine
from octavo.server.listener import bind_listener, format_url, is_loopback
from octavo.server.serving import serve
from octavo.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine, say

pytestmark = pytest.mark.anyio


class Running:
    """serve() as a task, with what a test needs to talk to it."""

    def __init__(self, start_engine: Callable[[], Awaitable[ServingEngine]], shutdown_timeout_s: float = 20):
        self.listener = bind_listener("127.0.0.1", 0)
        self.url = format_url(self.listener, "127.0.0.1")
        self.is_ready = asyncio.Event()
        self.task = asyncio.ensure_future(
            serve(
                start_engine,
                ServerSettings(shutdown_timeout_s=shutdown_timeout_s),
                self.listener,
                version="9.9.9",
                on_ready=lambda engine: self.is_ready.set(),
            )
        )

    async def ready(self) -> None:
        await asyncio.wait_for(self.is_ready.wait(), 20)

    async def status(self) -> int:
        return await asyncio.wait_for(self.task, 20)


def starter(engine: FakeEngine) -> Callable[[], Awaitable[ServingEngine]]:
    async def start() -> ServingEngine:
        return engine

    return start


async def stream_of(url: str) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
        return (await client.post("/v1/completions", json={"prompt": "x", "stream": True})).text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_an_idle_server_with_status_0(number: signal.Signals) -> None:
    engine = FakeEngine()
    running = Running(starter(engine))
    await running.ready()
    async with httpx.AsyncClient(base_url=running.url, trust_env=False) as client:
        # The idle connection that is left open must not hold the server up.
        assert (await client.get("/health")).status_code == 200
        os.kill(os.getpid(), number)
        assert await running.status() == 0
    assert engine.is_shut_down
    assert engine.drained_with == [20]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", int(running.url.rsplit(":", 1)[1]))


async def test_a_running_stream_may_end_before_the_server_does() -> None:
    """H57."""
    may_go_on = asyncio.Event()

    class SlowEngine(FakeEngine):
        async def generate(self, *args, **kwargs):  # type: ignore[no-untyped-def,override]
            async for delta in super().generate(*args, **kwargs):
                yield delta
                self.waiting.set()
                await may_go_on.wait()

    engine = SlowEngine(say("a", "b", "c"))
    running = Running(starter(engine))
    await running.ready()
    answer = asyncio.ensure_future(stream_of(running.url))
    await asyncio.wait_for(engine.waiting.wait(), 20)
    os.kill(os.getpid(), signal.SIGTERM)
    while not engine.drained_with:
        await asyncio.sleep(0)
    may_go_on.set()
    text = await answer
    assert text.count('"finish_reason":"stop"') == 1
    assert text.endswith("data: [DONE]\n\n")
    assert await running.status() == 0


async def test_what_does_not_end_in_time_is_told_so() -> None:
    """H57."""
    engine = FakeEngine(lambda params: [*say("a", "b")(params)[:1], None])
    running = Running(starter(engine), shutdown_timeout_s=0.05)
    await running.ready()
    answer = asyncio.ensure_future(stream_of(running.url))
    await asyncio.wait_for(engine.waiting.wait(), 20)
    os.kill(os.getpid(), signal.SIGTERM)
    assert '"shutting_down"' in await answer
    assert await running.status() == 0


async def test_a_second_signal_aborts_at_once() -> None:
    engine = FakeEngine(lambda params: [*say("a", "b")(params)[:1], None])
    running = Running(starter(engine), shutdown_timeout_s=3600)
    await running.ready()
    answer = asyncio.ensure_future(stream_of(running.url))
    await asyncio.wait_for(engine.waiting.wait(), 20)
    os.kill(os.getpid(), signal.SIGINT)
    while not engine.drained_with:
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)
    assert '"shutting_down"' in await answer
    assert await running.status() == 0


async def test_a_signal_while_loading_cancels_the_start() -> None:
    is_loading, was_cancelled = asyncio.Event(), asyncio.Event()

    async def load_for_ever() -> ServingEngine:
        is_loading.set()
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()
        raise AssertionError

    running = Running(load_for_ever)
    await is_loading.wait()
    os.kill(os.getpid(), signal.SIGINT)
    assert await running.status() == 130
    assert was_cancelled.is_set()
    running.listener.close()


async def test_a_failed_start_is_raised_as_it_is() -> None:
    async def fail() -> ServingEngine:
        raise ModelSourceError("There is no model at ./x.")

    running = Running(fail)
    with pytest.raises(ModelSourceError, match="no model at"):
        await running.status()
    running.listener.close()


async def test_a_port_taken_while_loading_is_explained_and_the_engine_ended() -> None:
    engine = FakeEngine()
    may_start = asyncio.Event()

    async def start() -> ServingEngine:
        await may_start.wait()
        return engine

    running = Running(start)
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(running.listener.getsockname())
        thief.listen()
        may_start.set()
        with pytest.raises(ConfigError, match="while the model was loading"):
            await running.status()
    assert engine.is_shut_down
    running.listener.close()


# --- the listener ---------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_told_at_once() -> None:
    with bind_listener("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {port} on 127.0.0.1 is in use.*--port") as caught:
            bind_listener("127.0.0.1", port)
    assert caught.value.option == "--port"


@pytest.mark.parametrize(
    ("host", "port", "option"),
    [("127.0.0.1", 70000, "--port"), ("127.0.0.1", -1, "--port"), ("203.0.113.1", 0, "--host"), ("a..b", 0, "--host")],
)
def test_an_impossible_address_names_its_option(host: str, port: int, option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind_listener(host, port)
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_the_url_is_one_that_a_client_here_can_use() -> None:
    with bind_listener("0.0.0.0", 0) as listener:
        assert format_url(listener, "0.0.0.0") == f"http://127.0.0.1:{listener.getsockname()[1]}"
