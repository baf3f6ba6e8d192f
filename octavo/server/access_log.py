"""One line a request, as `name=value` pairs: who, what, how it ended, how many tokens, where the time went.

    id=42 method=POST path=/v1/chat/completions status=200 key=key-1 model=smollm2 stream=true prompt_tokens=31 ...

Values with anything but plain characters are JSON strings, so a line is one line whatever a client sends.
"""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING

from octavo.server.responses import Scope

if TYPE_CHECKING:
    from octavo.server.exchange import Exchange

logger = logging.getLogger("octavo.access")

_PLAIN = re.compile(r"[A-Za-z0-9._:@/+,{}\[\]-]+")
_MAX_VALUE_CHARS = 200


class AccessLog:
    def write(self, exchange: Exchange, scope: Scope, seconds: float) -> None:
        logger.info("%s", format_line(exchange, scope, seconds))


def format_line(exchange: Exchange, scope: Scope, seconds: float) -> str:
    """The pairs in a fixed order; what a request does not have is left out. seconds: from its head to its last byte."""
    client = scope.get("client")
    pairs: dict[str, object] = {
        "id": exchange.request_id,
        "client": client[0] if client else None,
        "method": scope["method"],
        "path": scope["path"],
        "status": exchange.status,
        "key": exchange.key_label or None,
        "model": exchange.model or None,
        "stream": exchange.is_streamed or None,
        "error": exchange.error_code or None,
        "client_left": exchange.has_client_left or None,
    }
    generation = exchange.generation
    if generation is not None:
        usage = generation.usage
        pairs["prompt_tokens"] = usage.prompt_tokens
        pairs["cached_tokens"] = usage.cached_tokens
        pairs["completion_tokens"] = usage.completion_tokens
        pairs["finish_reasons"] = ",".join(generation.finish_reasons) or None
        pairs["queue_s"] = _round(generation.queue_time_s)
        pairs["first_token_s"] = _round(generation.first_token_time_s)
    pairs["total_s"] = _round(seconds)
    for name, text in exchange.labels.items():
        pairs[name] = text
    return " ".join(f"{name}={_write(value)}" for name, value in pairs.items() if value is not None)


def _round(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.4f}"


def _write(value: object) -> str:
    if value is True:
        return "true"
    text = str(value)
    if len(text) > _MAX_VALUE_CHARS:
        text = text[: _MAX_VALUE_CHARS - 3] + "..."
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
