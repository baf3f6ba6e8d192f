"""Reading a stream of events back."""

from __future__ import annotations

import json
from typing import Any

import httpx


def read_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events' JSON; asserts that the stream is well formed and ends with [DONE]."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event[len("data: ") :]) for event in events[:-1]]
