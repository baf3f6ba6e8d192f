"""Where the time of one decode step goes: scheduler, batch, each op, the Python between them, sampling, output.

Runs the real `LLM` with stopwatches around its parts. A step's whole time is taken without them, in the same run; the
parts, less what the stopwatches cost, should add up to it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo import EngineArgs
from octavo.bench.engine import LoadedModel, OnProgress, check_length
from octavo.bench.environment import ForeignMeter, describe_environment, noise_notes
from octavo.bench.probe import Probe, WatchedOps, measure_watch_cost
from octavo.bench.result import BenchResult, Row
from octavo.bench.statistics import middle_half
from octavo.ops.interface import MLPSublayer, Ops

MODEL_OPS = (
    "embedding",
    "linear",
    "rms_norm",
    "add_rms_norm",
    "add",
    "rotary_embedding",
    "silu_and_mul",
    "gelu_and_mul",
    "write_kv",
    "paged_attention",
    "attention_sublayer",
    "mlp_sublayer",
    "logits",
    "take_rows",
    "copy_blocks",
)
SCHEDULE, UPDATE, BATCH, MODEL_PYTHON = "scheduler: plan", "scheduler: update", "batch building", "Python between ops"
SAMPLING_PYTHON, SAMPLE, OUTPUT, OTHER = "sampling: settings", "op sample", "output: text", "other Python"
OP_PREFIX = "op "
_WARMUP_STEPS = 4
# Calls of an op with next to nothing to do, to see what a call itself costs.
_FLOOR_CALLS = 2000


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One decode step: its whole time, and by part the time and the calls. Nanoseconds."""

    whole_ns: float
    times_ns: dict[str, int]
    calls: dict[str, int]


def measure_step(
    args: EngineArgs,
    batch_sizes: Sequence[int],
    context_tokens: int,
    num_steps: int,
    seed: int,
    on_progress: OnProgress,
    **stand_ins: Any,
) -> BenchResult:
    """context_tokens: prompt tokens of each sequence; num_steps: decode steps, every other one with stopwatches."""
    started_at = time.time()
    model = LoadedModel(args, on_progress, **stand_ins)
    check_length(context_tokens, num_steps + _WARMUP_STEPS + 3, model.llm.limits.max_model_len)
    rng = random.Random(seed)
    watch_cost = measure_watch_cost()
    call_cost_ns = measure_call_cost(model.executor.ops)
    meter = ForeignMeter()
    rows: list[Row] = []
    notes = [
        f"{context_tokens} tokens of context. A call of an op costs {call_cost_ns / 1e3:.2f} µs before it computes "
        "anything (an MLP of 32 by 32): binding, shape checks, the way to the threads."
    ]
    for position, batch_size in enumerate(batch_sizes):
        on_progress(f"{batch_size} sequences", position, len(batch_sizes))
        plain, watched = _decode(model, rng, batch_size, context_tokens, num_steps)
        rows += make_rows(batch_size, plain, watched, watch_cost, call_cost_ns)
    share = meter.share()
    return BenchResult(
        kind="step",
        subject=model.name,
        environment=describe_environment(
            isa=model.isa, threads=model.threads, foreign_share=share, started_at=started_at
        ),
        options={
            "batch_sizes": list(batch_sizes),
            "context_tokens": context_tokens,
            "num_steps": num_steps,
            "seed": seed,
            "watch_cost_ns": list(watch_cost),
            "call_cost_ns": call_cost_ns,
        },
        rows=tuple(rows),
        notes=(*notes, *(_summarize(rows, batch_size) for batch_size in batch_sizes), *noise_notes(share)),
    )


