"""Adapters of random numbers as PEFT folders, and an executor that scores prompts under them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from octavo.core.interfaces import ScheduledSequence, SchedulerOutput
from octavo.core.sampling_params import SamplingParams
from octavo.executor.local import LocalExecutor
from octavo.lora.adapter import PARENT_OF, projection_shapes
from octavo.models.config import ModelConfig

ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_tensors(
    config: ModelConfig,
    rank: int,
    targets: Sequence[str] = ALL_PROJECTIONS,
    layers: Iterable[int] | None = None,
    seed: int = 0,
    size: float = 1.0,
) -> dict[str, np.ndarray]:
    """By PEFT's names. What is added is about `size` times what the projection gives for an input of order 1."""
    rng = np.random.default_rng(seed)
    shapes = projection_shapes(config)
    tensors = {}
    for layer in range(config.num_layers) if layers is None else layers:
        for name in targets:
            num_outputs, num_inputs = shapes[name]
            prefix = f"base_model.model.model.layers.{layer}.{PARENT_OF[name]}.{name}"
            down = rng.standard_normal((rank, num_inputs)) / num_inputs**0.5
            up = size * rng.standard_normal((num_outputs, rank)) / rank**0.5
            tensors[f"{prefix}.lora_A.weight"] = down.astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = up.astype(np.float32)
    return tensors


def save_adapter(folder: Path, tensors: dict[str, np.ndarray], **settings: Any) -> Path:
    """settings: of adapter_config.json, over the plainest ones that fit the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.split(".")[-3] for name in tensors if ".lora_" in name})
    rank = next((len(values) for name, values in tensors.items() if ".lora_A." in name), 8)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "a/base",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": targets,
        "bias": "none",
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class Scorer:
    """Scores whole prompts on an executor, each sequence in blocks of its own."""

    def __init__(self, executor: LocalExecutor):
        self.executor = executor
        self._next_seq_id = 0

    def score(
        self, prompts: Sequence[Sequence[int]], adapter_ids: Sequence[int], chunk: int | None = None
    ) -> list[list[float]]:
        """For each prompt the log-probabilities of its tokens from the second on, all computed in one batch.

        chunk: of so many tokens a sequence and step; None takes all at once
        """
        core = self.executor.config.core
        blocks_each = -(-max(map(len, prompts)) // core.block_size)
        assert len(prompts) * blocks_each * len(core.kv_group_windows) <= core.num_blocks
        found: list[list[float]] = [[] for _ in prompts]
        first_id, self._next_seq_id = self._next_seq_id, self._next_seq_id + len(prompts)
        done = 0
        while done < max(map(len, prompts)):
            count = chunk or max(map(len, prompts))
            picked = [index for index, prompt in enumerate(prompts) if done < len(prompt)]
            plan = SchedulerOutput(
                scheduled=[
                    self._schedule(first_id, index, prompts[index], done, count, blocks_each) for index in picked
                ],
                lora=[adapter_ids[index] for index in picked],
            )
            if not any(plan.lora or ()):
                plan.lora = None
            output = self.executor.execute(plan)
            assert not output.failures, output.failures
            for index in picked:
                entries = output.prompt_logprobs.get(first_id + index, [])
                found[index] += [entry.logprob for entry in entries]
            done += count
        self.executor.execute(SchedulerOutput(finished_seq_ids=[first_id + index for index in range(len(prompts))]))
        return found

    def _schedule(
        self, first_id: int, index: int, prompt: Sequence[int], done: int, count: int, blocks_each: int
    ) -> ScheduledSequence:
        num_groups = len(self.executor.config.core.kv_group_windows)
        return ScheduledSequence(
            seq_id=first_id + index,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=done,
            num_scheduled_tokens=min(count, len(prompt) - done),
            num_written_tokens=done,
            block_tables=[
                [(index * num_groups + group) * blocks_each + block for block in range(blocks_each)]
                for group in range(num_groups)
            ],
            is_sampling=False,
            sampling_params=SamplingParams(temperature=0.0, prompt_logprobs=0),
            seed=0,
            prompt_logprobs_start=0,
        )
