"""The measurements of a model in this process, on a tiny one: what they report, never how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import EngineArgs
from octavo.bench import step as step_module
from octavo.bench.costs import Cost
from octavo.bench.result import from_json, to_json
from octavo.bench.step import (
    MODEL_PYTHON,
    OTHER,
    SAMPLE,
    SAMPLING_PYTHON,
    StepTimes,
    make_rows,
    measure_step,
    scale_watch_cost,
    subtract_watch_cost,
)
from octavo.bench.throughput import make_row, measure_throughput
from octavo.errors import ConfigError
from octavo.weights.source import ModelSource
from tests.engine.fake_model import make_tokenizer
from tests.executor.tiny_model import save_tiny_folder
from tests.models.backends import CPU_PROBLEM
from tests.models.test_load_model import checkpoint

needs_kernels = pytest.mark.skipif(CPU_PROBLEM is not None, reason=CPU_PROBLEM or "")


def ignore_progress(what: str, num_done: int, num_total: int) -> None:
    pass


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, Any]:
    """What stands in for a model that is found and loaded."""
    source = ModelSource(path=save_tiny_folder(tmp_path), kind="folder", name="tiny")
    return {"source": source, "tokenizer": make_tokenizer(has_bos=False)}


def args(**changes: Any) -> EngineArgs:
    return EngineArgs(**{"device": "reference", "max_num_seqs": 4, "kv_cache_memory_bytes": 2**20, **changes})


def test_throughput_of_each_batch_size(tiny: dict[str, Any]) -> None:
    result = measure_throughput(args(), [1, 3], 8, 4, 2, 0, ignore_progress, **tiny)
    assert [(row.name, row.x) for row in result.rows] == [("1", 1), ("3", 3)]
    for row in result.rows:
        assert row.metrics["output_tokens_per_s"] > 0  # type: ignore[operator]
    assert (result.kind, result.subject) == ("throughput", "tiny")
    assert from_json(to_json(result)) == result


def test_the_arithmetic_of_throughput() -> None:
    row = make_row("m", 2, prompt_tokens=10, max_tokens=5, prefill_s=[2.0, 1.0, 9.0], whole_s=[4.0, 3.0, 99.0])
    assert row.metrics["prefill_tokens_per_s"] == 10.0
    assert row.metrics["decode_tokens_per_s"] == 4.0  # 2 sequences, 4 tokens after the first, in 4 - 2 s
    assert row.metrics["decode_step_ms"] == 500.0
    assert row.metrics["output_tokens_per_s"] == 2.5
    assert row.metrics["total_tokens_per_s"] == 7.5
    disturbed = make_row("m", 2, 10, 5, prefill_s=[3.0], whole_s=[2.0])
    assert disturbed.metrics["decode_tokens_per_s"] is None


def test_lengths_beyond_the_window_are_refused(tiny: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 128"):
        measure_throughput(args(), [1], 120, 20, 1, 0, ignore_progress, **tiny)


def test_a_step_s_parts_are_all_there(tiny: dict[str, Any]) -> None:
    result = measure_step(args(), [1, 3], 8, 12, 0, ignore_progress, **tiny)
    for size, group in ((1, "1 sequence"), (3, "3 sequences")):
        rows = {row.name: row for row in result.rows if row.x == size}
        assert {row.group for row in rows.values()} == {group}
        # Two layers, and the head.
        assert rows["op attention_sublayer"].metrics["calls_per_step"] == 2
        assert rows["op mlp_sublayer"].metrics["calls_per_step"] == 2
        assert rows["op logits"].metrics["calls_per_step"] == 1
        assert rows[SAMPLE].metrics["calls_per_step"] == 1
        assert {"scheduler: plan", "scheduler: update", "batch building", "output: text", OTHER} <= set(rows)
        whole = rows.pop("whole step").metrics
        assert sum(row.metrics["share"] for row in rows.values()) == pytest.approx(1.0)  # type: ignore[misc]
        assert 0 < whole["python_share"] < 1  # type: ignore[operator]
        assert whole["python_share"] < whole["overhead_share"]  # type: ignore[operator]
    assert from_json(to_json(result)) == result


def test_the_engine_is_as_it_was_after_a_step_was_watched(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = []

    class Noting(step_module.LoadedModel):
        def __init__(self, *arguments: Any, **stand_ins: Any):
            super().__init__(*arguments, **stand_ins)
            models.append(self)

    monkeypatch.setattr(step_module, "LoadedModel", Noting)
    measure_step(args(), [1], 8, 8, 0, ignore_progress, **tiny)
    llm: Any = models[0].llm
    runner: Any = models[0].executor._runner
    assert runner._ops is runner._sampler._ops is models[0].executor.ops
    assert not {"_step", "_deliver"} & set(vars(llm))
    assert not {"schedule", "update"} & set(vars(llm._core.scheduler))
    assert "execute" not in vars(models[0].executor)


def test_the_arithmetic_of_a_step() -> None:
    times = {MODEL_PYTHON: 2000, "op linear": 6000, OTHER: 2000}
    calls = {MODEL_PYTHON: 1, "op linear": 3, OTHER: 1}
    plain = [StepTimes(10_000, {}, {})] * 4
    watched = [StepTimes(10_000, dict(times), dict(calls))] * 4
    rows = {row.name: row for row in make_rows(1, plain, watched, (0.0, 0.0), call_cost_ns=100.0)}
    assert rows["op linear"].metrics == {
        "time_us": 6.0,
        "share": 0.6,
        "calls_per_step": 3,
        "time_per_call_us": 2.0,
    }
    whole = rows["whole step"].metrics
    assert (whole["step_us"], whole["python_us"], whole["python_share"]) == (10.0, 4.0, 0.4)
    assert whole["overhead_share"] == pytest.approx(0.43)
    assert next(iter(rows)) == "op linear"


def test_what_the_watches_cost_is_taken_off_where_it_falls() -> None:
    times = {MODEL_PYTHON: 1000.0, "op linear": 500.0, SAMPLING_PYTHON: 300.0, SAMPLE: 50.0, OTHER: 100.0}
    calls = {MODEL_PYTHON: 1.0, "op linear": 10.0, SAMPLING_PYTHON: 1.0, SAMPLE: 1.0, OTHER: 1.0}
    assert subtract_watch_cost(times, calls, (10.0, 20.0)) == {
        MODEL_PYTHON: 1000 - 10 - 10 * 20,
        "op linear": 500 - 10 * 10,
        SAMPLING_PYTHON: 300 - 10 - 20,
        SAMPLE: 50 - 10,
        OTHER: 100 - 10 - 2 * 20,
    }


def test_the_watches_cost_is_what_the_steps_show_when_that_is_more() -> None:
    assert scale_watch_cost((1.0, 3.0), 80.0, {"a": 10}) == (2.0, 6.0)
    assert scale_watch_cost((1.0, 3.0), -5.0, {"a": 10}) == (1.0, 3.0)
    assert scale_watch_cost((0.0, 0.0), 80.0, {"a": 10}) == (0.0, 0.0)


@needs_kernels
def test_kernels_at_the_shapes_of_the_model(tmp_path: Path) -> None:
    from octavo.bench.kernels import measure_kernels

    checkpoint(tmp_path)
    model = {
        "source": ModelSource(path=tmp_path, kind="folder", name="tiny"),
        "tokenizer": make_tokenizer(has_bos=False),
    }
    result = measure_kernels(args(device="cpu", threads=1), [1, 3], 20, True, ignore_progress, **model)
    rows = {(row.name, row.x): row.metrics for row in result.rows}
    # Queries, keys and values; the attention's output; gate and up; down; the head.
    linears = [name for name, rows in rows if name.startswith("linear") and rows == 3]
    assert [name.split()[1] for name in linears] == ["128x64", "64x64", "192x64", "64x96", "100x64"]
    head = rows[linears[-1], 3]
    assert head["operations"] == 2 * 3 * 100 * 64
    assert head["ratio_to_numpy"] is not None
    assert rows["attention decode 4x16, context 20", 3]["operations"] == 4 * 4 * 16 * 3 * 20
    assert rows["attention prefill 4x16, context 20", 3]["operations"] == 4 * 4 * 16 * (18 + 19 + 20)
    assert ("attention prefill 4x16, context 20", 1) not in rows
    assert all(metrics["limit_share"] > 0 for metrics in rows.values())  # type: ignore[operator]
    assert any("NumPy" in note for note in result.notes)
    assert [row.x for row in result.rows] == sorted(row.x for row in result.rows)


@needs_kernels
def test_the_arithmetic_of_a_kernel() -> None:
    from octavo.bench import kernels
    from octavo.bench.peaks import Peaks

    peaks = Peaks(read_bytes_per_s=10e9, memory_bytes_per_s=5e9, integer_per_s=100e9, float_per_s=50e9)
    row = kernels.make_row("linear", 4, Cost(1e9, 10e9, is_integer=True), 0.2, 0.4, peaks)
    assert row.metrics["read_gbs"] == 5.0
    assert row.metrics["bandwidth_share"] == 0.5
    assert row.metrics["gops"] == 50.0
    assert row.metrics["peak_share"] == 0.5
    assert row.metrics["limit_share"] == pytest.approx(0.5)
    assert row.metrics["ratio_to_numpy"] == 2.0
    moving = kernels.make_row("take_rows", 4, Cost(1e9, 0), 0.2, None, peaks)
    assert (moving.metrics["gops"], moving.metrics["ratio_to_numpy"]) == (None, None)


@needs_kernels
def test_the_machine_s_limits_do_the_work_they_say() -> None:
    import numpy as np

    from octavo import _cpu

    for isa in _cpu.runnable_isas():
        peak = _cpu.MachinePeak(isa, 2)
        assert peak.read(np.ones(1003, np.uint8)) == 1000
        once = peak.integer_operations(1), peak.float_operations(1)
        assert once[0] > 0
        assert once[1] > 0
        assert (peak.integer_operations(3), peak.float_operations(3)) == (3 * once[0], 3 * once[1])
    with pytest.raises(ValueError, match="no such kernels"):
        _cpu.MachinePeak("abacus", 1)
