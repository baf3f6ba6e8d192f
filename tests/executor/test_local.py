"""The executor under the real core on a tiny model: the same bits whatever happens besides, and loading from disk."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.config import EngineArgs, EngineConfig
from octavo.core.interfaces import ScheduledSequence, SchedulerOutput
from octavo.core.sampling_params import SamplingParams
from octavo.errors import ConfigError, ModelLoadError
from octavo.executor.local import LocalExecutor, make_ops
from octavo.machine import Machine
from octavo.ops.interface import Ops
from octavo.ops.reference import ReferenceOps
from octavo.report import StartReport
from octavo.weights.source import ModelSource
from tests.executor.tiny_model import VOCAB_SIZE, TinyEngine, make_executor, save_tiny_folder

MACHINE = Machine(total_bytes=2**30, available_bytes=2**30, num_cores=2, num_cpus=4)
PLAIN = (None, None)
MIXED = (6, 6, None, 6)  # 3 layers with a window, one without: groups of 1
WINDOWS = {"plain": PLAIN, "mixed": MIXED, "window": (6, 6)}


def make_prompts() -> list[list[int]]:
    rng = random.Random(1)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(16)]
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 4, 5, 30)]
    return [*prompts, [*shared, 1, 2, 3], [*shared, 4], shared, shared[:9]]


def make_params() -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=12,
            temperature=0.0 if index % 3 == 0 else 0.9,
            top_p=0.95,
            seed=index,
            logprobs=3,
            repetition_penalty=1.2 if index % 2 else 1.0,
            presence_penalty=0.5 if index % 4 == 2 else 0.0,
            n=2 if index == 5 else 1,
        )
        for index in range(8)
    ]


@pytest.fixture(scope="module", params=list(WINDOWS))
def windows(request: Any) -> tuple[int | None, ...]:
    return WINDOWS[request.param]


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request: Any) -> Ops:
    if request.param == "reference":
        return ReferenceOps()
    try:
        return make_ops("cpu", threads=2)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def alone(windows: tuple[int | None, ...], ops: Ops) -> list[Any]:
    return [
        TinyEngine(windows, ops, enable_prefix_caching=False).run([prompt], [params])[0]
        for prompt, params in zip(make_prompts(), make_params(), strict=True)
    ]


def test_all_at_once(windows: tuple[int | None, ...], ops: Ops, alone: list[Any]) -> None:
    assert all(len(tokens) == len(logprobs) == 12 for answers in alone for tokens, logprobs, _ in answers)
    assert TinyEngine(windows, ops, enable_prefix_caching=False).run(make_prompts(), make_params()) == alone


@pytest.mark.parametrize("num_tokens", [9, 17])
def test_in_small_chunks(windows: tuple[int | None, ...], ops: Ops, alone: list[Any], num_tokens: int) -> None:
    engine = TinyEngine(windows, ops, max_num_batched_tokens=num_tokens, max_num_seqs=9)
    assert engine.run(make_prompts(), make_params()) == alone


def test_with_blocks_of_another_size(windows: tuple[int | None, ...], ops: Ops) -> None:
    # The size may change the order of additions (it is an option of the engine), but what else goes on may not.
    prompts, params = make_prompts(), make_params()
    alone = [TinyEngine(windows, ops, block_size=16).run([p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    assert TinyEngine(windows, ops, block_size=16, max_num_batched_tokens=20).run(prompts, params) == alone


def test_with_a_cold_and_a_warm_prefix_cache(windows: tuple[int | None, ...], ops: Ops, alone: list[Any]) -> None:
    engine = TinyEngine(windows, ops, enable_prefix_caching=True)
    assert engine.run(make_prompts(), make_params()) == alone
    num_hit_tokens = engine.num_hit_tokens
    assert engine.run(make_prompts(), make_params()) == alone
    assert engine.num_hit_tokens > num_hit_tokens + 40


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_with_so_few_blocks_that_sequences_are_preempted(
    windows: tuple[int | None, ...], ops: Ops, alone: list[Any], enable_prefix_caching: bool
) -> None:
    num_groups = len(TinyEngine(windows).executor.config.core.kv_group_windows)
    engine = TinyEngine(
        windows,
        ops,
        num_blocks=12 * num_groups,
        max_model_len=48,
        max_num_batched_tokens=12,
        max_num_seqs=12,
        enable_prefix_caching=enable_prefix_caching,
    )
    assert engine.run(make_prompts(), make_params()) == alone
    if None in windows:  # with a window in every layer a sequence soon holds no more than five blocks
        assert engine.num_preemptions > 0


def test_nothing_is_kept_of_sequences_that_are_over() -> None:
    engine = TinyEngine()
    engine.run(make_prompts(), make_params())
    # The last news comes with the next plan that is executed.
    engine.run([[1, 2]], [SamplingParams(max_tokens=2)])
    assert engine.executor._runner.num_kept_sequences <= 1


def make_sequence(**changes: Any) -> ScheduledSequence:
    fields: dict[str, Any] = {
        "seq_id": 1,
        "token_ids": [5, 6, 7],
        "num_prompt_tokens": 3,
        "num_computed_tokens": 0,
        "num_scheduled_tokens": 3,
        "num_written_tokens": 0,
        "block_tables": [[2]],
        "is_sampling": True,
        "sampling_params": SamplingParams(temperature=0.0, logprobs=1),
        "seed": 0,
    }
    return ScheduledSequence(**(fields | changes))


def test_a_step_without_sampling_computes_and_returns_nothing() -> None:
    executor = make_executor()
    output = executor.execute(SchedulerOutput(scheduled=[make_sequence(num_scheduled_tokens=2, is_sampling=False)]))
    assert (output.token_ids, output.logprobs, output.failures) == ({}, {}, {})
    chunked = executor.execute(
        SchedulerOutput(scheduled=[make_sequence(num_computed_tokens=2, num_scheduled_tokens=1, num_written_tokens=2)])
    )
    assert chunked == make_executor().execute(SchedulerOutput(scheduled=[make_sequence()]))


def test_a_plan_with_news_only_is_fine() -> None:
    executor = make_executor()
    assert executor.execute(SchedulerOutput(finished_seq_ids=[3], preempted_seq_ids=[4])).token_ids == {}


def test_blocks_are_copied_before_anything_is_written() -> None:
    executor = make_executor()
    executor.execute(SchedulerOutput(scheduled=[make_sequence()]))
    grown = {"token_ids": [5, 6, 7, 8], "num_computed_tokens": 3, "num_scheduled_tokens": 1, "num_written_tokens": 3}
    copied = executor.execute(
        SchedulerOutput(scheduled=[make_sequence(seq_id=2, block_tables=[[9]], **grown)], block_copies=[(2, 9)])
    )
    own = executor.execute(SchedulerOutput(scheduled=[make_sequence(**grown)]))
    assert copied.token_ids[2] == own.token_ids[1]
    assert copied.logprobs[2] == own.logprobs[1]


def test_a_sequence_with_nan_fails_and_its_neighbour_does_not() -> None:
    executor = make_executor()
    executor.kv_cache.physical[0].keys[7] = np.nan
    broken = make_sequence(
        seq_id=2, block_tables=[[7]], num_computed_tokens=2, num_scheduled_tokens=1, num_written_tokens=2
    )
    output = executor.execute(SchedulerOutput(scheduled=[make_sequence(), broken]))
    assert set(output.token_ids) == {1}
    assert "not finite" in output.failures[2]


# --- loading --------------------------------------------------------------------------------------------------


def load(folder: Path, **args: Any) -> LocalExecutor:
    return LocalExecutor.load(
        EngineArgs(device="reference", **args), ModelSource(path=folder, kind="folder", name="tiny"), machine=MACHINE
    )


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_the_ledger_counts_the_cache_of_an_odd_head_size(tmp_path: Path, device: str) -> None:
    # head_dim is 8; the C++ kernels pad a value to 16.
    source = ModelSource(path=save_tiny_folder(tmp_path), kind="folder", name="tiny")
    executor = LocalExecutor.load(EngineArgs(device=device, dtype="float32"), source, machine=MACHINE)
    assert executor.report.ledger.get_bytes("KV cache") == executor.kv_cache.num_bytes > 0


def test_load_reports_what_it_did(tmp_path: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    executor = LocalExecutor.load(
        EngineArgs(device="reference", enforce_eager=True),
        ModelSource(path=save_tiny_folder(tmp_path), kind="folder", name="tiny"),
        lambda what, done, total: progress.append((what, done, total)),
        machine=MACHINE,
    )
    report = executor.report
    assert report.architecture == "llama"
    assert report.served_model_names[0] == "tiny"
    shapes = type(executor.model).parameter_shapes(executor.model_config).values()
    assert report.num_parameters == sum(math.prod(shape) for shape in shapes)
    assert report.weights_bytes == report.ledger.get_bytes("weights") > 4 * report.num_parameters
    assert report.ledger.get_bytes("KV cache") == executor.kv_cache.num_bytes
    assert (report.max_model_len, report.max_model_len_reason) == (128, "model")
    assert [entry.what for entry in report.timeline] == [
        "read the model's description", "start the backend", "load the weights", "reserve the KV cache",
        "run a first step",
    ]  # fmt: skip
    assert any("enforce-eager" in note for note in report.notes)
    what, done, total = progress[-1]
    assert what == "load the weights"
    assert done == total > 0
    assert executor.model_config.eos_token_ids == (2,)


def test_report_and_config_cross_a_process_boundary(tmp_path: Path) -> None:
    executor = load(save_tiny_folder(tmp_path))
    for value, kind in ((executor.report, StartReport), (executor.config, EngineConfig)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind) == value


def test_the_first_step_leaves_the_cache_empty(tmp_path: Path) -> None:
    executor = load(save_tiny_folder(tmp_path))
    assert not any(cache.keys.any() or cache.values.any() for cache in executor.kv_cache.physical)
    assert executor._runner.num_kept_sequences == 0


def test_a_bad_option_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path)
    (folder / "config.json").rename(folder / "kept.json")
    with pytest.raises(ConfigError, match=r"--block-size is 40"):
        load(folder, block_size=40)  # neither is the folder looked at
    (folder / "kept.json").rename(folder / "config.json")
    with pytest.raises(ConfigError, match=r"--max-model-len is 4096, but tiny was made for .* at most 128"):
        load(folder, max_model_len=4096)


def test_weights_with_nan_are_found_at_the_start(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = save_tiny_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match="not finite"):
        load(folder)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_typed_dtype_is_what_the_weights_get(tmp_path: Path, dtype: str) -> None:
    executor = load(save_tiny_folder(tmp_path), dtype=dtype)
    assert executor.config.dtype == dtype
    short = executor.ops.choose_kv_cache_dtype(executor.config.core.block_size, executor.model_config.head_dim)
    assert executor.config.kv_cache_dtype == ("float32" if dtype == "float32" else short)
