"""A streaming HTTP client that costs next to nothing while the clock runs: bytes are kept with the time at which they
came, and are read as HTTP, chunks, events and JSON afterwards. Standard library only.

On a machine with two cores a client that parses as it reads takes time from the server it measures.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from octavo.errors import ConfigError

clock = time.perf_counter

_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go. base_path: "/v1" or what the URL says."""

    host: str
    port: int
    base_path: str
    is_tls: bool
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(slots=True)
class Exchange:
    """One request and the raw bytes of its answer, each piece with the time at which it came.

    fault: what went wrong with the connection; None when the other side answered and closed
    """

    sent_at: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    fault: str | None = None

    @property
    def ended_at(self) -> float:
        return self.pieces[-1][0] if self.pieces else self.sent_at


@dataclass(frozen=True, slots=True)
class Answer:
    """status: None when there was no HTTP answer. events: (time, data) of server-sent events. body: of other answers.
    is_whole: the answer came to its proper end."""

    status: int | None
    events: tuple[tuple[float, bytes], ...]
    body: bytes
    is_whole: bool


def parse_url(option: str, url: str, api_key: str | None = None) -> Endpoint:
    """A base URL, with or without /v1. Raises ConfigError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ConfigError(f"{option} is {url!r}, but it must be a URL such as http://127.0.0.1:8000.", option=option)
    is_tls = parts.scheme == "https"
    path = parts.path.rstrip("/")
    if not path.rpartition("/")[2].startswith("v"):
        path += "/v1"
    headers = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
    return Endpoint(parts.hostname, port or (443 if is_tls else 80), path, is_tls, headers)


async def send(
    endpoint: Endpoint, path: str, body: dict[str, Any] | None, timeout_s: float, exchange: Exchange | None = None
) -> Exchange:
    """POST a JSON body, or GET without one. Never raises for what the other side does: it is in `fault`.

    exchange: filled while the answer comes, for who wants to watch it
    """
    exchange = exchange or Exchange()
    request = _write_request(endpoint, path, body)
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if endpoint.is_tls else None
    exchange.sent_at = clock()
    protocol = _Recorder(exchange, request, loop.create_future())
    try:
        async with _deadline(timeout_s):
            await loop.create_connection(lambda: protocol, endpoint.host, endpoint.port, ssl=context)
            await protocol.closed
    except asyncio.TimeoutError:
        exchange.fault = f"timeout after {timeout_s:g} s"
    except OSError as error:
        exchange.fault = _name_fault(error)
    finally:
        protocol.close()
    return exchange


def read_answer(exchange: Exchange) -> Answer:
    raw = b"".join(data for _, data in exchange.pieces)
    head, separator, _ = raw.partition(_HEAD_END)
    status = _read_status(head)
    if not separator or status is None:
        return Answer(None, (), raw, False)
    start = len(head) + len(_HEAD_END)
    fields = _read_fields(head)
    segments, is_whole = _read_segments(raw, start, fields)
    body = b"".join(raw[begin:end] for begin, end in segments)
    if fields.get("content-type", "").startswith("text/event-stream") and status == 200:
        return Answer(status, tuple(_read_events(exchange, raw, segments)), b"", is_whole)
    return Answer(status, (), body, is_whole)


async def fetch_json(endpoint: Endpoint, path: str, timeout_s: float = 10.0) -> Any:
    """GET; None when there is no such answer."""
    exchange = await send(endpoint, path, None, timeout_s)
    answer = read_answer(exchange)
    if answer.status != 200:
        return None
    try:
        return json.loads(answer.body)
    except ValueError:
        return None


class _Recorder(asyncio.Protocol):
    """Keeps what comes, with its time, until the other side closes or the answer is plainly over."""

    def __init__(self, exchange: Exchange, request: bytes, closed: asyncio.Future[None]):
        self._exchange = exchange
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._num_bytes_left: int | None = None
        self.closed = closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        pieces = self._exchange.pieces
        pieces.append((clock(), data))
        if len(pieces) == 1:
            head, _, body = data.partition(_HEAD_END)
            length = _read_fields(head).get("content-length", "")
            if length.isdigit():
                self._num_bytes_left = int(length) - len(body)
        elif self._num_bytes_left is not None:
            self._num_bytes_left -= len(data)
        is_last_chunk = self._num_bytes_left is None and data.endswith(_LAST_CHUNK) and data[-6:-5] in (b"", b"\n")
        if is_last_chunk or (self._num_bytes_left is not None and self._num_bytes_left <= 0):
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        if isinstance(error, OSError) and self._exchange.fault is None:
            self._exchange.fault = _name_fault(error)
        if not self.closed.done():
            self.closed.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _deadline:
    """asyncio.timeout, which Python 3.10 does not have, for one purpose: cancels the task, raises TimeoutError."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._is_late = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None

        def on_late() -> None:
            self._is_late = True
            task.cancel()

        self._handle = asyncio.get_running_loop().call_later(self._timeout_s, on_late)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._handle.cancel()
        if self._is_late and kind is asyncio.CancelledError:
            task = asyncio.current_task()
            if hasattr(task, "uncancel"):
                task.uncancel()  # type: ignore[union-attr]
            raise asyncio.TimeoutError


def _write_request(endpoint: Endpoint, path: str, body: dict[str, Any] | None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{'GET' if body is None else 'POST'} {endpoint.base_path}{path} HTTP/1.1",
        f"Host: {endpoint.name}",
        "Connection: close",
        "Accept: */*",
        *(f"{name}: {value}" for name, value in endpoint.headers),
    ]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join(lines).encode() + _HEAD_END + content


def _read_status(head: bytes) -> int | None:
    words = head.partition(b"\r\n")[0].split()
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") and words[1].isdigit() else None


def _read_fields(head: bytes) -> dict[str, str]:
    fields = {}
    for line in head.decode("latin-1").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip()
    return fields


def _read_segments(raw: bytes, start: int, fields: dict[str, str]) -> tuple[list[tuple[int, int]], bool]:
    """Where in `raw` the body is, as (begin, end) ranges, and whether it is all there."""
    if "chunked" not in fields.get("transfer-encoding", "").lower():
        length = fields.get("content-length", "")
        is_whole = not length.isdigit() or len(raw) - start >= int(length)
        return [(start, len(raw))], is_whole
    segments: list[tuple[int, int]] = []
    while True:
        line_end = raw.find(b"\r\n", start)
        if line_end < 0:
            return segments, False
        try:
            size = int(raw[start:line_end].partition(b";")[0], 16)
        except ValueError:
            return segments, False
        begin = line_end + 2
        if size == 0:
            return segments, raw.find(b"\r\n", begin) >= 0
        segments.append((begin, min(begin + size, len(raw))))
        if begin + size > len(raw):
            return segments, False
        start = begin + size + 2


def _read_events(exchange: Exchange, raw: bytes, segments: list[tuple[int, int]]) -> Iterator[tuple[float, bytes]]:
    """Each data line with the time of the piece that its end came in."""
    ends: list[int] = []
    total = 0
    for _, data in exchange.pieces:
        total += len(data)
        ends.append(total)
    line = b""
    for begin, end in segments:
        while begin < end:
            newline = raw.find(b"\n", begin, end)
            if newline < 0:
                line += raw[begin:end]
                break
            line += raw[begin:newline]
            if line.startswith(b"data:"):
                yield exchange.pieces[bisect_left(ends, newline + 1)][0], line[5:].strip()
            line, begin = b"", newline + 1


def _name_fault(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionResetError):
        return "connection reset"
    return (os.strerror(error.errno) if error.errno and error.errno > 0 else str(error) or type(error).__name__).lower()
