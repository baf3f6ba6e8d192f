"""Adapters on an executor: mixed batches, what is kept in memory, and what a broken adapter does to others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.config import EngineArgs
from octavo.core.interfaces import SchedulerOutput
from octavo.errors import ConfigError, CorruptFileError, ModelSourceError, UnsupportedModelError
from octavo.executor.local import LocalExecutor
from octavo.lora.gguf import read_gguf
from octavo.machine import Machine
from octavo.weights.source import ModelSource
from tests.executor.tiny_model import VOCAB_SIZE, make_model_config, save_tiny_folder
from tests.lora.adapters import Scorer, random_tensors, save_adapter
from tests.weights.gguf_files import write_gguf

CONFIG = make_model_config()
MACHINE = Machine(total_bytes=2**30, available_bytes=2**30, num_cores=2, num_cpus=4)
NO_LORA = {"max_cpu_loras": None}
PROMPTS = [np.random.default_rng(seed).integers(0, VOCAB_SIZE, 5 + 4 * seed).tolist() for seed in range(6)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("base"))


def load(base: Path, **options: Any) -> LocalExecutor:
    options = {"enable_lora": True, "max_cpu_loras": 8, "device": "cpu"} | options
    args = EngineArgs(model="tiny", kv_cache_memory_bytes=2**22, **options)
    return LocalExecutor.load(args, ModelSource(path=base, kind="folder", name="tiny"), machine=MACHINE)


def save_random(folder: Path, seed: int, rank: int = 4, **options: Any) -> str:
    return str(save_adapter(folder, random_tensors(CONFIG, rank, seed=seed, **options)))


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"quantization": "int4"}, {"device": "reference"}])
def test_neighbours_chunks_and_lora_itself_change_no_bit(base: Path, options: dict[str, Any], tmp_path: Path) -> None:
    scorer, plain = Scorer(load(base, **options)), Scorer(load(base, **options | {"enable_lora": False} | NO_LORA))
    ranks = (1, 3, 8, 16, 64)
    for index, rank in enumerate(ranks, 1):
        targets = ("q_proj", "v_proj") if index == 2 else ("down_proj",) if index == 3 else None
        some = {} if targets is None else {"targets": targets}
        scorer.executor.load_adapter(index, save_random(tmp_path / str(index), index, rank, **some))
    ids = [0, 1, 2, 3, 4, 5]
    together = scorer.score(PROMPTS, ids)
    assert together == scorer.score(PROMPTS, ids, chunk=3)
    assert together == [scorer.score([prompt], [index])[0] for prompt, index in zip(PROMPTS, ids, strict=True)]
    assert together[0] == plain.score(PROMPTS[:1], [0])[0]
    assert together[::-1] == scorer.score(PROMPTS[::-1], ids[::-1])
    base_only = plain.score(PROMPTS, [0] * 6)
    assert scorer.score(PROMPTS, [0] * 6) == base_only
    assert all(with_adapter != without for with_adapter, without in zip(together[1:], base_only[1:], strict=True))


def test_what_is_reported_of_an_adapter(base: Path, tmp_path: Path) -> None:
    executor = load(base)
    report = executor.load_adapter(7, save_random(tmp_path, 0, rank=16, targets=("q_proj", "down_proj")))
    assert report.rank == 16
    assert report.target_modules == ("q_proj", "down_proj")
    assert report.base_model_name == "a/base"
    assert report.num_bytes == 2 * 2 * 16 * 4 * 32  # 2 bytes, 2 layers, A and B of two projections of 32 x 32


def test_memory_is_that_of_the_matrices_and_the_ledger_keeps_room(base: Path, tmp_path: Path) -> None:
    executor = load(base, max_cpu_loras=40, max_loras=4, max_lora_rank=8)
    room = executor.config.ledger.get_bytes("LoRA adapters")
    stored = 0
    for index in range(1, 41):
        report = executor.load_adapter(index, save_random(tmp_path / str(index), index, rank=8))
        tensors = random_tensors(CONFIG, 8)
        stored += sum(values.size * 2 for values in tensors.values())
        assert report.num_bytes * 40 <= room
    assert executor._adapters is not None
    assert stored <= executor._adapters.manager.num_bytes <= 1.1 * stored
    assert executor._adapters.manager.num_bytes <= room


def test_the_least_recently_used_adapter_leaves_and_is_read_again(base: Path, tmp_path: Path) -> None:
    executor = load(base, max_loras=2, max_cpu_loras=2)
    scorer = Scorer(executor)
    assert executor._adapters is not None
    manager = executor._adapters.manager
    expected = []
    for index in (1, 2, 3):
        executor.load_adapter(index, save_random(tmp_path / str(index), index))
        expected.append(scorer.score(PROMPTS[:1], [index]))
    assert manager.num_in_memory == 2
    for index in (1, 3, 2, 1, 2, 3):
        assert scorer.score(PROMPTS[:1], [index]) == expected[index - 1]
        assert manager.num_in_memory == 2
    # One in use stays when another comes in for the same step.
    assert scorer.score(PROMPTS[:2], [1, 2])[0] == expected[0][0]


def test_an_adapter_whose_file_changed_fails_its_own_sequences_only(base: Path, tmp_path: Path) -> None:
    executor = load(base, max_loras=1, max_cpu_loras=1)
    scorer = Scorer(executor)
    executor.load_adapter(1, save_random(tmp_path / "1", 1))
    path = save_random(tmp_path / "2", 2)
    executor.load_adapter(2, path)
    plain = scorer.score(PROMPTS[:1], [0])
    executor.load_adapter(3, save_random(tmp_path / "3", 3))  # 2 leaves
    os.utime(Path(path) / "adapter_model.safetensors", ns=(1, 1))
    plan = SchedulerOutput(
        scheduled=[scorer._schedule(100, index, PROMPTS[0], 0, len(PROMPTS[0]), 2) for index in range(2)], lora=[2, 0]
    )
    output = executor.execute(plan)
    assert list(output.failures) == [100]
    assert "changed after it was loaded" in output.failures[100]
    assert [entry.logprob for entry in output.prompt_logprobs[101]] == plain[0]


def test_a_replaced_adapter_keeps_its_weights_for_those_that_use_it(base: Path, tmp_path: Path) -> None:
    executor = load(base)
    scorer = Scorer(executor)
    path = save_random(tmp_path, 1)
    executor.load_adapter(1, path)
    old = scorer.score(PROMPTS[:1], [1])
    save_random(tmp_path, 2)
    executor.load_adapter(2, path)
    new = scorer.score(PROMPTS[:1], [2])
    assert old != new
    both = scorer.score([PROMPTS[0], PROMPTS[0]], [1, 2])
    assert both == [old[0], new[0]]
    executor.unload_adapter(1)
    assert scorer.score(PROMPTS[:1], [2]) == new


def test_a_bad_adapter_changes_nothing(base: Path, tmp_path: Path) -> None:
    executor = load(base, max_lora_rank=8)
    scorer = Scorer(executor)
    executor.load_adapter(1, save_random(tmp_path / "1", 1))
    before = scorer.score(PROMPTS[:2], [0, 1])
    with pytest.raises(ModelSourceError, match="no such adapter"):
        executor.load_adapter(2, str(tmp_path / "nowhere"))
    with pytest.raises(UnsupportedModelError, match="--max-lora-rank 9"):
        executor.load_adapter(2, save_random(tmp_path / "2", 2, rank=9))
    executor.load_adapter(2, save_random(tmp_path / "3", 2))  # the number is still free
    assert scorer.score(PROMPTS[:2], [0, 1]) == before
    executor.unload_adapter(2)
    executor.unload_adapter(2)


def test_adapters_need_enable_lora(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--enable-lora"):
        load(base, enable_lora=False, **NO_LORA).load_adapter(1, save_random(tmp_path, 1))


def test_unloaded_adapters_are_let_go(base: Path, tmp_path: Path) -> None:
    executor = load(base)
    scorer = Scorer(executor)
    assert executor._adapters is not None
    for index in range(1, 30):
        executor.load_adapter(index, save_random(tmp_path, index))
        scorer.score(PROMPTS[:1], [index])
        executor.unload_adapter(index)
    assert executor._adapters.manager.num_in_memory == 0
    assert executor._adapters.manager.num_bytes == 0


# --- GGUF ----------------------------------------------------------------------------------------------------------

GGUF_NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
GGUF_METADATA = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 6.0}


def as_gguf(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By llama.cpp's names, the rows of q's and k's B in the order that it pairs them in."""
    found = {}
    for name, values in tensors.items():
        *_, layer, _, projection, half, _ = name.split(".")
        if half == "lora_B" and projection in ("q_proj", "k_proj"):
            num_heads = CONFIG.num_heads if projection == "q_proj" else CONFIG.num_kv_heads
            values = values.reshape(num_heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        found[f"blk.{layer}.{GGUF_NAMES[projection]}.weight.{half.lower()}"] = values
    return found


def test_a_gguf_adapter_is_the_same_adapter(base: Path, tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG, 4, seed=3)
    scorer = Scorer(load(base))
    scorer.executor.load_adapter(1, str(save_adapter(tmp_path / "peft", tensors, lora_alpha=6)))
    path = write_gguf(tmp_path / "lora.gguf", "llama", GGUF_METADATA, as_gguf(tensors))
    report = scorer.executor.load_adapter(2, str(path))
    assert report.rank == 4
    first, second = (scorer.score(PROMPTS[:1], [index]) for index in (1, 2))
    assert first == second


@pytest.mark.parametrize(
    ("architecture", "metadata", "extra", "named"),
    [
        ("llama", {"general.type": "model"}, {}, "is no LoRA adapter"),
        ("gemma3", {}, {}, "architecture 'gemma3'"),
        ("llama", {}, {"token_embd.weight.lora_a": np.zeros((4, 32), np.float32)}, "token_embd"),
        ("llama", {}, {"output_norm.weight": np.zeros(32, np.float32)}, "output_norm"),
        ("llama", {"adapter.alora.invocation_tokens": [1, 2]}, {}, "activated LoRA"),
    ],
)
def test_gguf_files_that_are_no_plain_adapter_are_refused_by_name(
    architecture: str, metadata: dict[str, Any], extra: dict[str, np.ndarray], named: str, tmp_path: Path
) -> None:
    tensors = as_gguf(random_tensors(CONFIG, 4)) | extra
    path = write_gguf(tmp_path / "lora.gguf", architecture, GGUF_METADATA | metadata, tensors)
    with pytest.raises(UnsupportedModelError, match=named):
        read_gguf(path, CONFIG, 16)


def test_a_truncated_gguf_adapter_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "lora.gguf", "llama", GGUF_METADATA, as_gguf(random_tensors(CONFIG, 4)))
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(CorruptFileError):
        read_gguf(path, CONFIG, 16)
