"""The arrays behind the block pool: which layers share a block table, how many bytes a block has, and the memory.

A block id of the pool is one slot of `block_size` tokens in each of `layers_per_group` physical layer caches. Layers
with the same window form groups of that many; layer i of every group uses physical cache i. As all groups draw from the
one pool and no block belongs to two tables of different groups, they never meet in a cache:

    Gemma 3 270M: 15 layers see a window, 3 see everything -> 5 + 1 groups of 3 layers, 3 physical caches

                 cache 0   cache 1   cache 2
    group 0      layer 0   layer 1   layer 2      window 512
    group 1      layer 3   layer 4   layer 6      window 512
    ...
    group 5      layer 5   layer 11  layer 17     everything
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.ops.interface import LayerCache, Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLayout:
    """windows:          one entry a group, as in CoreConfig.kv_group_windows
    layers_per_group:    also the number of physical layer caches
    layer_group:         for each layer, its group
    layer_cache:         for each layer, its physical cache
    """

    windows: tuple[int | None, ...]
    layers_per_group: int
    layer_group: tuple[int, ...]
    layer_cache: tuple[int, ...]

    @property
    def num_unused_layer_slots(self) -> int:
        """Places in the last group of a kind that no layer uses: memory that is reserved, but never written."""
        return len(self.windows) * self.layers_per_group - len(self.layer_group)


def group_layers(layer_windows: Sequence[int | None]) -> KVCacheLayout:
    """Layers of one kind: one group of all. Of several kinds: groups as large as the rarest kind has layers, in the
    order in which a kind first appears; the last group of a kind may have fewer layers.
    """
    layers_of: dict[int | None, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        layers_of.setdefault(window, []).append(layer)
    layers_per_group = min(len(layers) for layers in layers_of.values())
    windows: list[int | None] = []
    layer_group, layer_cache = [0] * len(layer_windows), [0] * len(layer_windows)
    for window, layers in layers_of.items():
        for index, layer in enumerate(layers):
            if index % layers_per_group == 0:
                windows.append(window)
            layer_group[layer] = len(windows) - 1
            layer_cache[layer] = index % layers_per_group
    return KVCacheLayout(
        windows=tuple(windows),
        layers_per_group=layers_per_group,
        layer_group=tuple(layer_group),
        layer_cache=tuple(layer_cache),
    )


def count_elements_per_slot(layout: KVCacheLayout, num_kv_heads: int, head_dim: int, value_alignment: int = 1) -> int:
    """Numbers stored for one token in one block: keys and values of a group's layers.

    value_alignment: what the backend pads a value's head_dim to a multiple of
    """
    value_dim = -(-head_dim // value_alignment) * value_alignment
    return layout.layers_per_group * num_kv_heads * (head_dim + value_dim)


def count_vectors_per_slot(layout: KVCacheLayout, num_kv_heads: int) -> int:
    """Keys and values, one a head, that are stored for one token in one block: with int8 each has a scale."""
    return layout.layers_per_group * num_kv_heads * 2


class KVCache:
    """The physical layer caches, and for each layer the one it writes to and reads from.

    physical: copied from when a block is copied, each once
    layers:   for each layer of the model, its cache; groups share them
    """

    def __init__(self, physical: list[LayerCache], layout: KVCacheLayout):
        self.physical = physical
        self.layers = [physical[index] for index in layout.layer_cache]

    @property
    def num_bytes(self) -> int:
        return sum(cache.num_bytes for cache in self.physical)


def allocate_kv_cache(
    ops: Ops, layout: KVCacheLayout, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str
) -> KVCache:
    """Reserve the memory; the system commits it as blocks are first written. dtype: of KV_CACHE_DTYPES."""
    physical = [
        ops.allocate_layer_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype)
        for _ in range(layout.layers_per_group)
    ]
    return KVCache(physical, layout)