def make_rows(
    batch_size: int,
    plain: Sequence[StepTimes],
    watched: Sequence[StepTimes],
    watch_cost: tuple[float, float],
    call_cost_ns: float,
) -> list[Row]:
    """plain, watched: steps without and with stopwatches, taken in turn. The shares are of the sum of the parts.

    What the watches cost in this run is the difference of the two; where that is lost in noise, what they cost when
    they were measured alone.
    """
    step_ns = _mean_of_middle(plain)
    kept = [watched[index] for index in middle_half([step.whole_ns for step in watched])]
    times, calls = {}, {}
    for part in dict.fromkeys(part for step in kept for part in step.times_ns):
        times[part] = sum(step.times_ns.get(part, 0) for step in kept) / len(kept)
        calls[part] = sum(step.calls.get(part, 0) for step in kept) / len(kept)
    times = subtract_watch_cost(times, calls, scale_watch_cost(watch_cost, _mean_of_middle(watched) - step_ns, calls))
    whole = sum(times.values())
    group = "1 sequence" if batch_size == 1 else f"{batch_size} sequences"
    rows = [
        Row(
            series=part,
            x=batch_size,
            name=part,
            group=group,
            metrics={
                "time_us": ns / 1e3,
                "share": ns / whole if whole else None,
                "calls_per_step": calls[part],
                "time_per_call_us": ns / calls[part] / 1e3 if calls[part] else None,
            },
        )
        for part, ns in sorted(times.items(), key=lambda item: -item[1])
    ]
    op_calls = sum(count for part, count in calls.items() if part.startswith(OP_PREFIX))
    python_ns = sum(ns for part, ns in times.items() if not part.startswith(OP_PREFIX))
    binding_ns = op_calls * call_cost_ns
    metrics: dict[str, float | None] = {
        "step_us": step_ns / 1e3,
        "parts_us": whole / 1e3,
        "python_us": python_ns / 1e3,
        "binding_us": binding_ns / 1e3,
        "python_share": python_ns / whole if whole else None,
        "overhead_share": (python_ns + binding_ns) / whole if whole else None,
        "op_calls": op_calls,
    }
    return [*rows, Row(series="", x=batch_size, name="whole step", group=group, metrics=metrics)]


def subtract_watch_cost(
    times: dict[str, float], calls: dict[str, float], watch_cost: tuple[float, float]
) -> dict[str, float]:
    """Each call's inner cost off its part, the outer costs off the part that makes the calls: ops are called by the
    model's Python and by the sampler, the others by "other Python". Nothing falls below 0."""
    inside, outside = watch_cost
    caller_of = {SAMPLE: SAMPLING_PYTHON}
    corrected = {part: ns - calls[part] * inside for part, ns in times.items()}
    for part, count in calls.items():
        if part == OTHER:
            continue
        caller = caller_of.get(part, MODEL_PYTHON if part.startswith(OP_PREFIX) else OTHER)
        if caller in corrected:
            corrected[caller] -= count * outside
    return {part: max(ns, 0.0) for part, ns in corrected.items()}


def scale_watch_cost(
    watch_cost: tuple[float, float], difference_ns: float, calls: dict[str, float]
) -> tuple[float, float]:
    """Both costs, scaled up so that all calls together cost the difference; never scaled down."""
    expected_ns = sum(watch_cost) * sum(calls.values())
    factor = max(difference_ns / expected_ns, 1.0) if expected_ns > 0 else 1.0
    return watch_cost[0] * factor, watch_cost[1] * factor


def _mean_of_middle(steps: Sequence[StepTimes]) -> float:
    kept = middle_half([step.whole_ns for step in steps])
    return sum(steps[index].whole_ns for index in kept) / len(kept)


def measure_call_cost(ops: Ops) -> float:
    """Nanoseconds of an op's call with next to nothing to compute: the op that a step calls most, a sublayer."""
    x, norm = ops.to_device(np.ones((1, 32), np.float32)), ops.to_device(np.ones(32, np.float32))
    gate_up, down = (ops.pack_weight([np.zeros(shape, np.float32)]) for shape in ((64, 32), (32, 32)))
    sublayer = MLPSublayer(norm=norm, eps=1e-5, gate_up=gate_up, is_gelu=False, down=down)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter_ns()
        for _ in range(_FLOOR_CALLS):
            ops.mlp_sublayer(sublayer, x)
        best = min(best, (time.perf_counter_ns() - start) / _FLOOR_CALLS)
    return best


