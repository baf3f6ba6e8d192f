"""One request on its way from the step messages to its reader: `RequestStream`. Belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from octavo.core.request import Request
from octavo.engine.outputs import CompletionDelta
from octavo.engine.text_output import RequestText
from octavo.errors import EngineDeadError
from octavo.text.tokenizer import Tokenizer


class RequestStream:
    """Pending deltas are kept one a sequence: what the reader has not taken yet is joined.

    name:          the client's, not unique; request.request_id is
    num_tokens:    generated so far, one entry a sequence
    scheduled_at:  when the first of them was first computed; None before its first token
    first_token_at: 0 before
    last_token_at: one entry a sequence, 0 before its first token
    """

    __slots__ = (
        "_error",
        "_pending",
        "_waiter",
        "first_token_at",
        "last_token_at",
        "name",
        "num_tokens",
        "request",
        "scheduled_at",
        "text",
    )

    def __init__(self, name: str, request: Request, tokenizer: Tokenizer, shown_token_ids: Collection[int] = ()):
        params = request.sampling_params
        self.name = name
        self.request = request
        self.text = RequestText(tokenizer, params, len(request.prompt_token_ids), shown_token_ids)
        self.last_token_at = [0.0] * params.n
        self.num_tokens = [0] * params.n
        self.scheduled_at: float | None = None
        self.first_token_at = 0.0
        self._pending: dict[int, CompletionDelta] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: EngineDeadError | None = None

    def put(self, delta: CompletionDelta) -> None:
        # Taken out and put in again at the end, so that the final delta stays the last.
        waiting = self._pending.pop(delta.index, None)
        self._pending[delta.index] = delta if waiting is None else join_deltas(waiting, delta)
        self._wake()

    def fail(self, error: EngineDeadError) -> None:
        self._error = error
        self._wake()

    async def take(self) -> CompletionDelta:
        """The next delta. Raises EngineDeadError after the last one that came before the engine's death."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        index = next(iter(self._pending))
        return self._pending.pop(index)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def join_deltas(first: CompletionDelta, second: CompletionDelta) -> CompletionDelta:
    """Two neighbours of one sequence as one delta: the second's state, both their additions."""
    second.text = first.text + second.text
    second.token_ids = [*first.token_ids, *second.token_ids]
    second.logprobs = [*first.logprobs, *second.logprobs]
    if second.prompt_logprobs is None:
        second.prompt_logprobs = first.prompt_logprobs
    second.queue_time_s = first.queue_time_s if second.queue_time_s is None else second.queue_time_s
    second.num_cached_tokens = max(first.num_cached_tokens, second.num_cached_tokens)
    return second
