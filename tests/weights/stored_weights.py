"""Writes random quantized matrices as GPTQ, AWQ and compressed-tensors store them, one number at a time.

On purpose nothing here is vectorized or shared with the readers: each packer is the format's definition as a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs that a word's fields hold, lowest bits first


@dataclass(frozen=True)
class Format:
    """config: the quantization_config; make: (generator, N, K) -> the tensors of one module and its exact values"""

    config: dict[str, Any]
    make: Callable[[np.random.Generator, int, int], tuple[dict[str, np.ndarray], np.ndarray]]


def gptq(
    bits: int = 4, group_size: int = 32, symmetric: bool = False, desc_act: bool = False, version: int = 1
) -> Format:
    config: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": symmetric}
    config |= {"desc_act": desc_act, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}

    def make(generator: np.random.Generator, num_rows: int, num_columns: int) -> tuple[dict[str, np.ndarray], Any]:
        num_groups = _num_groups(num_columns, group_size)
        codes = generator.integers(0, 2**bits, (num_rows, num_columns))
        zero = generator.integers(1, 2**bits, (num_rows, num_groups))
        if symmetric:
            zero[:] = 2 ** (bits - 1)
        scale = _scales(generator, num_rows, num_groups, bits)
        order = np.arange(num_columns) // _size(num_columns, group_size)
        if desc_act:
            order = generator.permutation(order)
        stored_zero = (zero - 1) if version == 1 else zero
        tensors = {
            "qweight": pack(codes.T, bits, axis=0),
            "qzeros": pack(stored_zero.T, bits, axis=1),
            "scales": np.ascontiguousarray(scale.T),
            "g_idx": order.astype(np.int32),
        }
        return tensors, scale.astype(np.float32)[:, order] * (codes - zero[:, order]).astype(np.float32)

    return Format(config, make)


def awq(group_size: int = 32) -> Format:
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}

    def make(generator: np.random.Generator, num_rows: int, num_columns: int) -> tuple[dict[str, np.ndarray], Any]:
        num_groups = _num_groups(num_columns, group_size)
        codes = generator.integers(0, 16, (num_rows, num_columns))
        zero = generator.integers(0, 16, (num_rows, num_groups))
        scale = _scales(generator, num_rows, num_groups, 4)
        tensors = {
            "qweight": pack(codes.T, 4, axis=1, order=AWQ_ORDER),
            "qzeros": pack(zero.T, 4, axis=1, order=AWQ_ORDER),
            "scales": np.ascontiguousarray(scale.T),
        }
        order = np.arange(num_columns) // _size(num_columns, group_size)
        return tensors, scale.astype(np.float32)[:, order] * (codes - zero[:, order]).astype(np.float32)

    return Format(config, make)


def compressed_tensors(
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    packed: bool = True,
    actorder: str | None = None,
    **group_options: Any,
) -> Format:
    """group_size -1 is the strategy "channel"."""
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric, "actorder": actorder}
    weights |= {"strategy": "channel" if group_size == -1 else "group", "dynamic": False}
    weights["group_size"] = None if group_size == -1 else group_size
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if packed else "int-quantized",
        "config_groups": {"group_0": group | group_options},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }

    def make(generator: np.random.Generator, num_rows: int, num_columns: int) -> tuple[dict[str, np.ndarray], Any]:
        num_groups = _num_groups(num_columns, group_size)
        half = 2 ** (bits - 1)
        codes = generator.integers(-half, half, (num_rows, num_columns))
        zero = generator.integers(-half, half, (num_rows, num_groups))
        if symmetric:
            zero[:] = 0
        scale = _scales(generator, num_rows, num_groups, bits)
        order = np.arange(num_columns) // _size(num_columns, group_size)
        tensors: dict[str, np.ndarray] = {"weight_scale": scale}
        if actorder == "group":
            order = generator.permutation(order)
            tensors["weight_g_idx"] = order.astype(np.int32)
        if packed:
            tensors["weight_packed"] = pack(codes + half, bits, axis=1)
            tensors["weight_shape"] = np.array([num_rows, num_columns], np.int64)
        else:
            tensors["weight"] = codes.astype(np.int8)
        if not symmetric:
            tensors["weight_zero_point"] = pack(zero + half, bits, axis=0) if packed else zero.astype(np.int8)
        return tensors, scale.astype(np.float32)[:, order] * (codes - zero[:, order]).astype(np.float32)

    return Format(config, make)


def pack(numbers: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Unsigned numbers [A, B] into 32-bit words along an axis, the first in the lowest bits."""
    if axis == 0:
        return np.ascontiguousarray(pack(numbers.T, bits, 1, order).T)
    fields = 32 // bits
    words = np.zeros((len(numbers), -(-numbers.shape[1] // fields)), np.uint32)
    for row, column in np.ndindex(words.shape):
        word = 0
        for field in range(fields):
            index = column * fields + (field if order is None else order[field])
            if index < numbers.shape[1]:
                word |= int(numbers[row, index]) << (bits * field)
        words[row, column] = word
    return words.view(np.int32)


def _size(num_columns: int, group_size: int) -> int:
    return num_columns if group_size == -1 else group_size


def _num_groups(num_columns: int, group_size: int) -> int:
    return -(-num_columns // _size(num_columns, group_size))


def _scales(generator: np.random.Generator, num_rows: int, num_groups: int, bits: int) -> np.ndarray:
    """Of a size that gives the weights of a tiny model the order 0.1."""
    return (generator.uniform(0.5, 1.5, (num_rows, num_groups)) * 0.4 / 2**bits).astype(np.float16)
