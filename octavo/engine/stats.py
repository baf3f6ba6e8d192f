"""Step statistics, added up: `EngineStats`. Standard library only, beside the core's plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.interfaces import StepStats


@dataclass(slots=True)
class EngineStats:
    """The gauges as they were last told, and the counters since the start.

    num_restarts_total: how often the engine process was started again after a death
    """

    latest: StepStats = field(default_factory=StepStats)
    num_scheduled_tokens_total: int = 0
    num_prompt_tokens_total: int = 0
    num_generated_tokens_total: int = 0
    num_preemptions_total: int = 0
    num_prefix_query_tokens_total: int = 0
    num_prefix_hit_tokens_total: int = 0
    num_restarts_total: int = 0

    @property
    def num_running(self) -> int:
        return self.latest.num_running

    @property
    def num_waiting(self) -> int:
        return self.latest.num_waiting

    def push(self, step: StepStats) -> None:
        self.latest = step
        self.num_scheduled_tokens_total += step.num_scheduled_tokens
        self.num_prompt_tokens_total += step.num_prompt_tokens
        self.num_generated_tokens_total += step.num_generated_tokens
        self.num_preemptions_total += step.num_preemptions
        self.num_prefix_query_tokens_total += step.num_prefix_query_tokens
        self.num_prefix_hit_tokens_total += step.num_prefix_hit_tokens
