"""One step on the device: copy blocks, run the model, sample."""

from __future__ import annotations

from typing import Protocol

from octavo.core.interfaces import ModelRunnerOutput, SchedulerOutput
from octavo.executor.forward_batch import ForwardBatchBuilder
from octavo.executor.kv_cache import KVCache, KVCacheLayout
from octavo.executor.sampler import Sampler
from octavo.ops.interface import Array, AttentionBatch, ForwardBatch, LayerCache, Ops


class Model(Protocol):
    def __call__(self, ops: Ops, batch: ForwardBatch, kv_cache: list[LayerCache]) -> Array:
        """Logits of batch.logits_rows, [num_logits, vocab_size] float32."""
        ...


class ModelRunner:
    """Keeps between steps what makes the next one cheap, by seq_id, and drops it when a plan says so."""

    def __init__(self, model: Model, ops: Ops, kv_cache: KVCache, layout: KVCacheLayout, block_size: int):
        self._model = model
        self._ops = ops
        self._kv_cache = kv_cache
        self._builder = ForwardBatchBuilder(block_size, len(layout.windows), layout.layer_group)
        self._sampler = Sampler(ops)

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
        batch = _to_device(self._ops, self._builder.build(plan))
        logits = self._model(self._ops, batch, self._kv_cache.layers)
        return self._sampler.sample(logits, plan)

    def _drop(self, seq_ids: list[int]) -> None:
        if seq_ids:
            self._builder.drop(seq_ids)
            self._sampler.drop(seq_ids)


def _to_device(ops: Ops, batch: ForwardBatch) -> ForwardBatch:
    move = ops.to_device
    query_start, context_lens = move(batch.attention[0].query_start), move(batch.attention[0].context_lens)
    return ForwardBatch(
        token_ids=move(batch.token_ids),
        positions=move(batch.positions),
        attention=[
            AttentionBatch(
                query_start=query_start,  # the same for all groups
                context_lens=context_lens,
                block_tables=move(group.block_tables),
                slot_mapping=move(group.slot_mapping),
            )
            for group in batch.attention
        ],
        layer_group=batch.layer_group,
        logits_rows=move(batch.logits_rows),
    )
