"""A random Llama of a few thousand numbers, built in code, and the executor and engine around it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from octavo.config import EngineConfig
from octavo.core.engine_core import EngineCore
from octavo.core.interfaces import CoreConfig, SequenceOutput, TokenLogprobs
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.executor.kv_cache import group_layers
from octavo.executor.local import LocalExecutor
from octavo.models.config import ModelConfig
from octavo.models.llama import LlamaModel
from octavo.models.rope import RopeConfig, rotary_table
from octavo.ops.interface import Array, Ops, Weight
from octavo.ops.reference import ReferenceOps
from octavo.report import LedgerRow, MemoryLedger

VOCAB_SIZE = 64
MAX_MODEL_LEN = 128
_EMPTY_LEDGER = MemoryLedger(
    budget_bytes=0, rows=(LedgerRow("weights", 0),), block_bytes=0, num_blocks=0, num_tokens=0,
    max_full_length_sequences=0,
)  # fmt: skip


def make_model_config(layer_windows: tuple[int | None, ...] = (None, None)) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_layers=len(layer_windows),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=32,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10_000.0, 8),
        max_position_embeddings=MAX_MODEL_LEN,
        layer_windows=layer_windows,
        query_scale=8**-0.5,
    )


class RandomParameters:
    """A ParameterSource of random numbers; the same for the same seed."""

    def __init__(self, ops: Ops, shapes: dict[str, tuple[int, ...]], seed: int = 0):
        rng = np.random.default_rng(seed)
        self.ops = ops
        self.arrays = {name: (rng.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}

    def weight(self, names: Sequence[str]) -> Weight:
        return self.ops.pack_weight([self.arrays[name] for name in names])

    def vector(self, names: Sequence[str]) -> Array:
        return self.ops.to_device(np.concatenate([1.0 + self.arrays[name] for name in names]))


def make_model(ops: Ops, layer_windows: tuple[int | None, ...] = (None, None)) -> LlamaModel:
    config = make_model_config(layer_windows)
    parameters = RandomParameters(ops, LlamaModel.parameter_shapes(config))
    table = ops.to_device(rotary_table(config.rope, config.max_position_embeddings))
    return LlamaModel(config, parameters, {config.rope: table})


def make_config(core: CoreConfig) -> EngineConfig:
    return EngineConfig(
        model="tiny",
        served_model_names=("tiny",),
        revision="main",
        trust_remote_code=False,
        device="reference",
        dtype="float32",
        kv_cache_dtype="float32",
        threads=1,
        seed=0,
        enforce_eager=False,
        tensor_parallel_size=1,
        core=core,
        max_model_len_reason="model",
        ledger=_EMPTY_LEDGER,
    )


def make_executor(
    layer_windows: tuple[int | None, ...] = (None, None), ops: Ops | None = None, **core: Any
) -> LocalExecutor:
    settings: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 200,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "kv_group_windows": group_layers(layer_windows).windows,
    }
    config = make_config(CoreConfig(**(settings | core)))
    ops = ops or ReferenceOps()
    return LocalExecutor(make_model(ops, layer_windows), ops, config)


Answer = tuple[list[int], list[TokenLogprobs], str | None]


class TinyEngine:
    """The real core over the tiny model, step by step, with the books checked after each."""

    def __init__(self, layer_windows: tuple[int | None, ...] = (None, None), ops: Ops | None = None, **core: Any):
        self.executor = make_executor(layer_windows, ops, **core)
        self.core = EngineCore(self.executor, self.executor.config.core)
        self.num_preemptions = 0
        self.num_hit_tokens = 0

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[Answer]]:
        """For each prompt its n answers: (tokens, log-probabilities, finish reason)."""
        answers: list[list[Answer]] = [[([], [], None) for _ in range(p.n)] for p in params]
        for number, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            refused = self.core.add(
                Request(
                    request_id=str(number),
                    prompt_token_ids=tuple(prompt),
                    sampling_params=p,
                    seed=1000 + number if p.seed is None else p.seed,
                ),
                now=0.0,
            )
            assert refused == []
        num_steps = 0
        while self.core.has_unfinished():
            result = self.core.step(float(num_steps))
            self.core.check_invariants()
            self.num_preemptions += result.stats.num_preemptions
            self.num_hit_tokens += result.stats.num_prefix_hit_tokens
            for output in result.outputs:
                _append(answers[int(output.request_id)], output)
            num_steps += 1
            assert num_steps < 2000, "the engine does not come to an end"
        return answers


def _append(answers: list[Answer], output: SequenceOutput) -> None:
    assert output.error is None, output
    tokens, logprobs, _ = answers[output.index]
    answers[output.index] = (
        tokens + output.new_token_ids,
        logprobs + output.new_logprobs,
        output.finish_reason.value if output.finish_reason else None,
    )


def save_tiny_folder(folder: Path) -> Path:
    """The same model as a Hugging Face folder without tokenizer."""
    config = make_model_config()
    parameters = RandomParameters(ReferenceOps(), LlamaModel.parameter_shapes(config))
    save_file(parameters.arrays, folder / "model.safetensors")
    description = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": 10_000.0,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(description))
    return folder
