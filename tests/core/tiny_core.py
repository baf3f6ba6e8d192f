"""A core small enough to follow by hand: blocks of 4 tokens, 6 of them, prompts given as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.core.engine_core import EngineCore
from octavo.core.interfaces import (
    CoreConfig,
    GrammarSpec,
    ScheduledSequence,
    SchedulerOutput,
    SequenceOutput,
    StepResult,
)
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.sequence import Sequence
from tests.fakes import FakeExecutor

EOS = 99


class RecordingExecutor(FakeExecutor):
    """Keeps of each plan what a test asserts."""

    num_tokens: dict[int, int]  # seq_id -> tokens scheduled
    starts: dict[int, tuple[int, int]]  # seq_id -> (num_computed_tokens, num_written_tokens)
    block_copies: list[tuple[int, int]]
    preempted: list[int]
    banned: dict[int, tuple[int, ...]]

    def execute(self, plan: SchedulerOutput) -> Any:
        self.num_tokens = {scheduled.seq_id: scheduled.num_scheduled_tokens for scheduled in plan.scheduled}
        self.starts = {
            scheduled.seq_id: (scheduled.num_computed_tokens, scheduled.num_written_tokens)
            for scheduled in plan.scheduled
        }
        self.block_copies = list(plan.block_copies)
        self.preempted = list(plan.preempted_seq_ids)
        self.banned = {scheduled.seq_id: scheduled.banned_token_ids for scheduled in plan.scheduled}
        return super().execute(plan)


class TinyCore:
    """An EngineCore with shortcuts. Sequences are named by request id, or by (request id, index)."""

    def __init__(self, *, choose: Callable[[ScheduledSequence], int | None] | None = None, **options: Any) -> None:
        settings: dict[str, Any] = {
            "block_size": 4,
            "num_blocks": 6,
            "max_model_len": 24,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 100,
            **options,
        }
        self.config = CoreConfig(**settings)
        self.executor = RecordingExecutor(
            self.config.block_size, self.config.kv_group_windows, vocab_size=90, choose=choose
        )
        self.core = EngineCore(self.executor, self.config)
        self.told: list[SequenceOutput] = []
        self.sequences: dict[str, list[Sequence]] = {}

    def add(
        self,
        request_id: str,
        prompt: range | tuple[int, ...],
        *,
        priority: int = 0,
        salt: str = "",
        grammar: GrammarSpec | None = None,
        **params: Any,
    ) -> list[SequenceOutput]:
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling_params=SamplingParams(**{"max_tokens": 8, **params}),
            seed=1,
            eos_token_ids=(EOS,),
            priority=priority,
            cache_salt=salt,
            grammar=grammar,
        )
        outputs = self.core.add(request, 0.0)
        self.told += outputs
        self.sequences[request_id] = list(self.core._sequences_of.get(request_id, ()))
        self.core.check_invariants()
        return outputs

    def step(self, num_steps: int = 1) -> StepResult:
        for _ in range(num_steps):
            result = self.core.step(0.0)
            self.told += result.outputs
            self.core.check_invariants()
        return result

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        outputs = self.core.abort(request_id) if index is None else self.core.abort_sequence(request_id, index)
        self.told += outputs
        self.core.check_invariants()
        return outputs

    def finish(self, max_steps: int = 200) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.core.has_unfinished():
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    def sequence(self, request_id: str, index: int = 0) -> Sequence:
        return self.sequences[request_id][index]

    def seq_id(self, request_id: str, index: int = 0) -> int:
        return self.sequence(request_id, index).seq_id

    def table(self, request_id: str, index: int = 0, group: int = 0) -> list[int]:
        return list(self.sequence(request_id, index).block_tables[group])

    def status(self, request_id: str, index: int = 0) -> str:
        return self.sequence(request_id, index).status.value

    def scheduled(self) -> dict[str, int]:
        """Tokens of the last step, by request id (one sequence each)."""
        names = {sequences[0].seq_id: name for name, sequences in self.sequences.items() if sequences}
        return {names[seq_id]: num_tokens for seq_id, num_tokens in self.executor.num_tokens.items()}

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [
            token_id
            for output in self.told
            if (output.request_id, output.index) == (request_id, index)
            for token_id in output.new_token_ids
        ]

    def finals(self, request_id: str) -> list[SequenceOutput]:
        return [output for output in self.told if output.request_id == request_id and output.is_final]

    def blocks(self) -> tuple[int, int, int]:
        """(free, cached, used)"""
        stats = self.core.stats()
        return stats.num_free_blocks, stats.num_cached_blocks, stats.num_used_blocks


def tokens_alone(prompt: range | tuple[int, ...], index: int = 0, **params: Any) -> list[int]:
    """What a sequence generates with all the room it wants and nobody else there."""
    core = TinyCore(num_blocks=100, enable_prefix_caching=False)
    core.add("alone", prompt, **{**params, "n": index + 1})
    core.finish()
    return core.tokens("alone", index)
