"""One step on the device: copy blocks, run the model, sample."""

from __future__ import annotations

from typing import Protocol

from octavo.core.interfaces import ModelRunnerOutput, SchedulerOutput
from octavo.executor.adapters import ExecutorAdapters
from octavo.executor.forward_batch import ForwardBatchBuilder
from octavo.executor.kv_cache import KVCache, KVCacheLayout
from octavo.executor.sampler import Sampler
from octavo.ops.interface import Array, ForwardBatch, LayerCache, Ops


class Model(Protocol):
    def __call__(self, ops: Ops, batch: ForwardBatch, kv_cache: list[LayerCache]) -> Array:
        """Logits of batch.logits_rows, [num_logits, vocab_size] float32."""
        ...


class ModelRunner:
    """Keeps between steps what makes the next one cheap, by seq_id, and drops it when a plan says so."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        kv_cache: KVCache,
        layout: KVCacheLayout,
        block_size: int,
        adapters: ExecutorAdapters | None = None,
    ):
        self._model = model
        self._ops = ops
        self._kv_cache = kv_cache
        self._builder = ForwardBatchBuilder(block_size, len(layout.windows), layout.layer_group, ops.to_device)
        self._sampler = Sampler(ops)
        self._adapters = adapters

    @property
    def num_kept_sequences(self) -> int:
        return max(self._builder.num_kept_sequences, self._sampler.num_kept_sequences)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._drop(plan.finished_seq_ids)
        self._drop(plan.preempted_seq_ids)
        if plan.block_copies:
            self._ops.copy_blocks(self._kv_cache.physical, plan.block_copies)
        if not plan.scheduled:
            return ModelRunnerOutput()
        if plan.lora is not None:
            return self._execute_with_adapters(plan)
        return self._run(plan)

    def _execute_with_adapters(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        assert self._adapters is not None, "a plan with adapters, but LoRA is off"
        plan, failures = self._adapters.begin(plan)
        try:
            output = self._run(plan) if plan.scheduled else ModelRunnerOutput()
        finally:
            self._adapters.end()
        output.failures.update(failures)
        return output

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        logits = self._model(self._ops, self._builder.build(plan), self._kv_cache.layers)
        return self._sampler.sample(logits, plan)

    def _drop(self, seq_ids: list[int]) -> None:
        if seq_ids:
            self._builder.drop(seq_ids)
            self._sampler.drop(seq_ids)
