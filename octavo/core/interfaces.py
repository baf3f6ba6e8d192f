"""The plain data that passes between the core, the executor and the engine layer, and the two protocols.

Standard library only. Everything here can cross a process boundary.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.core.sampling_params import SamplingParams


class FinishReason(str, enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """All that the core must know, resolved; no None that means "choose for me".

    kv_group_windows: one entry a KV cache group; None attends to everything, a number is its sliding window in
                      tokens. A group is a set of layers that share one block table; all groups draw their blocks
                      from the one pool. A plain Llama has one group (None,).
    num_blocks:       blocks in the pool, each of `block_size` tokens for one group
    policy:           "fcfs" or "priority"
    """

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_group_windows: tuple[int | None, ...] = (None,)
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    policy: str = "fcfs"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the generated text, as plain data; `structured` compiles it where it is needed.

    kind: "json_schema", "json_object", "regex", "choice", "lark"; and of a request's tools, never from a client's own
          text, "tool_calls", "text_and_tool_calls", "composed"
    text: the schema (JSON), the pattern, the choices (a JSON list) or the grammar; empty for json_object
    """

    kind: str
    text: str = ""


class Grammar(Protocol):
    """The state of one sequence's constrained decoding: what may come next. Made by a `GrammarFactory`."""

    def write_mask(self, mask: Any) -> None:
        """mask: [ceil(vocab_size / 32)] int32, bit (id % 32) of word (id // 32) set for each token that may come next,
        all words written. End-of-sequence tokens are allowed where the text may end."""
        ...

    def accept(self, token_id: int) -> None:
        """The token was sampled. Raises ValueError when the mask did not allow it: our own mistake."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing can come but the end."""
        ...


class GrammarFactory(Protocol):
    def __call__(self, spec: GrammarSpec) -> Grammar:
        """A fresh state; quick when the spec was compiled before. Raises InvalidRequestError for a bad spec."""
        ...


@dataclass(slots=True, kw_only=True)
class ScheduledSequence:
    """One sequence's share of a step. The lists are the core's own: the executor reads them and keeps none.

    token_ids:            prompt and generated tokens so far
    num_prompt_tokens:    how many of them are the prompt
    num_computed_tokens:  positions [num_computed_tokens, num_computed_tokens + num_scheduled_tokens) are computed now
    num_written_tokens:   positions below it already have their keys and values in the cache (a full prefix hit, a
                          forked sibling): they are recomputed for their logits but must not be written again
    block_tables:         one list of block ids a KV cache group; -1 where a sliding window has let a block go
    is_sampling:          the last scheduled position's logits are sampled
    seed:                 of this sequence: request seed and index already mixed
    banned_token_ids:     not sampled in this step (end tokens before min_tokens) unless the grammar has nothing else
    prompt_logprobs_start: the first position of the prompt whose next token is still to be scored; None: not asked for
    grammar:              its mask says which tokens may be sampled; the executor does not call `accept`
    """

    seq_id: int
    token_ids: SequenceABC[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    num_written_tokens: int
    block_tables: list[list[int]]
    is_sampling: bool
    sampling_params: SamplingParams
    seed: int
    banned_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    prompt_logprobs_start: int | None = None

    @property
    def scored_positions(self) -> range:
        """Positions of this step whose logits say how likely the prompt's next token was."""
        if self.prompt_logprobs_start is None:
            return range(0)
        end = self.num_computed_tokens + self.num_scheduled_tokens
        return range(max(self.prompt_logprobs_start, self.num_computed_tokens), min(end, self.num_prompt_tokens - 1))


@dataclass(slots=True, kw_only=True)
class SchedulerOutput:
    """The plan of one step.

    block_copies:     (source, destination) block ids, done before anything is written (copy on write of a shared tail)
    finished_seq_ids: sequences that ended or were aborted since the last step; the executor drops what it keeps of them
    lora:             the adapter id of each of `scheduled`, 0 for the base model; None when all are 0
    """

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    finished_seq_ids: list[int] = field(default_factory=list)
    preempted_seq_ids: list[int] = field(default_factory=list)
    lora: list[int] | None = None

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(sequence.num_scheduled_tokens for sequence in self.scheduled)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logs from the raw logits (float32). `top` is best first: (token_id, logprob); ties by lower id."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, kw_only=True)
class ModelRunnerOutput:
    """token_ids: seq_id to the sampled token, for every scheduled sequence with is_sampling that did not fail.
    logprobs:  seq_id to its TokenLogprobs, where they were asked for
    prompt_logprobs: seq_id to what its scored_positions say of the token after each, in order
    failures:  seq_id to a sentence; those sequences end with FinishReason.ERROR, the others are not disturbed
    """

    token_ids: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    """What was found in a LoRA adapter that was loaded.

    rank:            the largest of its matrices
    num_bytes:       what it takes in memory
    target_modules:  the projections it adds to, "q_proj", "down_proj", ...
    base_model_name: what it says that it was trained on; empty when it does not say
    """

    rank: int
    num_bytes: int
    target_modules: tuple[str, ...]
    base_model_name: str = ""


class Executor(Protocol):
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. May raise: the core then runs the sequences one by one, and only those that fail alone end."""
        ...

    def load_adapter(self, adapter_id: int, path: str) -> AdapterReport:
        """Read and check a LoRA adapter; `adapter_id` is positive and was never used before. Nothing changes when it
        fails. Raises ModelLoadError (missing, damaged, unsupported), ConfigError (LoRA is off, the rank's limit)."""
        ...

    def unload_adapter(self, adapter_id: int) -> None:
        """Forget it; no sequence uses it any more. An unknown id is fine."""
        ...


@dataclass(slots=True, kw_only=True)
class SequenceOutput:
    """What one step did to one sequence.

    index:           which of the request's n generations
    new_prompt_logprobs: of the prompt's tokens from the second on, what this step scored; of n generations one tells
                     them, before the first token of any
    stop_reason:     the stop token's id when a token of stop_token_ids ended it, else None
    ends_in_text:    with FinishReason.STOP: no end token was sampled, a grammar was complete with the last token
    num_cached_tokens: prompt tokens found in the prefix cache at the first admission
    first_scheduled_at: when its prompt was first computed, in the time given to `EngineCore.step`; None before
    is_final:        the request is over with this output (all n have ended); sent exactly once per accepted request
    error:           a sentence, with FinishReason.ERROR
    """

    request_id: str
    index: int
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[TokenLogprobs] = field(default_factory=list)
    new_prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    ends_in_text: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    is_final: bool = False
    error: str | None = None
    first_scheduled_at: float | None = None


@dataclass(slots=True, kw_only=True)
class StepStats:
    """Gauges after a step, and what the step added to the counters. The engine loop adds the times.

    A block is free (nobody's, empty or forgotten), cached (nobody's, but holds a known prefix), or used (in a table);
    free + cached + used = total, and unowned (used, but in no table) is 0 unless we have a bug.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_used_blocks: int = 0
    num_scheduled_tokens: int = 0
    num_decoding: int = 0  # sequences that had one token to compute
    num_prompt_tokens: int = 0  # computed in this step
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0  # prompt tokens looked up in the prefix cache
    num_prefix_hit_tokens: int = 0
    step_time_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class StepResult:
    outputs: list[SequenceOutput] = field(default_factory=list)
    stats: StepStats = field(default_factory=StepStats)
