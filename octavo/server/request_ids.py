"""Request ids: the client's own if it is a sane one, else a new one; and the way they get into every log line."""

from __future__ import annotations

import logging
import re
import uuid
from contextvars import ContextVar

MAX_REQUEST_ID_CHARS = 128
# What needs no quoting in a log, a shell or a URL.
_SANE = re.compile(rf"[A-Za-z0-9._:@/+=-]{{1,{MAX_REQUEST_ID_CHARS}}}")

# Of the request that the running task works for; "" outside of one.
current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")


def choose_request_id(sent: bytes | None) -> str:
    """sent: the header X-Request-Id. What is not sane is replaced: the client sees by the answer's header."""
    if sent is not None and is_sane(text := sent.decode("latin-1")):
        return text
    return make_request_id()


def is_sane(request_id: str) -> bool:
    return _SANE.fullmatch(request_id) is not None


def make_request_id() -> str:
    return uuid.uuid4().hex


class RequestIdFilter(logging.Filter):
    """For a handler: `%(request)s` in its format is " [id]", or "" when there is no request or the line names it."""

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = current_request_id.get()
        is_told = not request_id or request_id in record.getMessage()
        record.request = "" if is_told else f" [{request_id}]"
        return True
