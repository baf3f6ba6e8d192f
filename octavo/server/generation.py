"""One API request at the engine: its prompts as one stream of deltas, its choices numbered, its tokens counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from octavo.core.interfaces import GrammarSpec
from octavo.core.sampling_params import SamplingParams
from octavo.engine.beam_search import BeamSearchParams
from octavo.engine.outputs import CompletionDelta
from octavo.errors import NO_ALLOWED_TOKEN, EngineDeadError, InvalidRequestError, RequestFailedError
from octavo.server.api import ServingEngine


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Generation:
    """Runs the prompts of one request, n choices each. Choice number = prompt number * n + its number of that prompt.

    prompts:            as token ids
    num_generations:    what the engine has to make for the choices: best_of may ask for more
    finish_reasons:     of the choices that have ended, in the order of their ends
    queue_time_s:       how long the first of them waited for its turn; None before its first token
    first_token_time_s: from here to the first token

    A prompt is counted once, however many generations it has; its cached tokens are those of its first generation.
    """

    def __init__(
        self,
        engine: ServingEngine,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
        grammar_param: str = "response_format",
        shown_token_ids: Collection[int] = (),
        best_of: int | None = None,
        beams: BeamSearchParams | None = None,
        is_scoring_only: bool = False,
    ):
        """grammar:         constrains every choice; grammar_param is the field it came from
        shown_token_ids: special tokens whose text is written out although special tokens are skipped
        best_of:         generate so many and keep the params.n likeliest
        beams:           search for the likeliest texts instead of sampling
        is_scoring_only: the choices stay empty; what the engine must generate all the same is left out
        """
        self.request_id = request_id
        self.params = params
        self.prompts = prompts
        self.num_choices = len(prompts) * params.n
        self.num_generations = len(prompts) * max(params.n, best_of or 0)
        self._engine = engine
        self._best_of = best_of
        self._beams = beams
        self._is_scoring_only = is_scoring_only
        self._priority = priority
        self._cache_salt = cache_salt
        self._grammar = grammar
        self._grammar_param = grammar_param
        self._shown_token_ids = shown_token_ids
        self.finish_reasons: list[str] = []
        self.queue_time_s: float | None = None
        self.first_token_time_s: float | None = None
        self._started_at = time.monotonic()
        self._num_generated = 0
        self._cached_tokens = [0] * len(prompts)
        self._open_choices = set(range(self.num_choices))

    def validate(self, field: str) -> None:
        """Raises ClientError before anything has been started, for any of the prompts. field: where they came from."""
        for number, prompt in enumerate(self.prompts):
            param = field if len(self.prompts) == 1 else f"{field}[{number}]"
            self._engine.validate(prompt, self.params, prompt_param=param)

    async def prepare(self) -> None:
        """Compile the grammar, off the event loop, before the answer begins. Raises InvalidRequestError."""
        if self._grammar is not None:
            await self._engine.prepare_grammar(self._grammar, self._grammar_param)

    @property
    def usage(self) -> Usage:
        """Of what has been generated so far."""
        num_prompt_tokens = sum(len(prompt) for prompt in self.prompts)
        return Usage(num_prompt_tokens, self._num_generated, sum(self._cached_tokens))

    async def deltas(self) -> AsyncGenerator[CompletionDelta, None]:
        """Deltas with the request's own choice numbers. Closing the stream aborts what still runs.

        Every choice ends with exactly one delta that has a finish reason, or the stream raises: RequestFailedError,
        EngineDeadError, or what the engine raises.
        """
        streams = [self._open_stream(number) for number in range(len(self.prompts))]
        merged = streams[0] if len(streams) == 1 else _merge(streams)
        async with aclosing(merged) as deltas:
            async for delta in deltas:
                self._num_generated += len(delta.token_ids)
                if self.first_token_time_s is None and delta.token_ids:
                    self.first_token_time_s = time.monotonic() - self._started_at
                    self.queue_time_s = delta.queue_time_s
                if delta.finish_reason is not None:
                    self.finish_reasons.append(delta.finish_reason)
                    _raise_failure(delta)
                    self._open_choices.remove(delta.index)
                yield delta
        if self._open_choices:
            raise RequestFailedError("The engine ended this request before its answer was complete; try again.")

    async def _open_stream(self, prompt_number: int) -> AsyncGenerator[CompletionDelta, None]:
        stream = self._ask_engine(prompt_number)
        if self.params.prompt_logprobs is not None:
            stream = _put_prompt_logprobs_first(stream)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                if self._is_scoring_only:
                    _empty(delta)
                if delta.index == 0:
                    cached = max(self._cached_tokens[prompt_number], delta.num_cached_tokens)
                    self._cached_tokens[prompt_number] = cached
                delta.index += prompt_number * self.params.n
                yield delta

    def _ask_engine(self, prompt_number: int) -> AsyncGenerator[CompletionDelta, None]:
        prompt, engine = self.prompts[prompt_number], self._engine
        only_one = len(self.prompts) == 1
        request_id = self.request_id if only_one else f"{self.request_id}-{prompt_number}"
        options: dict[str, Any] = {
            "request_id": request_id,
            "priority": self._priority,
            "cache_salt": self._cache_salt,
        }
        if self._beams is not None:
            return engine.beam_search(prompt, self._beams, **options)
        options |= {"grammar": self._grammar, "shown_token_ids": self._shown_token_ids}
        if self._best_of is not None and self._best_of > self.params.n:
            return engine.generate_best(prompt, self.params, self._best_of, **options)
        return engine.generate(prompt, self.params, **options)


def _empty(delta: CompletionDelta) -> None:
    """Leave out what was generated; the end stays, as the end of an answer of no tokens."""
    delta.text, delta.token_ids, delta.logprobs = "", [], []
    if delta.finish_reason in ("stop", "length"):
        delta.finish_reason, delta.stop_reason = "length", None


async def _put_prompt_logprobs_first(
    stream: AsyncGenerator[CompletionDelta, None],
) -> AsyncGenerator[CompletionDelta, None]:
    """A slow reader may get another choice's delta before the one that has them; every choice may need them."""
    held: list[CompletionDelta] | None = []
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            if held is None:
                yield delta
                continue
            held.append(delta)
            if delta.prompt_logprobs is not None or delta.error is not None:
                held[0].prompt_logprobs = delta.prompt_logprobs
                if delta is not held[0]:
                    delta.prompt_logprobs = None
                for one in held:
                    yield one
                held = None
    for one in held or ():  # a request that failed was never scored
        yield one


def _raise_failure(delta: CompletionDelta) -> None:
    if delta.finish_reason == "error" and delta.error == NO_ALLOWED_TOKEN:
        raise InvalidRequestError(NO_ALLOWED_TOKEN, param="allowed_token_ids", code="conflicting_constraints")
    if delta.finish_reason == "error":
        raise RequestFailedError(delta.error or "The engine could not finish this request; try again.")
    if delta.finish_reason == "abort":
        raise EngineDeadError(
            delta.error or "This request was aborted before its answer was complete: the server is shutting down.",
            code="aborted",
        )


async def _merge(streams: Sequence[AsyncGenerator[CompletionDelta, None]]) -> AsyncGenerator[CompletionDelta, None]:
    """The deltas of all streams as they come. The first exception ends all."""
    arrived: asyncio.Queue[CompletionDelta | BaseException | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[CompletionDelta, None]) -> None:
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    arrived.put_nowait(delta)
        except Exception as error:
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    tasks = [asyncio.ensure_future(pump(stream)) for stream in streams]
    try:
        num_open = len(streams)
        while num_open:
            item = await arrived.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
