"""Bytes that never become a request: broken, endless and slow heads, over real sockets."""

from __future__ import annotations

import asyncio
import json

import pytest

from octavo.server.connection import MAX_HEAD_BYTES, Connection
from tests.server.conftest import Serving
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


async def answer_to(port: int, *parts: bytes) -> tuple[int, dict[str, str]]:
    """(status, the error) for bytes that are sent as they are; the server must close the connection by itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    assert b"content-type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),  # a client that speaks TLS
        b"NONSENSE /health HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=lambda sent: repr(sent[:24]),
)
async def test_what_is_not_http_gets_an_error_of_the_same_shape(serving: Serving, sent: bytes) -> None:
    async with serving(FakeEngine()) as client:
        status, error = await answer_to(client.base_url.port or 0, sent)
        assert status == 400
        assert "not a valid HTTP/1.1 request" in error["message"]
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("line", [b"X: a\r\n", b"a" * 6], ids=["many headers", "one header"])
async def test_a_head_without_end_is_refused_while_it_arrives(serving: Serving, line: bytes) -> None:
    async with serving(FakeEngine()) as client:
        port = client.base_url.port or 0
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nX: ")
        answer = asyncio.ensure_future(reader.readline())
        sent = 0
        while not answer.done():
            writer.write(line * 1000)
            sent += len(line) * 1000
            await asyncio.wait((answer,), timeout=0.001)
            assert sent < 100 * MAX_HEAD_BYTES
        assert b" 431 " in await answer
        writer.close()
        assert (await client.get("/health")).status_code == 200


async def test_a_long_request_line_is_told_as_that(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        sent = b"GET /" + b"a" * (2 * MAX_HEAD_BYTES) + b" HTTP/1.1\r\n\r\n"
        status, error = await answer_to(client.base_url.port or 0, sent)
        assert status == 431
        assert str(MAX_HEAD_BYTES) in error["message"]


async def test_a_head_that_does_not_come_ends_the_connection(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 0.05)
    async with serving(FakeEngine()) as client:
        for sent in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nX: y\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port or 0)
            writer.write(sent)
            assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()


async def test_a_request_may_last_longer_than_its_head(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 0.05)

    class SlowEngine(FakeEngine):
        async def check_health(self, timeout_s: float) -> None:
            await asyncio.sleep(0.2)

    async with serving(SlowEngine()) as client:
        for _ in range(2):  # the second on the same connection
            assert (await client.get("/health")).status_code == 200


async def test_a_wish_to_upgrade_is_passed_over(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"connection": "Upgrade", "upgrade": "websocket"}
    async with serving(FakeEngine()) as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
    assert not caplog.records
