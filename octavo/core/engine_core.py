"""The engine's state machine: add, abort, step. No I/O, no clock, no device; standard library only.

plan    = scheduler.schedule(now)
sampled = executor.execute(plan)
outputs = scheduler.update(plan, sampled, now)
"""

from __future__ import annotations

from octavo.core.interfaces import (
    CoreConfig,
    Executor,
    FinishReason,
    Grammar,
    GrammarFactory,
    ModelRunnerOutput,
    SchedulerOutput,
    SequenceOutput,
    StepResult,
    StepStats,
)
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler, describe_grammar_failure
from octavo.core.sequence import Sequence, max_num_tokens
from octavo.core.step_pacer import StepPacer
from octavo.errors import InvalidRequestError, RequestFailedError


class EngineCore:
    """Requests in, tokens out, one step at a time.

    Every request gets exactly one output with `is_final`, be it finished, aborted, failed or refused. All calls come
    from one thread; an abort takes effect at once, before the next step. Errors of the executor end the sequences they
    belong to; any other exception out of `step` is a bug of ours, and the core is not to be used after it.

    grammar_factory: makes the state of each constrained sequence when its request is added; may be set later
    """

    def __init__(self, executor: Executor, config: CoreConfig, grammar_factory: GrammarFactory | None = None) -> None:
        self.config = config
        self.executor = executor
        self.grammar_factory = grammar_factory
        self.scheduler = Scheduler(config)
        self._sequences_of: dict[str, list[Sequence]] = {}  # unfinished requests only
        self._next_seq_id = 0

    def add(self, request: Request, now: float) -> list[SequenceOutput]:
        """Accept a request: []. One that can never run gets its final outputs, with a sentence, at once.

        Raises InvalidRequestError when an unfinished request has the same id.
        """
        if request.request_id in self._sequences_of:
            raise InvalidRequestError(
                f"request_id {request.request_id!r} belongs to a request that is not finished; choose another.",
                param="request_id",
                value=request.request_id,
            )
        refusal = self._find_refusal(request)
        if refusal is not None:
            return _refuse(request, refusal)
        try:
            grammars = self._make_grammars(request)
        except Exception as error:
            return _refuse(request, describe_grammar_failure(error))
        sequences: list[Sequence] = []
        for index in range(request.sampling_params.n):
            sequences.append(
                Sequence(
                    request,
                    index,
                    self._next_seq_id,
                    sequences,
                    max_model_len=self.config.max_model_len,
                    num_kv_groups=len(self.config.kv_group_windows),
                    grammar=grammars[index],
                )
            )
            self._next_seq_id += 1
        self._sequences_of[request.request_id] = sequences
        for sequence in sequences:
            self.scheduler.add(sequence)
        return []

    def abort(self, request_id: str) -> list[SequenceOutput]:
        """End all of a request's unfinished sequences; [] when there is no such request (any more)."""
        outputs: list[SequenceOutput] = []
        for sequence in list(self._sequences_of.get(request_id, ())):
            outputs += self.abort_sequence(request_id, sequence.index)
        return outputs

    def abort_sequence(self, request_id: str, index: int) -> list[SequenceOutput]:
        """End one of n generations (a stop string was found in it); [] when it is over or unknown."""
        sequences = self._sequences_of.get(request_id, ())
        if not 0 <= index < len(sequences) or sequences[index].is_finished:
            return []
        return self._tell([self.scheduler.finish(sequences[index], FinishReason.ABORT)])

    def step(self, now: float) -> StepResult:
        """Compute one step. Does nothing, quickly, when there is nothing to do."""
        plan = self.scheduler.schedule(now)
        sampled = self._execute(plan) if plan.scheduled else ModelRunnerOutput()
        outputs, stats = self.scheduler.update(plan, sampled, now)
        return StepResult(outputs=self._tell(outputs), stats=stats)

    def pace(self, target_s: float) -> None:
        """From now on steps in which sequences decode should take so long; `note_step_time` is to be told of each."""
        self.scheduler.pacer = StepPacer(target_s)

    def note_step_time(self, stats: StepStats) -> None:
        """stats: of the last step, its step_time_s set"""
        if self.scheduler.pacer is not None and stats.num_scheduled_tokens > 0:
            num_prompt_tokens = stats.num_scheduled_tokens - stats.num_decoding
            self.scheduler.pacer.note_step(num_prompt_tokens, stats.num_decoding, stats.step_time_s)

    def has_unfinished(self) -> bool:
        return bool(self._sequences_of)

    def stats(self) -> StepStats:
        """The gauges as they are now, also after aborts; the counters are 0, they belong to steps."""
        return self.scheduler.gauge()

    def reset_prefix_cache(self) -> None:
        """No request added from now on finds a block computed before (the weights or an adapter have changed)."""
        self.scheduler.kv_cache.reset_prefix_cache([*self.scheduler.running, *self.scheduler.waiting])

    def check_invariants(self) -> None:
        """Raises AssertionError, with the numbers, when the books do not add up. Slow; for tests and debugging."""
        unfinished = []
        for request_id, sequences in self._sequences_of.items():
            assert not all(sequence.is_finished for sequence in sequences), f"{request_id} got no final output"
            unfinished += [sequence for sequence in sequences if not sequence.is_finished]
        self.scheduler.check_invariants(unfinished)

    # --- helpers ----------------------------------------------------------------------------------------------

    def _make_grammars(self, request: Request) -> list[Grammar | None]:
        """One a sequence: each is a state of its own."""
        num_sequences = request.sampling_params.n
        if request.grammar is None:
            return [None] * num_sequences
        if self.grammar_factory is None:
            raise RequestFailedError("The request has a grammar, but this engine was given nothing to compile it with.")
        return [self.grammar_factory(request.grammar) for _ in range(num_sequences)]

    def _tell(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        for output in outputs:
            if output.is_final:
                del self._sequences_of[output.request_id]
        return outputs

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        try:
            return self.executor.execute(plan)
        except Exception as error:
            if len(plan.scheduled) == 1:
                return ModelRunnerOutput(failures={plan.scheduled[0].seq_id: _describe(error)})
        return self._execute_one_by_one(plan)

    def _execute_one_by_one(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """One of the step's sequences made it fail, nobody knows which: each gets a step of its own.

        What the failed step has written is written again, with the same values. Copies may have been made or not; their
        sources are still held and unchanged, so they are made (again).
        """
        merged = ModelRunnerOutput()
        for scheduled in plan.scheduled:
            own_blocks = {block_id for table in scheduled.block_tables for block_id in table}
            single = SchedulerOutput(
                scheduled=[scheduled],
                block_copies=[copy for copy in plan.block_copies if copy[1] in own_blocks],
                finished_seq_ids=plan.finished_seq_ids,
                preempted_seq_ids=plan.preempted_seq_ids,
            )
            try:
                output = self.executor.execute(single)
            except Exception as error:
                merged.failures[scheduled.seq_id] = _describe(error)
                continue
            merged.token_ids.update(output.token_ids)
            merged.logprobs.update(output.logprobs)
            merged.prompt_logprobs.update(output.prompt_logprobs)
            merged.failures.update(output.failures)
        return merged

    def _find_refusal(self, request: Request) -> str | None:
        """Why the request could never run to its end, with the numbers and the way out."""
        num_prompt_tokens = len(request.prompt_token_ids)
        max_model_len = self.config.max_model_len
        if num_prompt_tokens == 0:
            return "The prompt has no tokens, but it must have at least one."
        if num_prompt_tokens >= max_model_len:
            return (
                f"The prompt has {num_prompt_tokens} tokens, but max_model_len is {max_model_len}, of which at least "
                f"one is for the answer; shorten the prompt to {max_model_len - 1} tokens or raise --max-model-len."
            )
        # The last token is sampled, but nothing follows it: its keys and values are never needed.
        num_tokens = max_num_tokens(request, max_model_len)
        num_required_blocks = self.scheduler.kv_cache.count_max_blocks(num_tokens - 1)
        if num_required_blocks > self.config.num_blocks:
            return (
                f"Prompt and answer may take {num_tokens} tokens ({num_prompt_tokens} of them the prompt), which need "
                f"{num_required_blocks} KV cache blocks of {self.config.block_size} tokens, but the whole cache has "
                f"{self.config.num_blocks}; lower max_tokens, raise --kv-cache-memory-bytes or lower --max-model-len."
            )
        return None


def _refuse(request: Request, refusal: str) -> list[SequenceOutput]:
    last = request.sampling_params.n - 1
    return [
        SequenceOutput(
            request_id=request.request_id,
            index=index,
            finish_reason=FinishReason.ERROR,
            num_prompt_tokens=len(request.prompt_token_ids),
            is_final=index == last,
            error=refusal,
        )
        for index in range(last + 1)
    ]


def _describe(error: Exception) -> str:
    return f"The engine failed to compute this sequence ({type(error).__name__}: {error})."
