"""Random traces: whatever is added, aborted or fails, and when, every sequence gets the tokens of its run alone.

The executor computes through simulated KV slots (tests/fakes.py), so a wrong block table, a missing copy, a block used
after it was freed or a shared block overwritten shows as other tokens. OCTAVO_TRACE_EXAMPLES=10000 makes it a soak of
two minutes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core import admission
from octavo.core.engine_core import EngineCore
from octavo.core.interfaces import CoreConfig, FinishReason, ScheduledSequence, SchedulerOutput, SequenceOutput
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.sequence import Sequence
from tests.fakes import FakeExecutor, require

VOCAB_SIZE = 12
EOS = (0,)
MAX_MODEL_LEN = 26
NUM_EXAMPLES = int(os.environ.get("OCTAVO_TRACE_EXAMPLES", "150"))

# Prompts are cut from these, so that prefixes are often shared and often are whole blocks.
TEXTS = (tuple(range(1, 17)), (1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9, 9, 9, 9), (7,) * 16)


@pytest.fixture(autouse=True, scope="module")
def few_scored_rows() -> Iterator[None]:
    """So few that prompts this short are scored in several steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "MAX_SCORED_ROWS", 5)
        yield


@st.composite
def configs(draw: st.DrawFn) -> CoreConfig:
    block_size = draw(st.sampled_from((1, 2, 4)))
    windows = draw(st.sampled_from(((None,), (None,), (3,), (None, 4), (1, None, 6))))
    has_chunks = draw(st.booleans())
    budget = draw(st.integers(1, 20)) if has_chunks else draw(st.integers(MAX_MODEL_LEN - 4, MAX_MODEL_LEN + 10))
    scarce = -(-MAX_MODEL_LEN // block_size) * len(windows)
    return CoreConfig(
        block_size=block_size,
        num_blocks=draw(st.integers(max(1, scarce // 2), scarce * 2)),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=budget,
        kv_group_windows=windows,
        enable_chunked_prefill=has_chunks,
        enable_prefix_caching=draw(st.booleans()),
        policy=draw(st.sampled_from(("fcfs", "priority"))),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    text = draw(st.sampled_from(TEXTS))
    tail = draw(st.sampled_from(((), (), (3,), (5, 5))))
    max_tokens = draw(st.integers(1, 12))
    return Request(
        request_id="set by the trace",
        prompt_token_ids=text[: draw(st.integers(1, 16))] + tail,
        sampling_params=SamplingParams(
            n=draw(st.sampled_from((1, 1, 1, 2, 3))),
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, min(max_tokens, 3))),
            stop_token_ids=draw(st.sampled_from(((), (), (5,)))),
            ignore_eos=draw(st.booleans()),
            prompt_logprobs=draw(st.sampled_from((None, None, 0))),
        ),
        seed=draw(st.integers(0, 3)),
        eos_token_ids=EOS,
        priority=draw(st.integers(0, 2)),
        cache_salt=draw(st.sampled_from(("", "", "", "b"))),
    )


numbers = st.integers(0, 7)
commands = st.one_of(
    st.tuples(st.just("add"), requests()),
    st.tuples(st.just("add"), requests()),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), numbers),
    st.tuples(st.just("abort_sequence"), st.tuples(numbers, st.integers(0, 3))),
    st.tuples(st.just("hiccup"), st.integers(0, 1)),
    st.tuples(st.just("poison"), numbers),
    st.tuples(st.just("nan"), numbers),
    st.tuples(st.just("reset"), st.none()),
)


class CheckedExecutor(FakeExecutor):
    """Also holds each plan against the configuration."""

    def __init__(self, config: CoreConfig) -> None:
        super().__init__(config.block_size, config.kv_group_windows, vocab_size=VOCAB_SIZE)
        self.config = config
        self.core: EngineCore | None = None

    def execute(self, plan: SchedulerOutput) -> Any:
        require(plan.num_scheduled_tokens <= self.config.max_num_batched_tokens, "over the budget")
        require(len(plan.scheduled) <= self.config.max_num_seqs, "too many sequences")
        seq_ids = [scheduled.seq_id for scheduled in plan.scheduled]
        require(len(set(seq_ids)) == len(seq_ids), seq_ids)
        require(not set(seq_ids) & set(plan.preempted_seq_ids), "scheduled and preempted")
        held = {block for scheduled in plan.scheduled for table in scheduled.block_tables for block in table}
        require(all(destination in held for _, destination in plan.block_copies), plan.block_copies)
        if not self.config.enable_chunked_prefill:
            for scheduled in plan.scheduled:
                is_cut = len(scheduled.token_ids) > self.config.max_num_batched_tokens
                is_scored = scheduled.prompt_logprobs_start is not None
                require(scheduled.is_sampling or is_cut or is_scored, scheduled)
        num_scored = sum(len(scheduled.scored_positions) for scheduled in plan.scheduled)
        require(num_scored <= admission.MAX_SCORED_ROWS, f"{num_scored} positions are scored")
        self._check_writes(plan)
        return super().execute(plan)

    def _check_writes(self, plan: SchedulerOutput) -> None:
        """What is written is in one table only, and nobody can find it."""
        assert self.core is not None
        blocks = self.core.scheduler.kv_cache.pool.blocks
        for scheduled in plan.scheduled:
            end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
            for position in range(max(scheduled.num_computed_tokens, scheduled.num_written_tokens), end):
                for table in scheduled.block_tables:
                    block = blocks[table[position // self.config.block_size]]
                    require(block.ref_count == 1, (block, scheduled))
                    require(block.block_hash is None, (block, scheduled))


@dataclass
class Told:
    """What one sequence was told."""

    token_ids: list[int] = field(default_factory=list)
    last: SequenceOutput | None = None


class Trace:
    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.executor = CheckedExecutor(config)
        self.core = self.executor.core = EngineCore(self.executor, config)
        self.requests: list[Request] = []
        self.told: dict[tuple[str, int], Told] = {}
        self.num_finals: dict[str, int] = {}
        self.scored: dict[str, list[int]] = {}
        self.num_hiccups = 0

    def run(self, command: str, argument: Any) -> None:
        core = self.core
        if command == "add":
            request = _renamed(argument, f"r{len(self.requests)}")
            self.requests.append(request)
            self.num_finals[request.request_id] = 0
            self.scored[request.request_id] = []
            for index in range(request.sampling_params.n):
                self.told[request.request_id, index] = Told()
            self.take(core.add(request, 0.0))
        elif command == "step":
            for _ in range(argument):
                self.step()
        elif command == "abort":
            self.take(core.abort(f"r{argument}"))
        elif command == "abort_sequence":
            number, index = argument
            self.take(core.abort_sequence(f"r{number}", index))
        elif command == "hiccup":
            if argument:
                self.executor.fail_next_at_once = True
            else:
                self.executor.fail_next = True
            self.num_hiccups += 1
        elif command == "poison":
            self.executor.failing_seq_ids.add(argument)
        elif command == "nan":
            self.executor.nan_seq_ids.add(argument)
        else:
            core.reset_prefix_cache()
        core.check_invariants()

    def step(self) -> None:
        had_work = self.core.has_unfinished()
        result = self.core.step(0.0)
        assert (result.stats.num_scheduled_tokens > 0) == had_work, "every step gets somebody further"
        self.take(result.outputs)
        self.core.check_invariants()
        stats = self.core.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks + stats.num_used_blocks == self.config.num_blocks

    def take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            told = self.told[output.request_id, output.index]
            assert told.last is None or told.last.finish_reason is None, f"told after its end: {output}"
            told.token_ids += output.new_token_ids
            told.last = output
            self.scored[output.request_id] += [entry.token_id for entry in output.new_prompt_logprobs]
            self.num_finals[output.request_id] += output.is_final

    def drain(self) -> None:
        lengths = [
            len(request.prompt_token_ids) + (request.sampling_params.max_tokens or 0) for request in self.requests
        ]
        bound = 10 + 2 * sum(
            length * request.sampling_params.n for length, request in zip(lengths, self.requests, strict=True)
        )
        num_steps = 0
        while self.core.has_unfinished():
            self.step()
            num_steps += 1
            assert num_steps <= bound, f"not finished after {num_steps} steps: {self.core.scheduler.running}"

    def check(self) -> None:
        num_hiccup_errors = 0
        for request in self.requests:
            assert self.num_finals[request.request_id] == 1, request
            wanted = request.prompt_token_ids[1:] if request.sampling_params.prompt_logprobs is not None else ()
            scored = self.scored[request.request_id]
            assert scored == list(wanted[: len(scored)]), request
            for index in range(request.sampling_params.n):
                told = self.told[request.request_id, index]
                assert told.last is not None
                reason = told.last.finish_reason
                token_ids, alone_reason = generate_alone(request, index, self.config.kv_group_windows)
                if reason in (FinishReason.STOP, FinishReason.LENGTH):
                    assert (told.token_ids, reason) == (token_ids, alone_reason), request
                    assert len(scored) == len(wanted), request
                    continue
                assert told.token_ids == token_ids[: len(told.token_ids)], request
                if reason is FinishReason.ERROR:
                    error = told.last.error or ""
                    num_hiccup_errors += "hiccup" in error
                    assert any(word in error for word in ("hiccup", "poison", "not numbers", "lower")), error
        assert num_hiccup_errors <= self.num_hiccups
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def _renamed(request: Request, request_id: str) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.sampling_params,
        seed=request.seed,
        eos_token_ids=request.eos_token_ids,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def generate_alone(
    request: Request, index: int, windows: tuple[int | None, ...]
) -> tuple[list[int], FinishReason | None]:
    """The slow and obvious way: no blocks, no steps, everything in plain lists."""
    params = request.sampling_params
    sequence = Sequence(request, index, 0, [], max_model_len=MAX_MODEL_LEN, num_kv_groups=len(windows))
    executor = FakeExecutor(MAX_MODEL_LEN, windows, vocab_size=VOCAB_SIZE)
    token_ids = list(request.prompt_token_ids)
    ends = {*EOS, *params.stop_token_ids}
    while True:
        num_generated = len(token_ids) - len(request.prompt_token_ids)
        scheduled = ScheduledSequence(
            seq_id=0,
            token_ids=token_ids,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_computed_tokens=0,
            num_scheduled_tokens=len(token_ids),
            num_written_tokens=0,
            block_tables=[[group] for group in range(len(windows))],
            is_sampling=True,
            sampling_params=params,
            seed=sequence.scheduled.seed,
            banned_token_ids=tuple(ends) if num_generated < params.min_tokens else (),
        )
        token_ids.append(executor.execute(SchedulerOutput(scheduled=[scheduled])).token_ids[0])
        generated = token_ids[len(request.prompt_token_ids) :]
        stops = set(params.stop_token_ids) if params.ignore_eos else ends
        if num_generated >= params.min_tokens and generated[-1] in stops:
            return generated, FinishReason.STOP
        if len(generated) == params.max_tokens or len(token_ids) == MAX_MODEL_LEN:
            return generated, FinishReason.LENGTH


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    database=None,
    derandomize="OCTAVO_TRACE_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(configs(), st.lists(commands, max_size=25))
def test_any_trace_gives_every_sequence_its_tokens_and_one_final_output(
    config: CoreConfig, trace_commands: list[tuple[str, Any]]
) -> None:
    trace = Trace(config)
    for command, argument in trace_commands:
        trace.run(command, argument)
    trace.drain()
    trace.check()


def make_crowd(rng: random.Random) -> tuple[CoreConfig, list[tuple[str, Any]]]:
    """Many requests on few blocks: what hypothesis, which likes its examples short, rarely makes."""
    block_size = rng.choice((1, 2, 3, 4))
    windows = rng.choice(((None,), (None,), (None,), (3,), (None, 4), (1, None, 6)))
    has_chunks = rng.random() < 0.7
    longest = -(-MAX_MODEL_LEN // block_size) * len(windows)
    config = CoreConfig(
        block_size=block_size,
        num_blocks=int(longest * rng.choice((1.0, 1.3, 2.0))),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.choice((2, 4, 8)),
        max_num_batched_tokens=rng.choice((3, 8, 40)) if has_chunks else MAX_MODEL_LEN,
        kv_group_windows=windows,
        enable_chunked_prefill=has_chunks,
        enable_prefix_caching=rng.random() < 0.7,
        policy=rng.choice(("fcfs", "priority")),
    )
    trace: list[tuple[str, Any]] = []
    num_requests = 0
    for _ in range(rng.randint(10, 40)):
        draw = rng.random()
        if draw < 0.5:
            trace.append(("add", make_request(rng)))
            num_requests += 1
        elif draw < 0.85:
            trace.append(("step", rng.randint(1, 5)))
        elif draw < 0.89:
            trace.append(("abort", rng.randint(0, num_requests)))
        elif draw < 0.94:
            trace.append(("abort_sequence", (rng.randint(0, num_requests), rng.randint(0, 2))))
        elif draw < 0.97:
            trace.append(("hiccup", rng.randint(0, 1)))
        elif draw < 0.99:
            trace.append((rng.choice(("poison", "nan")), rng.randint(0, num_requests)))
        else:
            trace.append(("reset", None))
    return config, trace


def make_request(rng: random.Random) -> Request:
    max_tokens = rng.randint(1, 12)
    return Request(
        request_id="set by the trace",
        prompt_token_ids=rng.choice(TEXTS)[: rng.choice((3, 8, 8, 12, rng.randint(1, 16)))]
        + rng.choice(((), (), (3,))),
        sampling_params=SamplingParams(
            n=rng.choice((1, 1, 2, 3)),
            max_tokens=max_tokens,
            min_tokens=rng.choice((0, max_tokens)),
            ignore_eos=rng.random() < 0.5,
            prompt_logprobs=rng.choice((None, None, 0)),
        ),
        seed=rng.randint(0, 1),
        eos_token_ids=EOS,
        priority=rng.randint(0, 2),
        cache_salt=rng.choice(("", "", "", "b")),
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_crowd_on_few_blocks_gets_its_tokens(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(max(1, NUM_EXAMPLES // 10)):
        config, commands_of_trace = make_crowd(rng)
        trace = Trace(config)
        for command, argument in commands_of_trace:
            trace.run(command, argument)
        trace.drain()
        trace.check()
