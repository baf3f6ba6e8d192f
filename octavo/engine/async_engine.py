"""`AsyncEngine`: requests in, streams of text out, on an event loop; the computing is done in the engine process.

One message of the engine process carries every sequence's share of a step, and is worked off in one go: no task a
token, no lock. A slow reader of a stream finds what has piled up joined into one delta.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.config import DEFAULT_MODEL, EngineArgs
from octavo.core.interfaces import FinishReason, GrammarSpec, SequenceOutput, StepStats, TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.beam_search import BeamSearch, BeamSearchParams, make_deltas
from octavo.engine.best_of import BestOf, widen_params
from octavo.engine.client import EngineClient, EngineState
from octavo.engine.grammar_door import GrammarDoor
from octavo.engine.loaded import DEFAULT_EXECUTOR, OnProgress
from octavo.engine.messages import AbortRequests, AbortSequence, AddRequest, Ready, Start, Step, pack_engine_args
from octavo.engine.model_files import collect_eos_token_ids, fetch_source, find_chat_template, load_tokenizer
from octavo.engine.outputs import CompletionDelta
from octavo.engine.request_stream import RequestStream
from octavo.engine.run_in_thread import run_in_thread
from octavo.engine.stats import EngineStats
from octavo.engine.validation import RequestLimits, SeedSource, check_prompt, make_request, resolve_params
from octavo.errors import EngineDeadError, OctavoError, RequestFailedError
from octavo.metrics import Metrics, RequestTimes
from octavo.report import StartReport
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from octavo.weights.source import ModelSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What is being served. created: seconds since 1970, when it became ready."""

    model: str
    served_model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    report: StartReport
    created: int


