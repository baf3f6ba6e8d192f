"""One generation: its tokens, how far it is computed, where its keys and values are. Standard library only."""

from __future__ import annotations

import enum

from octavo.core.interfaces import FinishReason, Grammar, ScheduledSequence
from octavo.core.request import Request

_SEED_MASK = 2**64 - 1
# The golden ratio times 2^64, an odd number: multiples of it differ in all their bits (Knuth, volume 3, 6.4).
_SEED_STRIDE = 0x9E3779B97F4A7C15


class SequenceStatus(enum.Enum):
    WAITING = "waiting"  # not admitted yet; may hold its sibling's prompt blocks (a fork)
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, holds no tokens' keys and values; all is computed anew
    FINISHED = "finished"


class PromptScores:
    """num_told: positions of the prompt whose next token's log-probabilities have been told."""

    __slots__ = ("num_told",)

    def __init__(self) -> None:
        self.num_told = 0


class Sequence:
    """All about one generation. Compared by identity; changed by the scheduler and the KV cache manager only.

        token_ids      | prompt                | generated      |
        blocks         | 0     | 1     | 2     | 3     | 4 |
        computed       |<-- num_computed_tokens -->|            the gap to num_tokens is what is left to compute
        written        |<-- num_written_tokens ------>|         >= computed; more only right after a full prefix hit
                                                                or a fork, whose last token is computed again

    seq_id:              rises with arrival, unique for the life of the core; siblings are neighbours
    siblings:            all sequences of the request in order of index, itself included; one shared list
    block_tables:        one list of block ids a KV cache group, all of one length; -1 where a window let a block go
    num_let_go_blocks:   for each group, how many leading entries of the table are -1
    block_hashes:        chained hashes of the leading full blocks, as far as anyone has asked; never hashed again
    num_published_blocks: leading blocks that were offered to the prefix cache (or came from it)
    num_in_flight_blocks: end of the range of blocks announced as being computed right now
    awaited_hash:        the block hash for which it waits while another sequence computes it
    first_scheduled_at:  when its first tokens were computed, in the time of `EngineCore.step`; None before
    num_cached_tokens:   prompt tokens found in the prefix cache at the first admission; None before it
    grammar:             what may come next, kept through preemptions; None without a constraint
    prompt_scores:       how far the prompt is scored, shared by the siblings; None when that is not asked for
    max_num_tokens:      prompt and generation together end here (max_tokens or the model's window)
    """

    __slots__ = (
        "_end_token_ids",
        "_ignored_token_ids",
        "_min_num_tokens",
        "awaited_hash",
        "block_hashes",
        "block_tables",
        "finish_reason",
        "first_scheduled_at",
        "grammar",
        "index",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_blocks",
        "num_let_go_blocks",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_written_tokens",
        "prompt_scores",
        "request",
        "scheduled",
        "seq_id",
        "siblings",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        seq_id: int,
        siblings: list[Sequence],
        *,
        max_model_len: int,
        num_kv_groups: int,
        grammar: Grammar | None = None,
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.index = index
        self.seq_id = seq_id
        self.siblings = siblings
        self.grammar = grammar
        self.prompt_scores: PromptScores | None = None
        if params.prompt_logprobs is not None:
            self.prompt_scores = siblings[0].prompt_scores if siblings else PromptScores()
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_written_tokens = 0
        self.block_tables: list[list[int]] = [[] for _ in range(num_kv_groups)]
        self.num_let_go_blocks = [0] * num_kv_groups
        self.block_hashes: list[bytes] = []
        self.num_published_blocks = 0
        self.num_in_flight_blocks = 0
        self.awaited_hash: bytes | None = None
        self.num_cached_tokens: int | None = None
        self.first_scheduled_at: float | None = None
        self.max_num_tokens = max_num_tokens(request, max_model_len)
        self._min_num_tokens = self.num_prompt_tokens + params.min_tokens
        self._end_token_ids = tuple(dict.fromkeys((*request.eos_token_ids, *params.stop_token_ids)))
        # An end token ends constrained text for good, so with ignore_eos it comes only when nothing else can.
        self._ignored_token_ids = request.eos_token_ids if grammar is not None and params.ignore_eos else ()
        # Made once and changed every step: the executor keeps none of it.
        self.scheduled = ScheduledSequence(
            seq_id=seq_id,
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=0,
            num_scheduled_tokens=0,
            num_written_tokens=0,
            block_tables=self.block_tables,
            is_sampling=False,
            sampling_params=params,
            seed=(request.seed + index * _SEED_STRIDE) & _SEED_MASK,
            grammar=grammar,
        )

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.seq_id} {self.request.request_id}[{self.index}] {self.status.value} "
            f"{self.num_computed_tokens}/{len(self.token_ids)} {self.block_tables}>"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def holds_blocks(self) -> bool:
        return bool(self.block_tables[0])

    @property
    def is_computing_prompt(self) -> bool:
        return self.status is SequenceStatus.RUNNING and self.num_computed_tokens < self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """One token is left to compute, then the next one is sampled."""
        return len(self.token_ids) - self.num_computed_tokens == 1

    @property
    def scores_prompt(self) -> bool:
        """Positions of the prompt are still to be scored, so they must be computed, whatever the cache holds."""
        return self.prompt_scores is not None and self.prompt_scores.num_told < self.num_prompt_tokens - 1

    @property
    def needs_prompt(self) -> bool:
        """Waits for its very first token and holds nothing yet: a sibling's prompt blocks would do."""
        return (
            self.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
            and len(self.token_ids) == self.num_prompt_tokens
            and not self.block_tables[0]
        )

    def share_of_step(self, num_scheduled_tokens: int) -> ScheduledSequence:
        """What the executor is to do for this sequence now; the same object every time."""
        scheduled = self.scheduled
        scheduled.num_computed_tokens = self.num_computed_tokens
        scheduled.num_scheduled_tokens = num_scheduled_tokens
        scheduled.num_written_tokens = self.num_written_tokens
        if self.prompt_scores is not None:
            scheduled.prompt_logprobs_start = self.prompt_scores.num_told
        num_tokens = len(self.token_ids)
        scheduled.is_sampling = self.num_computed_tokens + num_scheduled_tokens == num_tokens
        scheduled.banned_token_ids = (
            self._end_token_ids if num_tokens < self._min_num_tokens else self._ignored_token_ids
        )
        return scheduled

    def append_token(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Append a sampled token, which the grammar has accepted; returns why the sequence ends with it (None: it goes
        on) and the stop token's id."""
        # Counted before the token is appended, as it was when the banned tokens were chosen.
        may_end = len(self.token_ids) >= self._min_num_tokens
        self.token_ids.append(token_id)
        if self.grammar is not None and (token_id in self.request.eos_token_ids or self.grammar.is_complete):
            return FinishReason.STOP, None
        if may_end and token_id in self._end_token_ids:
            params = self.request.sampling_params
            if token_id in self.request.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP, None
            if token_id in params.stop_token_ids:
                return FinishReason.STOP, token_id
        if len(self.token_ids) >= self.max_num_tokens:
            return FinishReason.LENGTH, None
        return None, None


def max_num_tokens(request: Request, max_model_len: int) -> int:
    """How long prompt and generation can become."""
    max_tokens = request.sampling_params.max_tokens
    if max_tokens is None:
        return max_model_len
    return min(len(request.prompt_token_ids) + max_tokens, max_model_len)