# --- inside the engine --------------------------------------------------------------------------------------------


class _Watches:
    """The parts are private to the engine; this is the one place outside that knows their names."""

    def __init__(self, model: LoadedModel):
        self.probe = Probe()
        self._llm: Any = model.llm
        self._runner: Any = model.executor._runner
        self._ops = self._runner._ops
        self._model_ops = WatchedOps(self._ops, self.probe, MODEL_OPS, OP_PREFIX)
        self._sampler_ops = WatchedOps(self._ops, self.probe, ("sample",), OP_PREFIX)

    def put_on(self) -> None:
        core, probe, runner = self._llm._core, self.probe, self._runner
        probe.watch(core.scheduler, "schedule", SCHEDULE)
        probe.watch(core.scheduler, "update", UPDATE)
        probe.watch(core.executor, "execute", BATCH)  # what is left of it: building the batch
        probe.watch(self._llm, "_deliver", OUTPUT)
        probe.watch(runner, "_model", MODEL_PYTHON)
        probe.watch(runner._sampler, "sample", SAMPLING_PYTHON)
        runner._ops, runner._sampler._ops = self._model_ops, self._sampler_ops

    def take_off(self) -> None:
        self.probe.unwatch()
        self._runner._ops = self._runner._sampler._ops = self._ops


def _decode(
    model: LoadedModel, rng: random.Random, batch_size: int, context_tokens: int, num_steps: int
) -> tuple[list[StepTimes], list[StepTimes]]:
    """The steps in which every sequence generates one token, from the end of one to the end of the next: (without
    stopwatches, with them), in turn."""
    plain: list[StepTimes] = []
    watched: list[StepTimes] = []
    llm: Any = model.llm
    watches = _Watches(model)
    probe = watches.probe
    step: Callable[[], Any] = llm._step
    before_ns, num_seen, is_watched = 0, 0, False

    def timed_step() -> Any:
        nonlocal before_ns, num_seen, is_watched
        outputs = step()
        now_ns = time.perf_counter_ns()
        # The output of this step is delivered after it, so it counts as the beginning of the next.
        times, calls = probe.take()
        is_decode = len(outputs) == batch_size and not any(output.finish_reason for output in outputs)
        if is_decode and before_ns:
            num_seen += 1
            whole_ns = now_ns - before_ns
            if is_watched:
                times[OTHER] = whole_ns - sum(times.values())
                calls[OTHER] = 1
            if num_seen > _WARMUP_STEPS:
                (watched if is_watched else plain).append(StepTimes(whole_ns, times, calls))
            is_watched = not is_watched
            (watches.put_on if is_watched else watches.take_off)()
        before_ns = time.perf_counter_ns() if is_decode else 0
        return outputs

    llm._step = timed_step
    try:
        prompts = model.make_prompts(rng, batch_size, context_tokens)
        model.generate(prompts, num_steps + _WARMUP_STEPS + 3)
    finally:
        watches.take_off()
        del llm._step
    assert plain, "no step in which all sequences decode"
    assert watched, "no step in which all sequences decode"
    return plain, watched


def _summarize(rows: Sequence[Row], batch_size: int) -> str:
    whole = next(row for row in rows if row.x == batch_size and not row.series).metrics
    step_ms = (whole["step_us"] or 0.0) / 1e3
    return (
        f"{batch_size}: a step takes {step_ms:.2f} ms; Python is {whole['python_share'] or 0.0:.1%} of it, with the "
        f"cost of {whole['op_calls'] or 0.0:.0f} calls into the kernels {whole['overhead_share'] or 0.0:.1%}."
    )