class AsyncEngine:
    """Made by `start`. All methods belong to one event loop.

    info, tokenizer, chat_template (None when the model has none), metrics, stats: to read
    """

    def __init__(self, args: EngineArgs, tokenizer: Tokenizer, client: EngineClient, ready: Ready, metrics_prefix: str):
        """Use `start`."""
        self.metrics = Metrics(ready.served_model_names[0], ready.max_model_len, metrics_prefix)
        self.metrics.push_cache_config(_describe_cache(ready.report))
        self.tokenizer = tokenizer
        self.chat_template: ChatTemplate | None = find_chat_template(tokenizer)
        self.stats = EngineStats()
        self._client = client
        self._seeds = SeedSource(args.seed)
        self._grammar_door = GrammarDoor(tokenizer, client.send)
        self._streams: dict[str, RequestStream] = {}
        self._num_unfinished_sequences = 0
        self._numbers = itertools.count()
        self._is_draining = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._model = args.model or DEFAULT_MODEL
        self._created = int(time.time())
        self._adopt(ready)

    @classmethod
    async def start(
        cls,
        args: EngineArgs,
        on_progress: OnProgress | None = None,
        *,
        source: ModelSource | None = None,
        tokenizer: Tokenizer | None = None,
        executor_name: str = DEFAULT_EXECUTOR,
        restart_delay_s: float = 0.5,
        metrics_prefix: str = "octavo:",
    ) -> AsyncEngine:
        """Fetch the model, then load the tokenizer here while the engine process loads the weights.

        on_progress:       called on the event loop with (what is being done, how much is done, of how much or 0)
        metrics_prefix:    before the names of all metrics
        source, tokenizer, executor_name: stand-ins for what would be loaded; for tests
        Raises ConfigError, ModelLoadError, EngineDeadError; then nothing is left behind.
        """
        loop = asyncio.get_running_loop()
        report_progress = on_progress or _ignore_progress

        def report_from_thread(what: str, num_done: int, num_total: int) -> None:
            loop.call_soon_threadsafe(report_progress, what, num_done, num_total)

        if source is None:
            source = await run_in_thread(partial(fetch_source, args, report_from_thread))
        engine: AsyncEngine | None = None

        def on_step(step: Step) -> None:
            if engine is not None:
                engine._push_step(step)

        def on_death(error: EngineDeadError) -> None:
            if engine is not None:
                engine._fail_all(error)

        def on_restart(ready: Ready) -> None:
            if engine is not None:
                engine._note_restart(ready)

        client = EngineClient(
            on_step,
            on_death,
            on_restart,
            report_progress,
            executor_name=executor_name,
            restart_delay_s=restart_delay_s,
        )
        command = Start(pack_engine_args(args), str(source.path), source.kind, source.name)
        starting = asyncio.ensure_future(client.start(command))
        try:
            if tokenizer is None:
                tokenizer = await run_in_thread(partial(load_tokenizer, source))
            ready = await starting
            engine = cls(args, tokenizer, client, ready, metrics_prefix)
        except BaseException:
            starting.cancel()
            with contextlib.suppress(OctavoError, asyncio.CancelledError):
                await starting
            await client.close()
            raise
        return engine

    # --- requests ---------------------------------------------------------------------------------------------

    def validate(
        self, prompt_token_ids: Iterable[int], params: SamplingParams, *, prompt_param: str = "prompt"
    ) -> None:
        """Raises what `generate` would raise: InvalidRequestError, or EngineDeadError when nothing is accepted now."""
        self._check_accepting()
        token_ids = check_prompt(prompt_token_ids, self._limits, prompt_param)
        resolve_params(len(token_ids), params, self._limits, prompt_param)

    async def prepare_grammar(self, spec: GrammarSpec, param: str = "response_format") -> None:
        """Compile a grammar in a worker thread, so that a bad one is refused before the answer begins.

        param: the API's field that it came from
        Raises InvalidRequestError(code="invalid_grammar"). Quick for a grammar seen before.
        """
        await self._grammar_door.check(spec, param)

    def generate(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
        shown_token_ids: Collection[int] = (),
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Check the request at once, send it when the stream is first read, and stream its deltas; one is final.

        request_id: any name, also one that is in use: it is for `abort` and for logs
        grammar:    constrains the text; `prepare_grammar` says before whether it can be used, else the stream raises it
        shown_token_ids: special tokens whose text is written out although special tokens are skipped
        Closing the stream, or cancelling its reader, aborts the request.
        Raises InvalidRequestError or EngineDeadError here; EngineDeadError from the stream when the engine dies.
        """
        self._check_accepting()
        name = request_id or "request"
        request = make_request(
            f"{name}-{next(self._numbers)}",
            prompt_token_ids,
            params,
            self._limits,
            self._seeds,
            priority=priority,
            cache_salt=cache_salt,
            grammar=grammar,
        )
        return self._stream(RequestStream(name, request, self.tokenizer, shown_token_ids))

    def generate_best(
        self, prompt_token_ids: Iterable[int], params: SamplingParams, best_of: int, **options: Any
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Generate best_of answers and stream the params.n of them that are likeliest a token, each in one delta, best
        first, when all have ended. options, errors: of `generate`
        """
        return self._pick(self.generate(prompt_token_ids, widen_params(params, best_of), **options), BestOf(params))

    def beam_search(
        self,
        prompt_token_ids: Iterable[int],
        params: BeamSearchParams,
        *,
        num_beams: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Stream the best num_beams (all, if None) of params.beam_width beams, each in one delta, when all have ended.

        Every token of every beam is a request of its own, also in the metrics. Errors are those of `generate`.
        """
        self._check_accepting()
        token_ids = check_prompt(prompt_token_ids, self._limits)
        whole = SamplingParams(max_tokens=params.max_tokens, stop_token_ids=params.stop_token_ids)
        resolve_params(len(token_ids), whole, self._limits)
        options = {"priority": priority, "cache_salt": cache_salt, "request_id": request_id}
        return self._search(token_ids, params, num_beams or params.beam_width, options)

    def count_queued(self, num_more: int) -> int:
        """How many generations would wait for their turn, if so many more came now.

        What the engine process last told, or what is beyond max_num_seqs: requests that it has not seen yet count too.
        """
        num_beyond = self._num_unfinished_sequences + num_more - self.info.report.max_num_seqs
        return max(self.stats.num_waiting, num_beyond, 0)

    async def abort(self, request_id: str) -> bool:
        """End the requests of that name: their streams end with finish_reason "abort". False when there is none."""
        found = [stream for stream in self._streams.values() if stream.name == request_id]
        for stream in found:
            self._abort(stream)
        return bool(found)

    # --- the engine as a whole --------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self._client.state is EngineState.RUNNING

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._streams)

    @property
    def engine_pid(self) -> int | None:
        return self._client.pid

    async def check_health(self, timeout_s: float) -> None:
        """A round trip through the engine loop. Raises EngineDeadError, with the root cause."""
        await self._client.ping(timeout_s)

    async def wait_until_running(self, timeout_s: float) -> None:
        """Wait out a restart of the engine process. Raises EngineDeadError when it does not come back."""
        await self._client.wait_until_running(timeout_s)

    async def reset_prefix_cache(self, timeout_s: float = 60.0) -> None:
        await self._client.reset_prefix_cache(timeout_s)

    async def drain(self, timeout_s: float) -> bool:
        """Accept nothing more and wait for the running requests. False when some are left after timeout_s."""
        self._is_draining = True
        try:
            await asyncio.wait_for(self._is_empty.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def shutdown(self) -> None:
        """End now: what still runs gets EngineDeadError. No process is left."""
        self._is_draining = True
        self._fail_all(EngineDeadError("The server is shutting down.", code="shutting_down"))
        await self._client.close()

    # --- several requests, or several answers, as one stream --------------------------------------------------

    async def _pick(
        self, stream: AsyncGenerator[CompletionDelta, None], best_of: BestOf
    ) -> AsyncGenerator[CompletionDelta, None]:
        async with contextlib.aclosing(stream):
            async for delta in stream:
                best_of.push(delta)
        for delta in best_of.pick():
            yield delta

    async def _search(
        self, token_ids: tuple[int, ...], params: BeamSearchParams, num_beams: int, options: dict[str, Any]
    ) -> AsyncGenerator[CompletionDelta, None]:
        search = BeamSearch(params, self._limits.eos_token_ids)
        while not search.is_finished:
            prompts = [(*token_ids, *beam.token_ids) for beam in search.live]
            search.push(await self._ask_for_one_token(prompts, params.step_params, options))
        for delta in make_deltas(search.best(num_beams), self.tokenizer, params, len(token_ids)):
            yield delta

    async def _ask_for_one_token(
        self, prompts: list[tuple[int, ...]], params: SamplingParams, options: dict[str, Any]
    ) -> list[TokenLogprobs]:
        """Raises RequestFailedError when one of them failed or was aborted; then the others are aborted."""

        async def ask(prompt: tuple[int, ...]) -> TokenLogprobs:
            async with contextlib.aclosing(self.generate(prompt, params, **options)) as stream:
                async for delta in stream:
                    if delta.logprobs:
                        return delta.logprobs[0]
            raise RequestFailedError(delta.error or f"A beam ended with {delta.finish_reason!r}.")

        asking = [asyncio.ensure_future(ask(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*asking)
        finally:
            for task in asking:
                task.cancel()

    # --- streams ----------------------------------------------------------------------------------------------

    async def _stream(self, stream: RequestStream) -> AsyncGenerator[CompletionDelta, None]:
        grammar = stream.request.grammar
        if grammar is not None:
            await self._grammar_door.check(grammar, "grammar")
        self._check_accepting()
        if grammar is not None:
            self._grammar_door.send_vocabulary()
        self._client.send(AddRequest(stream.request))
        self._streams[stream.request.request_id] = stream
        self._num_unfinished_sequences += stream.request.sampling_params.n
        self._is_empty.clear()
        try:
            while True:
                delta = await stream.take()
                yield delta
                if delta.is_final:
                    return
        finally:
            # The reader left early: closed, cancelled, or it raised.
            if stream.request.request_id in self._streams:
                self._abort(stream)

    def _push_step(self, step: Step) -> None:
        now = time.monotonic()
        for output in step.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # aborted, or ended by a stop string: the core's last word about it
            try:
                self._push_output(stream, output, now)
            except Exception as error:
                # Our own bug in one request's text must not take the others with it.
                logger.exception("Request %s failed in the API process.", output.request_id)
                self._abort(stream, FinishReason.ERROR, f"The text could not be made: {type(error).__name__}: {error}")
        self._push_stats(step.stats)

    def _push_output(self, stream: RequestStream, output: SequenceOutput, now: float) -> None:
        delta = stream.text.push(output)
        if delta is None:
            return
        if delta.token_ids:
            self._count_tokens(stream, delta, output.first_scheduled_at, now)
        if delta.finish_reason is not None:
            self.metrics.push_finished_sequence(delta.finish_reason)
            if output.finish_reason is None and self._client.state is EngineState.RUNNING:
                self._client.send(AbortSequence(output.request_id, output.index))
            if delta.is_final:
                self._forget(stream, now)
        stream.put(delta)

    def _count_tokens(
        self, stream: RequestStream, delta: CompletionDelta, scheduled_at: float | None, now: float
    ) -> None:
        num_tokens = len(delta.token_ids)
        last_token_at = stream.last_token_at[delta.index]
        if last_token_at:
            self.metrics.push_token_gap(now - last_token_at)
        if not stream.first_token_at:
            stream.first_token_at = now
            stream.scheduled_at = scheduled_at
            if scheduled_at is not None:
                delta.queue_time_s = max(scheduled_at - stream.request.arrival_time, 0.0)
            self.metrics.push_first_token(len(stream.request.prompt_token_ids), now - stream.request.arrival_time)
        stream.last_token_at[delta.index] = now
        stream.num_tokens[delta.index] += num_tokens
        self.metrics.push_tokens(num_tokens)

    def _abort(
        self, stream: RequestStream, reason: FinishReason = FinishReason.ABORT, error: str | None = None
    ) -> None:
        """The stream ends here and now; the engine frees the blocks before its next step."""
        for delta in stream.text.end_all(reason, error):
            self.metrics.push_finished_sequence(reason.value)
            stream.put(delta)
        self._forget(stream, time.monotonic())
        if self._client.state is EngineState.RUNNING:
            self._client.send(AbortRequests((stream.request.request_id,)))

    def _fail_all(self, error: EngineDeadError) -> None:
        now = time.monotonic()
        for stream in list(self._streams.values()):
            for _ in stream.text.end_all(FinishReason.ERROR):
                self.metrics.push_finished_sequence(FinishReason.ERROR.value)
            self._forget(stream, now)
            stream.fail(error)
        # Nothing runs and nothing is cached any more; the blocks come back with the next incarnation.
        self._push_stats(StepStats())

    def _forget(self, stream: RequestStream, now: float) -> None:
        del self._streams[stream.request.request_id]
        request = stream.request
        self._num_unfinished_sequences -= request.sampling_params.n
        times = RequestTimes(
            arrived_at=request.arrival_time,
            scheduled_at=stream.scheduled_at,
            first_token_at=stream.first_token_at or None,
            last_token_at=max(stream.last_token_at) or None,
            ended_at=now,
        )
        self.metrics.push_finished_request(
            len(request.prompt_token_ids), stream.num_tokens, request.sampling_params, times
        )
        if not self._streams:
            self._is_empty.set()

    # --- state ------------------------------------------------------------------------------------------------

    def _check_accepting(self) -> None:
        self._client.check_running()
        if self._is_draining:
            raise EngineDeadError(
                "The server is shutting down and takes no new requests; try again when it is back.",
                code="shutting_down",
            )

    def _note_restart(self, ready: Ready) -> None:
        self.stats.num_restarts_total += 1
        self.metrics.push_restart()
        self._adopt(ready)

    def _adopt(self, ready: Ready) -> None:
        """A new incarnation's word goes: with less memory free than before, its window may be shorter."""
        eos_token_ids = collect_eos_token_ids(self.tokenizer, ready.eos_token_ids)
        self.info = EngineInfo(
            model=self._model,
            served_model_names=ready.served_model_names,
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            eos_token_ids=eos_token_ids,
            report=ready.report,
            created=self._created,
        )
        self._limits = RequestLimits(
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_ids=eos_token_ids,
            encode_plain=self.tokenizer.encode_plain,
        )
        self._grammar_door.note_engine(ready.vocab_size, eos_token_ids)
        self._push_stats(ready.stats)

    def _push_stats(self, stats: StepStats) -> None:
        self.stats.push(stats)
        self.metrics.push_step(stats)


def _ignore_progress(what: str, num_done: int, num_total: int) -> None:
    pass


def _describe_cache(report: StartReport) -> dict[str, str]:
    """vLLM's words for what both have."""
    return {
        "block_size": str(report.block_size),
        "cache_dtype": report.kv_cache_dtype,
        "num_cpu_blocks" if report.device == "cpu" else "num_gpu_blocks": str(report.num_blocks),
    }
