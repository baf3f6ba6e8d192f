"""Which layers share a block table and which memory, and how many bytes that makes."""

from __future__ import annotations

import pytest

from octavo.executor.kv_cache import (
    KVCacheLayout,
    allocate_kv_cache,
    count_elements_per_slot,
    count_vectors_per_slot,
    group_layers,
)
from octavo.memory_fit import ModelFacts
from octavo.ops.cpu import CpuOps
from octavo.ops.interface import KV_CACHE_DTYPES
from octavo.ops.reference import ReferenceOps

W = 512
GEMMA_270M = (W, W, W, W, W, None) * 3


def test_layers_of_one_kind_are_one_group() -> None:
    layout = group_layers((None,) * 30)
    assert layout.windows == (None,)
    assert layout.layers_per_group == 30
    assert layout.layer_group == (0,) * 30
    assert layout.layer_cache == tuple(range(30))


def test_a_model_with_the_same_window_everywhere_is_one_group_with_a_window() -> None:
    assert group_layers((W,) * 4).windows == (W,)


def test_groups_of_gemma_3_270m_have_three_layers() -> None:
    layout = group_layers(GEMMA_270M)
    assert layout.windows == (W, W, W, W, W, None)
    assert layout.layers_per_group == 3
    #                            5 layers with a window, then one that sees everything, three times
    assert layout.layer_group == (0, 0, 0, 1, 1, 5, 1, 2, 2, 2, 3, 5, 3, 3, 4, 4, 4, 5)
    assert layout.layer_cache == (0, 1, 2, 0, 1, 0, 2, 0, 1, 2, 0, 1, 1, 2, 0, 1, 2, 2)
    assert layout.num_unused_layer_slots == 0


def test_the_last_group_of_a_kind_may_have_fewer_layers() -> None:
    layout = group_layers((W, None, W, W, None))
    assert layout.windows == (W, W, None)
    assert layout.layer_group == (0, 2, 0, 1, 2)
    assert layout.layer_cache == (0, 0, 1, 0, 1)
    assert layout.num_unused_layer_slots == 1


@pytest.mark.parametrize("layer_windows", [(None,) * 3, GEMMA_270M, (W, None, W, W, None), (None, W, 7)])
def test_no_two_layers_of_a_group_share_memory_and_all_of_a_group_have_its_window(
    layer_windows: tuple[int | None, ...],
) -> None:
    layout = group_layers(layer_windows)
    places = list(zip(layout.layer_group, layout.layer_cache, strict=True))
    assert len(set(places)) == len(layer_windows)
    assert max(layout.layer_cache) < layout.layers_per_group
    assert tuple(layout.windows[group] for group in layout.layer_group) == layer_windows


def facts_of(layout: KVCacheLayout, num_kv_heads: int, head_dim: int, value_alignment: int = 1) -> ModelFacts:
    return ModelFacts(
        name="some", architecture="llama", window=1, vocab_size=1, row_elements=1, kv_group_windows=layout.windows,
        kv_elements_per_slot=count_elements_per_slot(layout, num_kv_heads, head_dim, value_alignment),
        kv_vectors_per_slot=count_vectors_per_slot(layout, num_kv_heads),
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "vector_bytes"), [("float32", 64 * 4), ("float16", 64 * 2), ("int8", 64 + 4)])
def test_bytes_of_a_token(dtype: str, vector_bytes: int) -> None:
    # SmolLM2-135M: 30 layers x keys and values x 3 heads
    assert facts_of(group_layers((None,) * 30), 3, 64).count_slot_bytes(dtype) == 30 * 2 * 3 * vector_bytes


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_what_the_kernels_allocate_is_what_was_counted(dtype: str) -> None:
    layout = group_layers((W, None, W, W, None))
    cache = allocate_kv_cache(CpuOps(num_threads=1), layout, 7, 16, 2, 24, dtype)
    assert cache.num_bytes == 7 * 16 * facts_of(layout, 2, 24, value_alignment=16).count_slot_bytes(dtype)


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_what_is_allocated_is_what_was_counted(dtype: str) -> None:
    layout = group_layers((W, None, W, W, None))
    cache = allocate_kv_cache(ReferenceOps(), layout, 7, 4, 2, 8, dtype)
    assert cache.num_bytes == 7 * 4 * facts_of(layout, 2, 8).count_slot_bytes(dtype)
    assert len(cache.physical) == 2
    assert [cache.physical.index(layer) for layer in [cache.layers[0], cache.layers[1]]] == [0, 0]
    assert cache.layers[2] is cache.layers[4] is cache.physical[1]
