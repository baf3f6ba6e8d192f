"""Faults as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`, for every status."""

from __future__ import annotations

import logging

import msgspec

from octavo.errors import ClientError, OctavoError, ServerError
from octavo.server.exchange import Exchange
from octavo.server.responses import JSON_HEADERS, Send, send_bytes

logger = logging.getLogger("octavo.server")

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 405: "method_not_allowed_error"}
_CODES = {401: "invalid_api_key", 403: "origin_not_allowed", 404: "no_such_path", 405: "method_not_allowed"}


def error_status(error: Exception) -> int:
    return error.status if isinstance(error, (ClientError, ServerError)) else 500


def error_body(error: Exception) -> bytes:
    """The error's JSON. What is not ours to show (an unexpected exception) is not shown."""
    if isinstance(error, (ClientError, ServerError)):
        return make_error_body(error.message, error.error_type, error.param, error.code)
    if isinstance(error, OctavoError):
        return make_error_body(str(error), "internal_server_error")
    return make_error_body(
        "The server met an unexpected fault and did not finish this request; its log has the details.",
        "internal_server_error",
    )


def make_error_body(message: str, error_type: str, param: str | None = None, code: str | None = None) -> bytes:
    error = {"message": message, "type": error_type, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


async def send_error(send: Send, error: Exception, exchange: Exchange) -> None:
    status = error_status(error)
    note_error(error, exchange)
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if status in (429, 503):
        headers = ((b"retry-after", b"1"),)
    if status == 408:
        headers = ((b"connection", b"close"),)  # the rest of the body may still come, and would be read as a request
    if status == 504:
        # OpenAI's clients would send the same once more by themselves, and it would take as long again.
        headers = ((b"x-should-retry", b"false"),)
    await send_bytes(send, status, error_body(error), (*JSON_HEADERS, *headers))


async def send_status_error(
    send: Send, status: int, message: str, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    """For the HTTP layer's own refusals: no such route, wrong method, no key."""
    body = make_error_body(message, _TYPES.get(status, "invalid_request_error"), code=_CODES.get(status))
    await send_bytes(send, status, body, (*JSON_HEADERS, *headers))


def note_error(error: Exception, exchange: Exchange) -> None:
    """Into the log, if it is not the client's fault, and onto the exchange for the access log."""
    code = getattr(error, "code", None) or getattr(error, "error_type", None)
    exchange.error_code = code or "internal_server_error"
    if not isinstance(error, OctavoError):
        logger.error("request %s failed", exchange.request_id, exc_info=error)
    elif isinstance(error, ServerError):
        logger.warning("request %s failed: %s", exchange.request_id, error.message)
