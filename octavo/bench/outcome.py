"""What one request came to: when its tokens came, how many, or by what name it failed. Read after the run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from octavo.bench.http_client import Exchange, read_answer
from octavo.bench.workload import PlannedRequest

_MAX_MESSAGE = 100
_DONE = b"[DONE]"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """token_times:       when each event that carries tokens came
    num_output_tokens: from `usage`, or where there is none, the number of such events
    failure:           a short name, the same for alike failures; None when all went well
    """

    request: PlannedRequest
    sent_at: float
    ended_at: float
    token_times: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    has_usage: bool = False
    failure: str | None = None

    @property
    def is_exact(self) -> bool:
        """As many tokens as were asked for, by the server's own count."""
        return self.failure is None and self.has_usage and self.num_output_tokens == self.request.max_tokens

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.sent_at

    @property
    def end_to_end_s(self) -> float:
        return self.ended_at - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def time_per_output_token_s(self) -> float | None:
        if self.num_output_tokens < 2 or len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.num_output_tokens - 1)


def read_outcome(request: PlannedRequest, exchange: Exchange) -> Outcome:
    outcome = Outcome(request=request, sent_at=exchange.sent_at, ended_at=exchange.ended_at)
    answer = read_answer(exchange)
    if answer.status is None:
        outcome.failure = exchange.fault or "closed without an answer"
    elif answer.status != 200:
        outcome.failure = f"HTTP {answer.status}: {_read_message(answer.body)}"
    elif not answer.events:
        outcome.failure = exchange.fault or ("no events in the answer" if answer.is_whole else "closed early")
    else:
        _read_events(outcome, answer.events)
        if outcome.failure is None:
            outcome.failure = exchange.fault or _judge(outcome, answer.events[-1][1] == _DONE or answer.is_whole)
    return outcome


def _read_events(outcome: Outcome, events: tuple[tuple[float, bytes], ...]) -> None:
    for time_s, data in events:
        if data == _DONE:
            continue
        try:
            event = json.loads(data)
        except ValueError:
            outcome.failure = outcome.failure or "an event is not JSON"
            continue
        if event.get("error"):
            outcome.failure = outcome.failure or f"error event: {_shorten(event['error'])}"
        if event.get("usage"):
            _read_usage(outcome, event["usage"])
        if any(_has_token(choice) for choice in event.get("choices") or ()):
            outcome.token_times.append(time_s)
    if not outcome.has_usage:
        outcome.num_output_tokens = len(outcome.token_times)


def _read_usage(outcome: Outcome, usage: dict[str, Any]) -> None:
    """Some servers send it with every event; the last one counts."""
    outcome.has_usage = True
    outcome.num_output_tokens = int(usage.get("completion_tokens") or 0)
    outcome.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    outcome.num_cached_tokens = cached if cached is None else int(cached)


def _has_token(choice: dict[str, Any]) -> bool:
    """An event may carry a token that makes no text yet (half a character); not one that only opens or closes."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    text = delta.get("content") or delta.get("reasoning_content")
    return bool(text) or (delta.get("role") is None and choice.get("finish_reason") is None)


def _judge(outcome: Outcome, is_whole: bool) -> str | None:
    if not is_whole:
        return "closed early"
    return None if outcome.token_times else "no tokens"


def _read_message(body: bytes) -> str:
    try:
        return _shorten(json.loads(body).get("error", body.decode("utf-8", "replace")))
    except (ValueError, AttributeError):
        return _shorten(body.decode("utf-8", "replace"))


def _shorten(error: Any) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    text = " ".join(str(message).split())
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 1] + "…"
