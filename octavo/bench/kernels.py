"""Each op alone, at the shapes of the loaded model: how much it moves and computes a second, and how far that is from
what this machine can do.

Which ops with which weights is not written down here: one step of the model is run on a backend that notes each call.
A weight that every layer has its own of is read in turn from all layers, as in a step, not again and again from the
cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np

from octavo import EngineArgs
from octavo.bench import costs
from octavo.bench.costs import Cost
from octavo.bench.engine import LoadedModel, OnProgress
from octavo.bench.environment import ForeignMeter, describe_environment, noise_notes
from octavo.bench.peaks import Peaks, describe_blas, measure_peaks
from octavo.bench.result import BenchResult, Row
from octavo.ops.interface import AttentionBatch, Ops, SamplingBatch
from octavo.ops.reference import ReferenceOps
from octavo.ops.sublayers import run_attention_sublayer, run_mlp_sublayer

ROWS = (1, 2, 4, 8, 16, 64, 512)
_BLOCK_SIZE = 16
# Decoding so many sequences at once would need a cache of gigabytes.
_MAX_DECODE_ROWS = 64
_TIME_S = 0.15
_BATCHES = 5
# OpenBLAS' threads go on spinning after a product, on the cores that ours want: a tenth of a second when left alone,
# under a millisecond as `octavo bench kernels` sets it.
_BLAS_REST_S = 0.005
_NUMPY_WEIGHTS = 3


@dataclass(slots=True)
class Call:
    """One kind of call that the model makes: the same op at the same shapes. weights: all that it is made with."""

    op: str
    detail: str
    arguments: tuple[Any, ...]
    weights: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Trial:
    """One op at one number of rows. run: makes one call. numpy: the same with NumPy, or None where it has no equal;
    has_blas: with its threads."""

    name: str
    rows: int
    cost: Cost
    run: Callable[[], object]
    numpy: Callable[[], object] | None = None
    has_blas: bool = False


class CallRecorder:
    """A backend that notes each op's call, and makes it; a sublayer's ops one by one."""

    def __init__(self, ops: Any):
        self._ops = ops
        self.calls: dict[tuple[str, str], Call] = {}

    def attention_sublayer(self, *args: Any) -> None:
        run_attention_sublayer(self, *args)  # type: ignore[arg-type]

    def mlp_sublayer(self, *args: Any) -> None:
        run_mlp_sublayer(self, *args)  # type: ignore[arg-type]

    def logits(self, residual: Any, rows: Any, norm: Any, eps: float, weight: Any) -> Any:
        return self.linear(self.rms_norm(self.take_rows(residual, rows), norm, eps), weight)

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)
        if not callable(op) or name == "to_device":
            return op

        def noted(*args: Any) -> Any:
            weight = args[1] if name == "linear" else args[0] if name == "embedding" else None
            detail = _describe_call(name, args, weight)
            call = self.calls.setdefault((name, detail), Call(name, detail, args))
            if weight is not None and all(weight is not known for known in call.weights):
                call.weights.append(weight)
            return op(*args)

        return noted


def measure_kernels(
    args: EngineArgs,
    rows: Sequence[int],
    context_len: int,
    has_numpy: bool,
    on_progress: OnProgress,
    **stand_ins: Any,
) -> BenchResult:
    """context_len: of attention, in tokens. has_numpy: compare with NumPy. Raises ConfigError, ModelLoadError."""
    started_at = time.time()
    model = LoadedModel(args, on_progress, **stand_ins)
    on_progress("measure the machine's limits", 0, 0)
    peaks = measure_peaks(model.isa, model.threads, model.llm.report.weights_bytes)
    calls = record_calls(model)
    meter = ForeignMeter()
    result = []
    num_done = 0
    for call in calls:
        for num_rows in rows:
            on_progress(f"{call.op} {call.detail}, {num_rows} rows", num_done, len(calls) * len(rows))
            num_done += 1
            for trial in make_trials(call, model, num_rows, context_len):
                result.append(_measure(trial, peaks, has_numpy))
    share = meter.share()
    notes = [
        peaks.describe(),
        "Of limit: the least time that these limits allow for the bytes and operations of the op, over its time. Small "
        "ops work in the caches, which are faster than memory.",
    ]
    if has_numpy:
        notes.append(f"× NumPy: {describe_blas(os.environ)}; float32 weights, ours as they are.")
    return BenchResult(
        kind="kernels",
        subject=model.name,
        environment=describe_environment(
            isa=model.isa, threads=model.threads, foreign_share=share, started_at=started_at
        ),
        options={
            "rows": list(rows),
            "context_len": context_len,
            "read_gbs": peaks.read_bytes_per_s / 1e9,
            "memory_gbs": peaks.memory_bytes_per_s / 1e9,
            "integer_gops": peaks.integer_per_s / 1e9,
            "float_gops": peaks.float_per_s / 1e9,
        },
        rows=tuple(sorted(result, key=lambda row: rows.index(int(row.x)))),
        notes=(*notes, *noise_notes(share)),
    )


def record_calls(model: LoadedModel) -> list[Call]:
    """The kinds of calls of one step with one sequence, in order."""
    runner: Any = model.executor._runner
    recorder = CallRecorder(model.executor.ops)
    runner._ops = runner._sampler._ops = recorder
    try:
        model.generate([{"prompt_token_ids": [0]}], 1)
    finally:
        runner._ops = runner._sampler._ops = model.executor.ops
    return list(recorder.calls.values())


def make_trials(call: Call, model: LoadedModel, rows: int, context_len: int) -> Iterator[Trial]:
    """The call again, with that many rows of made-up numbers; attention as decoding and as prefill."""
    ops, args = model.executor.ops, call.arguments
    rng = np.random.default_rng(0)
    plain = ReferenceOps()

    def numbers(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    if call.op == "linear":
        yield _linear_trial(call, ops, numbers, rows)
    elif call.op == "embedding":
        ids = rng.integers(0, call.weights[0].shape[0], rows).astype(np.int32)
        weight, scale = args[0], args[2] if len(args) > 2 else 1.0
        row_bytes = weight.num_bytes / weight.shape[0]
        yield Trial(
            "embedding",
            rows,
            costs.embedding(rows, weight.shape[1], row_bytes),
            lambda: ops.embedding(weight, ids, scale),
        )
    elif call.op == "rms_norm":
        x, weight, eps = numbers(rows, *args[0].shape[1:]), args[1], args[2]
        yield Trial(
            f"rms_norm {call.detail}",
            rows,
            costs.rms_norm(x.size // x.shape[-1], x.shape[-1]),
            lambda: ops.rms_norm(x, weight, eps),
            lambda: plain.rms_norm(x, weight, eps),
        )
    elif call.op == "add_rms_norm":
        x, residual, weight, eps = numbers(rows, args[0].shape[1]), numbers(rows, args[0].shape[1]), args[2], args[3]
        yield Trial(
            f"add_rms_norm {call.detail}",
            rows,
            costs.add_rms_norm(rows, x.shape[1]),
            lambda: ops.add_rms_norm(x, residual, weight, eps),
            lambda: plain.add_rms_norm(x, residual, weight, eps),
        )
    elif call.op == "add":
        x, residual = numbers(rows, args[0].shape[1]) * np.float32(1e-6), numbers(rows, args[0].shape[1])
        yield Trial(
            "add",
            rows,
            costs.add(rows, x.shape[1]),
            lambda: ops.add(x, residual),
            lambda: plain.add(x, residual),
        )
    elif call.op in ("silu_and_mul", "gelu_and_mul"):
        x, function, plain_function = numbers(rows, args[0].shape[1]), getattr(ops, call.op), getattr(plain, call.op)
        yield Trial(
            call.op,
            rows,
            costs.gated(rows, x.shape[1] // 2, call.op == "gelu_and_mul"),
            lambda: function(x),
            lambda: plain_function(x),
        )
    elif call.op == "rotary_embedding":
        query, key = numbers(rows, *args[0].shape[1:]), numbers(rows, *args[1].shape[1:])
        positions, table = np.zeros(rows, np.int32), args[3]
        yield Trial(
            "rotary_embedding",
            rows,
            costs.rotary_embedding(rows, query.shape[1], key.shape[1], table.shape[1]),
            lambda: ops.rotary_embedding(query, key, positions, table),
            lambda: plain.rotary_embedding(query, key, positions, table),
        )
    elif call.op == "write_kv":
        key, value = numbers(rows, *args[0].shape[1:]), numbers(rows, *args[0].shape[1:])
        cache, item_bytes = _allocate_cache(model, key, -(-rows // _BLOCK_SIZE))
        slots = np.arange(rows, dtype=np.int64)
        yield Trial(
            "write_kv",
            rows,
            costs.write_kv(rows, key.shape[1], key.shape[2], item_bytes),
            lambda: ops.write_kv(key, value, cache, slots),
        )
    elif call.op == "paged_attention":
        yield from _attention_trials(call, model, numbers, rows, context_len)
    elif call.op == "take_rows":
        x, indexes = numbers(rows, args[0].shape[1]), np.arange(rows, dtype=np.int32)[::-1].copy()
        yield Trial(
            "take_rows",
            rows,
            costs.take_rows(rows, x.shape[1]),
            lambda: ops.take_rows(x, indexes),
            lambda: x.take(indexes, axis=0),
        )
    elif call.op == "sample" and rows <= _MAX_DECODE_ROWS:
        logits = numbers(rows, args[0].shape[1])
        batch = SamplingBatch(
            temperature=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            random=np.zeros(rows),
            num_logprobs=np.full(rows, -1, np.int32),
        )
        yield Trial(
            "sample greedy",
            rows,
            costs.sample(rows, logits.shape[1]),
            lambda: ops.sample(logits, batch),
            lambda: logits.argmax(axis=1),
        )


# --- helpers ------------------------------------------------------------------------------------------------------


def _linear_trial(call: Call, ops: Ops, numbers: Callable[..., np.ndarray], rows: int) -> Trial:
    num_outputs, num_inputs = call.weights[0].shape
    x = numbers(rows, num_inputs)
    weights = cycle(call.weights)
    # As many as ours, up to a few: NumPy's are eight times as large, and none of them stays in the cache either way.
    plain = cycle([numbers(num_outputs, num_inputs) for _ in range(min(len(call.weights), _NUMPY_WEIGHTS))])
    weight_bytes = round(sum(weight.num_bytes for weight in call.weights) / len(call.weights))
    is_integer = "q" in call.weights[0].dtype or call.weights[0].dtype == "mixed"
    return Trial(
        f"linear {call.detail}",
        rows,
        costs.linear(rows, num_outputs, num_inputs, weight_bytes, is_integer),
        lambda: ops.linear(x, next(weights), None),
        lambda: x @ next(plain).T,
        has_blas=True,
    )


def _attention_trials(
    call: Call, model: LoadedModel, numbers: Callable[..., np.ndarray], rows: int, context_len: int
) -> Iterator[Trial]:
    ops, query_shape = model.executor.ops, call.arguments[0].shape[1:]
    scale, window, soft_cap = call.arguments[3:6]
    num_heads, head_dim = query_shape
    query = numbers(rows, num_heads, head_dim)
    num_kv_heads = model.executor.model_config.num_kv_heads
    seen = context_len if window is None else min(context_len, window)
    for name, num_seqs in (("decode", rows), ("prefill", 1)):
        if name == "decode" and rows > _MAX_DECODE_ROWS:
            continue
        length = max(context_len, rows // num_seqs)
        blocks_each = -(-length // _BLOCK_SIZE)
        key = numbers(num_seqs * blocks_each * _BLOCK_SIZE, num_kv_heads, head_dim)
        cache, item_bytes = _allocate_cache(model, key, num_seqs * blocks_each)
        ops.write_kv(key, key, cache, np.arange(len(key), dtype=np.int64))
        batch = AttentionBatch(
            query_start=np.linspace(0, rows, num_seqs + 1).astype(np.int32),
            context_lens=np.full(num_seqs, length, np.int32),
            block_tables=np.arange(num_seqs * blocks_each, dtype=np.int32).reshape(num_seqs, blocks_each),
            slot_mapping=np.full(rows, -1, np.int64),
        )
        if name == "decode":
            pairs, read = costs.count_decode_pairs(rows, seen), (seen,) * rows
        else:
            pairs, read = costs.count_prefill_pairs(rows, length), (length,)
        if name == "prefill" and (rows == 1 or window is not None):
            continue  # one row is the same as decoding; with a window the pairs are another count
        yield Trial(
            f"attention {name} {call.detail}, context {length}",
            rows,
            costs.paged_attention(rows, num_heads, num_kv_heads, head_dim, item_bytes, read, pairs),
            lambda batch=batch, cache=cache: ops.paged_attention(  # type: ignore[misc]
                query, cache, batch, scale, window, soft_cap
            ),
        )


def _allocate_cache(model: LoadedModel, key: np.ndarray, num_blocks: int) -> tuple[Any, int]:
    """(a layer's cache, bytes of one number in it)"""
    dtype = model.llm.config.kv_cache_dtype
    cache = model.executor.ops.allocate_layer_cache(num_blocks, _BLOCK_SIZE, key.shape[1], key.shape[2], dtype)
    return cache, {"float32": 4, "float16": 2}.get(dtype, 1)


def _measure(trial: Trial, peaks: Peaks, has_numpy: bool) -> Row:
    numpy_s = None
    if has_numpy and trial.numpy is not None:
        seconds, numpy_s = _time_in_turn([trial.run, trial.numpy], _BLAS_REST_S if trial.has_blas else 0.0)
    else:
        (seconds,) = _time_in_turn([trial.run])
    return make_row(trial.name, trial.rows, trial.cost, seconds, numpy_s, peaks)


def make_row(name: str, rows: int, cost: Cost, seconds: float, numpy_s: float | None, peaks: Peaks) -> Row:
    peak = peaks.integer_per_s if cost.is_integer else peaks.float_per_s
    return Row(
        series=name,
        x=rows,
        name=name,
        group="1 row" if rows == 1 else f"{rows} rows",
        metrics={
            "time_us": seconds * 1e6,
            "read_gbs": cost.num_bytes / seconds / 1e9,
            "bandwidth_share": cost.num_bytes / seconds / peaks.read_bytes_per_s,
            "gops": cost.operations / seconds / 1e9 if cost.operations else None,
            "peak_share": cost.operations / seconds / peak if cost.operations else None,
            "limit_share": cost.limit_s(peaks.read_bytes_per_s, peak) / seconds,
            "ratio_to_numpy": None if numpy_s is None else numpy_s / seconds,
            "numpy_us": None if numpy_s is None else numpy_s * 1e6,
            "num_bytes": cost.num_bytes,
            "operations": cost.operations,
        },
    )


def _time_in_turn(runs: Sequence[Callable[[], object]], rest_s: float = 0.0) -> list[float]:
    """Seconds a call of each: the median of a few batches, one of each in turn, that take about _TIME_S together.

    rest_s: waited before a turn of the first, so that the threads of the last are quiet
    """
    calls_per_batch = []
    for run in runs:
        # As many as fit into a batch's time: the first few are slow, and alone would make the batches too short.
        num_calls, start = 0, time.perf_counter()
        while num_calls == 0 or time.perf_counter() - start < _TIME_S / _BATCHES:
            run()
            num_calls += 1
        calls_per_batch.append(num_calls)
    times: list[list[float]] = [[] for _ in runs]
    began = time.perf_counter()
    while len(times[0]) < _BATCHES:
        time.sleep(rest_s)
        for run, num_calls, own in zip(runs, calls_per_batch, times, strict=True):
            start = time.perf_counter()
            for _ in range(num_calls):
                run()
            own.append((time.perf_counter() - start) / num_calls)
        if time.perf_counter() - began > 4 * _TIME_S * len(runs):
            break
    return [sorted(own)[len(own) // 2] for own in times]


def _describe_call(name: str, args: tuple[Any, ...], weight: Any) -> str:
    """Calls with the same description are of the same kind."""
    if weight is not None:
        return f"{weight.shape[0]}x{weight.shape[1]} {weight.dtype}"
    if name == "paged_attention":
        window = args[4] if len(args) > 4 else None
        return "x".join(map(str, args[0].shape[1:])) + (f" window {window}" if window else "")
    return "x".join(map(str, args[0].shape[1:])) if hasattr(args[0], "shape") else ""
