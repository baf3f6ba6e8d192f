"""Puts adapters around the layers of a model after it was made: model files never mention LoRA.

A step without adapters runs the layers as they are. With some, each sublayer is called with what they add.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.lora.manager import PackedAdapter
from octavo.models.layers import Attention, GatedMLP
from octavo.ops.interface import Array, AttentionBatch, LayerCache, LoraRows, Ops, SublayerLora


class AdapterStep:
    """Which rows of the step that runs have which adapters; one object that all layers of a model look at."""

    def __init__(self) -> None:
        self._rows: LoraRows | None = None  # None when no row has one
        self._adapters: tuple[PackedAdapter, ...] = ()  # one a group of the rows
        # What they add to each sublayer, by layer and by its projections: kept from step to step, as decoding goes on
        # with the same adapters.
        self._found: dict[tuple[int, int], SublayerLora] = {}

    def begin(self, rows: LoraRows, adapters: tuple[PackedAdapter, ...]) -> None:
        """adapters: one a group of `rows`"""
        old = self._adapters
        if len(adapters) != len(old) or any(new is not old[index] for index, new in enumerate(adapters)):
            self.forget()
            self._adapters = adapters
        self._rows = rows

    def end(self) -> None:
        self._rows = None

    def forget(self) -> None:
        """Hold on to no adapter any more."""
        self._adapters = ()
        self._found.clear()

    def find(self, layer: int, first: int) -> SublayerLora | None:
        """first: of the sublayer's two projections, the index in PackedAdapter.layers."""
        rows = self._rows
        if rows is None:
            return None
        lora = self._found.get((layer, first))
        if lora is None:
            projections = [adapter.layers[layer] for adapter in self._adapters]
            lora = self._found[layer, first] = SublayerLora(
                rows, [each[first] for each in projections], [each[first + 1] for each in projections]
            )
        lora.rows = rows
        return lora


class LoraAttention:
    """An `Attention`, and what adapters add to its projections."""

    def __init__(self, inner: Attention, step: AdapterStep, layer: int):
        self.inner = inner
        self._step = step
        self._layer = layer

    def __call__(
        self, ops: Ops, residual: Array, positions: Array, attention: AttentionBatch, cache: LayerCache
    ) -> None:
        lora = self._step.find(self._layer, 0)
        if lora is None:
            self.inner(ops, residual, positions, attention, cache)
        else:
            ops.attention_sublayer(self.inner.sublayer, residual, positions, attention, cache, lora)


class LoraMLP:
    """A `GatedMLP`, and what adapters add to its projections."""

    def __init__(self, inner: GatedMLP, step: AdapterStep, layer: int):
        self.inner = inner
        self._step = step
        self._layer = layer

    def __call__(self, ops: Ops, residual: Array) -> None:
        lora = self._step.find(self._layer, 2)
        if lora is None:
            self.inner(ops, residual)
        else:
            ops.mlp_sublayer(self.inner.sublayer, residual, lora)


def wrap_layers(model: Any, step: AdapterStep) -> None:
    """model: has .layers, each with .attention and .mlp, which are replaced."""
    for index, layer in enumerate(model.layers):
        layer.attention = LoraAttention(layer.attention, step, index)
        layer.mlp = LoraMLP(layer.mlp, step, index)


def group_rows(adapter_ids: Sequence[int], num_rows: Sequence[int]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Rows by adapter: (the ids in the groups' order, rows, start), the latter two as in LoraRows.

    adapter_ids: of each sequence, 0 for none; num_rows: of each, in the order of the step
    """
    rows_of: dict[int, list[int]] = {}
    first = 0
    for adapter_id, count in zip(adapter_ids, num_rows, strict=True):
        if adapter_id:
            rows_of.setdefault(adapter_id, []).extend(range(first, first + count))
        first += count
    ids = sorted(rows_of)
    start = np.zeros(len(ids) + 1, np.int32)
    np.cumsum([len(rows_of[adapter_id]) for adapter_id in ids], out=start[1:])
    rows = np.array([row for adapter_id in ids for row in rows_of[adapter_id]], np.int32)
    return ids, rows, start
