"""Who runs in this step and how far, and what its results change. Standard library only.

There are no phases: a sequence has `num_tokens`, of which `num_computed_tokens` are computed, and a step spends its
budget on closing gaps. Prefill, chunks of it, decoding, prefix hits and resumption after preemption are that one case.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from octavo.core.admission import ALLOWED, NO_BLOCKS, NO_BUDGET, NO_SEAT, StepPlan, Wait, make_caps, make_rules
from octavo.core.interfaces import (
    CoreConfig,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
    SequenceOutput,
    StepStats,
    TokenLogprobs,
)
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.policy import get_policy
from octavo.core.sequence import Sequence, SequenceStatus
from octavo.core.step_pacer import StepPacer
from octavo.errors import OctavoError


class Scheduler:
    """`waiting` and `running`, both in the order of the policy; every unfinished sequence is in exactly one of them.

    Each `schedule` is followed by one `update` with its results; sequences are added and finished between the two calls
    of different steps only.

    pacer: keeps steps short in which sequences decode; None leaves them as long as the budget is
    """

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.pacer: StepPacer | None = None
        self.policy = get_policy(config.policy)
        self.kv_cache = KVCacheManager(config)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._rules = make_rules(config, self.kv_cache)
        self._caps = make_caps(config)
        self._plan = StepPlan(0, 0, 0.0)
        self._finished_seq_ids: list[int] = []

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=self.policy.order_key)

    # --- the plan ---------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        max_tokens = self.config.max_num_batched_tokens
        self._plan = plan = StepPlan(max_tokens, len(self.running), now, self._limit_prompt_tokens())
        self._schedule_running(plan)
        # Whoever was preempted just now would come back at once, and again.
        if not plan.preempted:
            self._schedule_waiting(plan)
        return self._take_output(plan)

    def _limit_prompt_tokens(self) -> int | None:
        if self.pacer is None:
            return None
        num_decoding = sum(sequence.is_decoding for sequence in self.running)
        num_prompts = len(self.running) - num_decoding + len(self.waiting)
        return self.pacer.limit_prompt_tokens(num_decoding, num_prompts) if num_decoding and num_prompts else None

    def _schedule_running(self, plan: StepPlan) -> None:
        running = self.running
        position = 0
        while position < len(running) and plan.budget_left > 0:
            sequence = running[position]
            plan.num_running_behind = len(running) - position - 1
            num_tokens = self._cap(sequence, len(sequence.token_ids) - sequence.num_computed_tokens, plan)
            if num_tokens > 0:
                self._allocate(sequence, num_tokens, plan)
            position += 1

    def _schedule_waiting(self, plan: StepPlan) -> None:
        plan.num_running_behind = 0
        position = 0
        # Whoever lets others pass stays at its position, so `position` counts them. Once they are as many as there are
        # seats, nobody behind could keep one for long, and a thousand prompts alike cost no more than these.
        while position < min(len(self.waiting), self.config.max_num_seqs) and plan.budget_left > 0:
            sequence = self.waiting[position]
            if sequence.seq_id in plan.preempted:
                break
            verdict = self._admit(sequence, plan)
            if verdict is ALLOWED:
                continue  # the next one has moved to this position
            if verdict.lets_others_pass:
                position += 1
            elif not self._make_room_for_waiting(sequence, verdict, plan):
                break

    def _admit(self, sequence: Sequence, plan: StepPlan) -> Wait | None:
        for rule in self._rules:
            verdict = rule(sequence, plan)
            if verdict is not ALLOWED:
                return verdict
        num_computed_tokens = sequence.num_computed_tokens
        if not sequence.holds_blocks:
            num_computed_tokens = self.kv_cache.find_prefix(sequence).num_computed_tokens
        num_tokens = self._cap(sequence, len(sequence.token_ids) - num_computed_tokens, plan)
        if num_tokens < 1:
            return NO_BUDGET

        self._remove(self.waiting, sequence)
        hit = self.kv_cache.admit(sequence)
        if sequence.num_cached_tokens is None:
            num_hit_tokens = min(hit.num_tokens, sequence.num_prompt_tokens) if hit is not None else 0
            sequence.num_cached_tokens = num_hit_tokens
            if self.kv_cache.has_prefix_caching:
                plan.num_prefix_query_tokens += sequence.num_prompt_tokens
                plan.num_prefix_hit_tokens += num_hit_tokens
        if sequence.first_scheduled_at is None:
            sequence.first_scheduled_at = plan.now
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=self.policy.order_key)
        plan.num_running += 1
        self._allocate(sequence, num_tokens, plan)
        return ALLOWED

    def _cap(self, sequence: Sequence, num_missing_tokens: int, plan: StepPlan) -> int:
        num_tokens = num_missing_tokens
        for cap in self._caps:
            num_tokens = min(num_tokens, cap(sequence, num_missing_tokens, plan))
        return num_tokens

    def _allocate(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> None:
        """Schedule a running sequence, preempting others as needed; it may turn out to be the one preempted."""
        while (copies := self.kv_cache.allocate(sequence, num_tokens)) is None:
            if self.kv_cache.free_newest_fork():
                continue
            victim = self.policy.find_victim(self.running, sequence)
            # `EngineCore.add` refuses what does not fit alone.
            assert victim is not None, sequence
            assert len(self.running) > 1, f"{sequence} does not fit into an empty pool"
            self._preempt(victim, plan)
            if victim is sequence:
                return
        plan.add(sequence, num_tokens, list(copies))

    def _make_room_for_waiting(self, sequence: Sequence, verdict: Wait, plan: StepPlan) -> bool:
        """Whether it is worth asking the rules again."""
        if verdict is not NO_SEAT and verdict is not NO_BLOCKS:
            return False
        victim = self.policy.find_victim(self.running, sequence)
        is_last_resort = victim is not None or not self.running
        if verdict is NO_BLOCKS and is_last_resort and self.kv_cache.free_newest_fork():
            return True
        if victim is None:
            return False
        self._preempt(victim, plan)
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """Back to the queue, whole, at its old place. It may have had its turn in this step already."""
        self.kv_cache.free_copy_sources(plan.drop(victim))
        self.kv_cache.free(victim)
        self._remove(self.running, victim)
        victim.status = SequenceStatus.PREEMPTED
        insort(self.waiting, victim, key=self.policy.order_key)
        plan.num_running -= 1
        plan.preempted[victim.seq_id] = victim

    def _take_output(self, plan: StepPlan) -> SchedulerOutput:
        num_tokens_of = plan.num_tokens_of
        output = SchedulerOutput(
            scheduled=[sequence.share_of_step(num_tokens_of[seq_id]) for seq_id, sequence in plan.sequences.items()],
            block_copies=[copy for copies in plan.copies_of.values() for copy in copies],
            preempted_seq_ids=list(plan.preempted),
        )
        # An empty step is not executed, so the next one that is brings the news.
        if output.scheduled:
            output.finished_seq_ids, self._finished_seq_ids = self._finished_seq_ids, []
        return output

    # --- the results ------------------------------------------------------------------------------------------

    def update(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, now: float
    ) -> tuple[list[SequenceOutput], StepStats]:
        """Take in what the executor did with the last plan; returns what to tell, and the step's counters."""
        stats = StepStats()
        outputs: list[SequenceOutput] = []
        for scheduled in plan.scheduled:
            sequence = self._plan.sequences[scheduled.seq_id]
            stats.num_scheduled_tokens += scheduled.num_scheduled_tokens
            stats.num_decoding += sequence.is_decoding
            failure = _find_failure(scheduled.seq_id, scheduled.is_sampling, output)
            if failure is not None:
                outputs.append(self._fail(sequence, failure))
                continue
            num_prompt_tokens_left = sequence.num_prompt_tokens - sequence.num_computed_tokens
            stats.num_prompt_tokens += min(max(num_prompt_tokens_left, 0), scheduled.num_scheduled_tokens)
            scores = output.prompt_logprobs.get(scheduled.seq_id)
            if scores:
                outputs.append(self._tell_scores(sequence, scores))
            self._advance(sequence, scheduled.num_scheduled_tokens)
            if scheduled.is_sampling:
                stats.num_generated_tokens += 1
                token_id = output.token_ids[scheduled.seq_id]
                outputs.append(self._append(sequence, token_id, output.logprobs.get(scheduled.seq_id)))
        self.kv_cache.free_copy_sources(plan.block_copies)
        stats.num_preemptions = len(self._plan.preempted)
        stats.num_prefix_query_tokens = self._plan.num_prefix_query_tokens
        stats.num_prefix_hit_tokens = self._plan.num_prefix_hit_tokens
        self.gauge(stats)
        return outputs, stats

    def _advance(self, sequence: Sequence, num_tokens: int) -> None:
        had_prompt = sequence.num_computed_tokens >= sequence.num_prompt_tokens
        num_computed_tokens = sequence.num_computed_tokens + num_tokens
        sequence.num_computed_tokens = num_computed_tokens
        if num_computed_tokens > sequence.num_written_tokens:
            sequence.num_written_tokens = num_computed_tokens
        self.kv_cache.publish(sequence)
        if not had_prompt and num_computed_tokens >= sequence.num_prompt_tokens and len(sequence.siblings) > 1:
            for sibling in sequence.siblings:
                if sibling.needs_prompt:
                    self.kv_cache.fork(sequence, sibling)
                    if sibling.num_cached_tokens is None:
                        sibling.num_cached_tokens = sequence.num_cached_tokens
        self.kv_cache.free_outside_windows(sequence)

    def _tell_scores(self, sequence: Sequence, scores: list[TokenLogprobs]) -> SequenceOutput:
        assert sequence.prompt_scores is not None
        sequence.prompt_scores.num_told += len(scores)
        told = self._tell(sequence)
        told.new_prompt_logprobs = scores
        return told

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> SequenceOutput:
        if sequence.grammar is not None:
            try:
                sequence.grammar.accept(token_id)
            except Exception as error:
                return self._fail(sequence, describe_grammar_failure(error))
        finish_reason, stop_reason = sequence.append_token(token_id)
        if finish_reason is not None:
            told = self.finish(sequence, finish_reason)
            told.stop_reason = stop_reason
            is_complete = sequence.grammar is not None and finish_reason is FinishReason.STOP and stop_reason is None
            told.ends_in_text = is_complete and token_id not in sequence.request.eos_token_ids
        else:
            told = self._tell(sequence)
        told.new_token_ids.append(token_id)
        if logprobs is not None:
            told.new_logprobs.append(logprobs)
        return told

    def finish(self, sequence: Sequence, reason: FinishReason) -> SequenceOutput:
        """End an unfinished sequence and give back what it holds."""
        self._leave(sequence, reason)
        self.kv_cache.free(sequence)
        return self._tell(sequence)

    def _fail(self, sequence: Sequence, failure: str) -> SequenceOutput:
        self._leave(sequence, FinishReason.ERROR)
        self.kv_cache.discard(sequence)
        told = self._tell(sequence)
        told.error = failure
        return told

    def _leave(self, sequence: Sequence, reason: FinishReason) -> None:
        self._remove(self.running if sequence.status is SequenceStatus.RUNNING else self.waiting, sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        self._finished_seq_ids.append(sequence.seq_id)

    def _tell(self, sequence: Sequence) -> SequenceOutput:
        return SequenceOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            finish_reason=sequence.finish_reason,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            first_scheduled_at=sequence.first_scheduled_at,
            is_final=sequence.finish_reason is not None and all(other.is_finished for other in sequence.siblings),
        )

    # --- the rest ---------------------------------------------------------------------------------------------

    def gauge(self, stats: StepStats | None = None) -> StepStats:
        """Set the gauges to what holds now."""
        stats = StepStats() if stats is None else stats
        pool = self.kv_cache.pool
        stats.num_running = len(self.running)
        stats.num_waiting = len(self.waiting)
        stats.num_blocks = pool.num_blocks
        stats.num_cached_blocks = pool.num_cached_blocks
        stats.num_free_blocks = pool.num_available_blocks - pool.num_cached_blocks
        stats.num_used_blocks = pool.num_blocks - pool.num_available_blocks
        return stats

    def _remove(self, queue: list[Sequence], sequence: Sequence) -> None:
        order_key = self.policy.order_key
        position = bisect_left(queue, order_key(sequence), key=order_key)
        assert queue[position] is sequence, (sequence, queue[position])
        del queue[position]

    def check_invariants(self, unfinished: Iterable[Sequence]) -> None:
        """Between steps; O(everything), for tests and debugging."""
        by_id = {sequence.seq_id: sequence for sequence in unfinished}
        for queue, statuses in (
            (self.running, {SequenceStatus.RUNNING}),
            (self.waiting, {SequenceStatus.WAITING, SequenceStatus.PREEMPTED}),
        ):
            keys = [self.policy.order_key(sequence) for sequence in queue]
            assert keys == sorted(set(keys)), keys
            for sequence in queue:
                assert sequence.status in statuses, sequence
                assert by_id.pop(sequence.seq_id) is sequence, sequence
                is_fork = sequence.seq_id in self.kv_cache.forks
                assert sequence.holds_blocks == (sequence.status is SequenceStatus.RUNNING or is_fork), sequence
                assert sequence.num_computed_tokens < sequence.num_tokens, sequence
        assert not by_id, f"in no queue: {by_id}"
        assert len(self.running) <= self.config.max_num_seqs, self.running
        self.kv_cache.check_invariants(self.running, self.waiting)


def describe_grammar_failure(error: Exception) -> str:
    if isinstance(error, OctavoError):
        return str(error)
    return f"The grammar of this sequence failed ({type(error).__name__}: {error})."


def _find_failure(seq_id: int, is_sampling: bool, output: ModelRunnerOutput) -> str | None:
    failure = output.failures.get(seq_id)
    if failure is None and is_sampling and seq_id not in output.token_ids:
        return "The executor returned no token for this sequence."
    return failure
