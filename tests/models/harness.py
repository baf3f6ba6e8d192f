"""Runs a model over a paged cache without core or executor: the smallest thing that can build a `ForwardBatch`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.models.registry import DecoderModel
from octavo.ops.interface import AttentionBatch, ForwardBatch, LayerCache, Ops


@dataclass
class PagedSequence:
    """token_ids: all tokens so far; num_computed_tokens: those whose keys and values are in the cache."""

    token_ids: list[int]
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)


class ModelHarness:
    """Hands out blocks from a shuffled pool, so that no test passes because blocks happen to lie in order.

    All layers share one block table; windows are the model's own affair then.
    """

    def __init__(self, ops: Ops, model: DecoderModel, num_blocks: int = 64, block_size: int = 4, seed: int = 0):
        self.ops, self.model, self.block_size = ops, model, block_size
        config = model.config
        self.kv_cache: list[LayerCache] = [
            ops.allocate_layer_cache(num_blocks, block_size, config.num_kv_heads, config.head_dim, "float32")
            for _ in range(config.num_layers)
        ]
        self.free_block_ids = np.random.default_rng(seed).permutation(num_blocks).tolist()

    def step(
        self, sequences: Sequence[PagedSequence], num_scheduled: Sequence[int], only_last: bool = False
    ) -> list[np.ndarray]:
        """Compute the next num_scheduled[i] tokens of sequence i, all in one batch.

        Returns the logits of every computed row: one [num_scheduled[i], vocab_size] a sequence; [1, vocab_size] of
        each one's last row with only_last.
        """
        token_ids, positions, slots = [], [], []
        for sequence, count in zip(sequences, num_scheduled, strict=True):
            first, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
            assert 0 < count <= len(sequence.token_ids) - first, (count, first, len(sequence.token_ids))
            while len(sequence.block_ids) * self.block_size < end:
                sequence.block_ids.append(self.free_block_ids.pop())
            token_ids += sequence.token_ids[first:end]
            positions += range(first, end)
            slots += [
                sequence.block_ids[position // self.block_size] * self.block_size + position % self.block_size
                for position in range(first, end)
            ]
            sequence.num_computed_tokens = end
        max_blocks = max(len(sequence.block_ids) for sequence in sequences)
        tables = [sequence.block_ids + [-1] * (max_blocks - len(sequence.block_ids)) for sequence in sequences]
        starts = np.cumsum([0, *num_scheduled])
        rows = starts[1:] - 1 if only_last else np.arange(len(token_ids))
        to_device = self.ops.to_device
        batch = ForwardBatch(
            token_ids=to_device(np.array(token_ids, np.int32)),
            positions=to_device(np.array(positions, np.int32)),
            attention=[
                AttentionBatch(
                    query_start=to_device(starts.astype(np.int32)),
                    context_lens=to_device(np.array([s.num_computed_tokens for s in sequences], np.int32)),
                    block_tables=to_device(np.array(tables, np.int32)),
                    slot_mapping=to_device(np.array(slots, np.int64)),
                )
            ],
            layer_group=[0] * self.model.config.num_layers,
            logits_rows=to_device(rows.astype(np.int32)),
        )
        logits = np.asarray(self.model(self.ops, batch, self.kv_cache))
        if only_last:
            return [row[None] for row in logits]
        return [logits[start:end] for start, end in itertools.pairwise(starts)]

    def logits_of(self, token_ids: Sequence[int], chunks: Sequence[int] | None = None) -> np.ndarray:
        """[len(token_ids), vocab_size] of one sequence alone, computed in chunks (in one when None)."""
        sequence = PagedSequence(list(token_ids))
        return np.concatenate([self.step([sequence], [count])[0] for count in chunks or [len(token_ids)]])
