"""May this sequence run now, and how many tokens of it? Admission rules and token caps over the step's plan.

A feature that restricts admission or the size of a chunk adds a rule or a cap here and leaves `schedule()` alone.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.interfaces import CoreConfig
from octavo.core.kv_cache_manager import BlockCopy, KVCacheManager
from octavo.core.sequence import Sequence

# Positions of prompts that a step scores: each needs a row of logits, 0.2 MB with 49,152 tokens, 1 MB with 262,144.
MAX_SCORED_ROWS = 64


class StepPlan:
    """The plan of one step while it is made: who gets how many tokens, what is left of the budget.

    num_tokens_of:       seq_id -> tokens scheduled, in the order of scheduling
    num_running_behind:  running sequences that have not had their turn in this step yet
    copies_of:           seq_id -> the block copies its writes need
    num_prompt_tokens_left: prompt tokens that may be computed yet; None is as many as the budget has
    """

    def __init__(self, budget: int, num_running: int, now: float, max_prompt_tokens: int | None = None) -> None:
        self.now = now
        self.budget_left = budget
        self.num_prompt_tokens_left = max_prompt_tokens
        self.num_running = num_running
        self.num_running_behind = num_running
        self.sequences: dict[int, Sequence] = {}
        self.num_tokens_of: dict[int, int] = {}
        self.copies_of: dict[int, list[BlockCopy]] = {}
        self.preempted: dict[int, Sequence] = {}
        self.num_scored_rows_left = MAX_SCORED_ROWS
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0

    def add(self, sequence: Sequence, num_tokens: int, copies: list[BlockCopy]) -> None:
        self.sequences[sequence.seq_id] = sequence
        self.num_tokens_of[sequence.seq_id] = num_tokens
        self.budget_left -= num_tokens
        if self.num_prompt_tokens_left is not None and not sequence.is_decoding:
            self.num_prompt_tokens_left -= num_tokens
        if sequence.scores_prompt:
            self.num_scored_rows_left -= num_tokens
        if copies:
            self.copies_of[sequence.seq_id] = copies

    def drop(self, sequence: Sequence) -> list[BlockCopy]:
        """Forget a sequence that had its turn already, if it had; returns its copies, which are not to be made."""
        num_tokens = self.num_tokens_of.pop(sequence.seq_id, 0)
        self.budget_left += num_tokens
        if self.num_prompt_tokens_left is not None and not sequence.is_decoding:
            self.num_prompt_tokens_left += num_tokens
        if sequence.scores_prompt:
            self.num_scored_rows_left += num_tokens
        self.sequences.pop(sequence.seq_id, None)
        return self.copies_of.pop(sequence.seq_id, [])


# --- admission rules ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now. lets_others_pass: whoever is behind in the queue may be tried; else it would starve this one."""

    reason: str
    lets_others_pass: bool = False


ALLOWED = None
NO_SEAT = Wait("max_num_seqs sequences are running")
NO_BLOCKS = Wait("not enough KV cache blocks are free")
NO_BUDGET = Wait("the step has too few tokens left")
SIBLING_COMPUTES_PROMPT = Wait("a sibling computes the prompt for both", lets_others_pass=True)
SCORES_ELSEWHERE = Wait("other prompts are being scored in this step", lets_others_pass=True)
PREFIX_IN_FLIGHT = Wait("a running sequence computes the same prefix", lets_others_pass=True)

Rule = Callable[[Sequence, StepPlan], "Wait | None"]


def make_rules(config: CoreConfig, kv_cache: KVCacheManager) -> list[Rule]:
    """In the order in which they are asked: cheap ones first, those that need room last."""

    def needs_seat(sequence: Sequence, plan: StepPlan) -> Wait | None:
        return NO_SEAT if plan.num_running >= config.max_num_seqs else ALLOWED

    def waits_for_prefix(sequence: Sequence, plan: StepPlan) -> Wait | None:
        if not config.enable_prefix_caching or sequence.holds_blocks:
            return ALLOWED
        # While the awaited block is in flight nothing has changed: no need to look up the whole prefix again.
        if sequence.awaited_hash is None or not kv_cache.is_in_flight(sequence.awaited_hash):
            sequence.awaited_hash = kv_cache.find_prefix(sequence).next_hash
        return PREFIX_IN_FLIGHT if kv_cache.is_in_flight(sequence.awaited_hash) else ALLOWED

    def needs_blocks(sequence: Sequence, plan: StepPlan) -> Wait | None:
        return ALLOWED if kv_cache.can_admit(sequence) else NO_BLOCKS

    return [needs_seat, waits_for_sibling, waits_for_scored_rows, waits_for_prefix, needs_blocks]


def waits_for_sibling(sequence: Sequence, plan: StepPlan) -> Wait | None:
    """Of n generations one computes the prompt, whoever is first in the queue; the others fork from it.

    When it is preempted or aborted on the way, the next one in the queue takes over.
    """
    siblings = sequence.siblings
    if len(siblings) > 1 and sequence.needs_prompt and any(sibling.is_computing_prompt for sibling in siblings):
        return SIBLING_COMPUTES_PROMPT
    return ALLOWED


def waits_for_scored_rows(sequence: Sequence, plan: StepPlan) -> Wait | None:
    return SCORES_ELSEWHERE if sequence.scores_prompt and plan.num_scored_rows_left < 1 else ALLOWED


# --- token caps -----------------------------------------------------------------------------------------------

# (sequence, tokens it has left to compute, plan) -> at most so many now; the smallest answer counts.
Cap = Callable[[Sequence, int, StepPlan], int]


def make_caps(config: CoreConfig) -> list[Cap]:
    budget_cap = cap_by_budget if config.enable_chunked_prefill else make_whole_cap(config.max_num_batched_tokens)
    pace_caps = [cap_by_pace] if config.enable_chunked_prefill else []
    return [budget_cap, cap_by_scored_rows, *pace_caps]


def cap_by_pace(sequence: Sequence, num_missing_tokens: int, plan: StepPlan) -> int:
    """While others wait for their next token, prompts are read in chunks that do not keep them waiting long."""
    if plan.num_prompt_tokens_left is None or num_missing_tokens == 1:
        return num_missing_tokens
    return max(plan.num_prompt_tokens_left, 0)


def cap_by_scored_rows(sequence: Sequence, num_missing_tokens: int, plan: StepPlan) -> int:
    """A prompt that is scored is computed in small chunks, also where others are not."""
    return max(plan.num_scored_rows_left, 0) if sequence.scores_prompt else num_missing_tokens


def cap_by_budget(sequence: Sequence, num_missing_tokens: int, plan: StepPlan) -> int:
    """What is left of the budget, but one token for each running sequence behind: a long prompt stops nobody."""
    return min(plan.budget_left, max(1, plan.budget_left - plan.num_running_behind))


def make_whole_cap(max_num_batched_tokens: int) -> Cap:
    def cap_to_all_or_nothing(sequence: Sequence, num_missing_tokens: int, plan: StepPlan) -> int:
        """Without chunked prefill all missing tokens go in one step; only what no step could hold is cut."""
        if num_missing_tokens <= plan.budget_left or num_missing_tokens > max_num_batched_tokens:
            return plan.budget_left
        return 0

    return cap_to_all_or_nothing
