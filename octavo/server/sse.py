"""Server-sent events: the bytes of a stream, and the rules about how one begins and ends.

The head is sent with the first event, so that whatever goes wrong before it still gets a proper status. What goes wrong
later becomes an event with an `error`, which OpenAI's clients raise. `[DONE]` is always last.
"""

from __future__ import annotations

from contextlib import aclosing

from octavo.server.answer import AnswerFormat
from octavo.server.deadline import Deadline
from octavo.server.errors import error_body, note_error
from octavo.server.exchange import Exchange
from octavo.server.generation import Generation
from octavo.server.responses import Headers, Send

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the chunks
)


async def send_stream(
    send: Send,
    generation: Generation,
    format: AnswerFormat,
    *,
    include_usage: bool,
    deadline: Deadline,
    exchange: Exchange,
) -> None:
    """Raises what the generation raises before its first delta; after that, every fault is part of the stream."""
    is_started = False
    try:
        async with deadline, aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                events = format.chunks(delta)
                if not events:
                    continue
                if not is_started:
                    is_started = True
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                await send({"type": "http.response.body", "body": events, "more_body": True})
    except Exception as error:
        if not is_started:
            raise
        note_error(error, exchange)
        last = b"data: %b\n\n" % error_body(error)
    else:
        last = format.usage_chunk(generation.usage) if include_usage else b""
    await send({"type": "http.response.body", "body": last + DONE, "more_body": False})
