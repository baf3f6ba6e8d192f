"""A request's body: of the right kind, no larger than allowed, counted while it arrives."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from octavo.errors import ClientError, RequestTooLargeError
from octavo.server.responses import Message, Receive, Scope


class UnsupportedMediaTypeError(ClientError):
    status = 415


class BodyTimeoutError(ClientError):
    status = 408
    error_type = "timeout_error"


# A body that comes more slowly than this, after its first body_timeout_s, is given up.
_MIN_BYTES_A_SECOND = 16 * 1024


class ClientDisconnected(Exception):
    """The client left; there is nobody to answer."""


async def read_json_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """timeout_s: for the body, and a second more for every 16 KiB that came

    Raises RequestTooLargeError, UnsupportedMediaTypeError, BodyTimeoutError, ClientDisconnected.
    """
    content_type = find_header(scope, b"content-type")
    if content_type is not None:
        _check_content_type(content_type)
    encoding = find_header(scope, b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        _refuse_encoding(encoding)
    declared = find_header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > max_bytes:
        _refuse_size(f"{int(declared)} bytes", max_bytes)
    started_at = asyncio.get_running_loop().time()
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await _receive_until(receive, started_at + timeout_s + num_bytes / _MIN_BYTES_A_SECOND, num_bytes)
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:
            _refuse_size(f"more than {max_bytes} bytes", max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _receive_until(receive: Receive, ends_at: float, num_bytes: int) -> Message:
    timeout_s = ends_at - asyncio.get_running_loop().time()
    try:
        return await asyncio.wait_for(receive(), max(timeout_s, 0.0))
    except asyncio.TimeoutError:
        raise BodyTimeoutError(
            f"The body did not arrive in time: {num_bytes} bytes came. Is its Content-Length right?",
            code="body_timeout",
        ) from None


def find_header(scope: Scope, name: bytes) -> bytes | None:
    """name: in lower case, as ASGI gives them"""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def _check_content_type(content_type: bytes) -> None:
    media_type = content_type.split(b";", 1)[0].strip().lower()
    if media_type != b"application/json" and not media_type.endswith(b"+json"):
        shown = media_type.decode("ascii", "replace")[:80]
        raise UnsupportedMediaTypeError(
            f"The Content-Type is {shown!r}, but the body must be JSON; "
            "send the header Content-Type: application/json.",
            code="unsupported_media_type",
        )


def _refuse_encoding(encoding: bytes) -> NoReturn:
    # Unpacking would be a door for bodies that are small on the way and huge here.
    raise UnsupportedMediaTypeError(
        f"The Content-Encoding is {encoding.decode('ascii', 'replace')[:80]!r}, but bodies are read as they come; "
        "send it without compression.",
        code="unsupported_content_encoding",
    )


def _refuse_size(size: str, max_bytes: int) -> None:
    raise RequestTooLargeError(
        f"The body has {size}, but this server takes at most {max_bytes}; "
        "send less, or start the server with a larger --max-request-bytes.",
        code="request_too_large",
    )
