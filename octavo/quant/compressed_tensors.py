"""compressed-tensors checkpoints (llm-compressor): integer weights of 4 and 8 bits, a scale a group or an output.

Format "pack-quantized":
    weight_packed      [N, K * bits / 32] int32, the inputs packed, each code plus 2^(bits - 1)
    weight_scale       [N, G]; G is 1 with strategy "channel"
    weight_zero_point  [N * bits / 32, G] int32, the outputs packed likewise; absent when symmetric
    weight_shape       [2], N and K
    weight_g_idx       [K], the group of each input, with actorder "group"

Formats "int-quantized" and "naive-quantized":
    weight             [N, K] int8
    weight_scale       [N, G]
    weight_zero_point  [N, G] int8; absent when symmetric

Activations that the checkpoint wants in 8 bits, dynamically, get the treatment of all activations here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.errors import CorruptFileError, UnsupportedModelError
from octavo.quant.stored import (
    ReadPart,
    Shape,
    StoredCodes,
    StoredModule,
    check_bits,
    check_group_size,
    check_module,
    count_groups,
    unpack_words,
)

_PACKED = "pack-quantized"
_PLAIN = ("int-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class _WeightGroup:
    """One entry of config_groups: modules that are stored alike. group_size: -1 for one scale an output."""

    targets: tuple[str, ...]
    bits: int
    group_size: int
    is_packed: bool
    is_symmetric: bool
    has_order: bool

    def matches(self, name: str) -> bool:
        return any(_is_target(target, name) for target in self.targets)


class CompressedTensorsScheme:
    name = "compressed-tensors"
    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight")

    def __init__(self, config: Mapping[str, Any]):
        _refuse(config, "kv_cache_scheme")
        _refuse(config, "transform_config")
        sparsity = config.get("sparsity_config") or {}
        if sparsity and sparsity.get("format", "dense") != "dense":
            raise UnsupportedModelError(
                f"config.json: compressed-tensors with the sparsity {sparsity.get('format')!r} is not supported"
            )
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise CorruptFileError("config.json: quantization_config has no config_groups")
        self.groups = [_read_group(str(key), group, config.get("format")) for key, group in groups.items()]
        self.may_reorder = any(group.has_order for group in self.groups)

    def describe_module(self, name: str, parts: Mapping[str, Shape]) -> StoredModule | None:
        if "weight_packed" not in parts and "weight_scale" not in parts:
            return None
        group = self._group_of(name)
        main = "weight_packed" if group.is_packed else "weight"
        if main not in parts or len(parts[main]) != 2:
            raise CorruptFileError(f"{name}: the matrix {name}.{main} is missing")
        num_rows, num_words = parts[main]
        fields = 32 // group.bits if group.is_packed else 1
        num_columns = num_words * fields
        group_size = num_columns if group.group_size == -1 else group.group_size
        num_groups = count_groups(num_columns, group_size)
        zero_rows = count_groups(num_rows, fields) if group.is_packed else num_rows
        wanted: dict[str, Shape] = {"weight_scale": (num_rows, num_groups)}
        if not group.is_symmetric:
            wanted["weight_zero_point"] = (zero_rows, num_groups)
        if group.is_packed:
            wanted["weight_shape"] = (2,)
        if group.has_order:
            wanted["weight_g_idx"] = (num_columns,)
        module = StoredModule(name, (num_rows, num_columns), parts, group.bits, group_size)
        return check_module(module, wanted, optional=("weight_g_idx",))

    def find_order(self, module: StoredModule, read: ReadPart) -> np.ndarray | None:
        if not self._group_of(module.name).has_order or "weight_g_idx" not in module.parts:
            return None
        order = read("weight_g_idx").astype(np.int64)
        if np.array_equal(order, np.arange(module.shape[1]) // module.group_size):
            return None
        if order.min() < 0 or order.max() >= module.parts["weight_scale"][1]:
            raise CorruptFileError(f"{module.name}.weight_g_idx names a group that has no scale")
        return order

    def decode(self, module: StoredModule, read: ReadPart) -> StoredCodes:
        group = self._group_of(module.name)
        zero: np.ndarray | int
        if group.is_packed:
            stored_shape = tuple(read("weight_shape").tolist())
            if stored_shape != module.shape:
                raise CorruptFileError(
                    f"{module.name}.weight_shape says {list(stored_shape)}, its codes {list(module.shape)}"
                )
            bits = group.bits
            codes, zero = unpack_words(read("weight_packed"), bits), 2 ** (bits - 1)
            if not group.is_symmetric:
                # [N / fields, G] words; a word's fields belong to outputs that follow one another.
                words = np.ascontiguousarray(read("weight_zero_point").T)
                zero = np.ascontiguousarray(unpack_words(words, bits).T[: module.shape[0]].astype(np.float32))
        else:
            bits = 8  # as they are stored, also where only 4 of them are used
            stored = read("weight")
            if stored.dtype != np.int8:
                raise UnsupportedModelError(f"{module.name}.weight is {stored.dtype}; int8 is supported")
            codes, zero = stored.view(np.uint8) ^ np.uint8(0x80), 128
            if not group.is_symmetric:
                zero = read("weight_zero_point").astype(np.float32) + np.float32(128)
        return StoredCodes(
            codes=codes,
            scale=read("weight_scale"),
            zero=zero,
            bits=bits,
            group_size=module.group_size,
            order=self.find_order(module, read),
        )

    def _group_of(self, name: str) -> _WeightGroup:
        """Targets are class names, module names and patterns. "Linear" is every matrix but the embedding."""
        for group in self.groups:
            if group.matches(name):
                return group
        raise CorruptFileError(f"config.json: no entry of config_groups is about {name}, whose weights are in codes")


def _read_group(key: str, group: Any, default_format: Any) -> _WeightGroup:
    what = f"config.json: config_groups.{key}"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise UnsupportedModelError(f"{what} quantizes no weights, which Octavo does not support")
    stored_format = group.get("format") or default_format
    if stored_format != _PACKED and stored_format not in _PLAIN:
        raise UnsupportedModelError(
            f"{what}: the compressed-tensors format {stored_format!r} is not supported; "
            f"{', '.join(map(repr, (_PACKED, *_PLAIN)))} are"
        )
    weights = group["weights"]
    if weights.get("type", "int") != "int":
        raise UnsupportedModelError(f"{what}: weights of type {weights['type']!r} are not supported; 'int' is")
    activations = group.get("input_activations")
    if isinstance(activations, Mapping):
        kind, dynamic = activations.get("type", "int"), activations.get("dynamic")
        if kind != "int" or dynamic is not True:
            raise UnsupportedModelError(
                f"{what}: input_activations of type {kind!r} with dynamic {dynamic!r} are not supported; integers that "
                "are quantized dynamically are"
            )
    if group.get("output_activations"):
        raise UnsupportedModelError(f"{what}: output_activations are not supported")
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel"):
        raise UnsupportedModelError(f"{what}: the strategy {strategy!r} is not supported; 'group' and 'channel' are")
    return _WeightGroup(
        targets=tuple(str(target) for target in group.get("targets") or ()),
        bits=check_bits("compressed-tensors", weights.get("num_bits")),
        group_size=-1 if strategy == "channel" else check_group_size("compressed-tensors", weights.get("group_size")),
        is_packed=stored_format == _PACKED,
        is_symmetric=weights.get("symmetric", True) is True,
        # "weight" and "static" only say in which order the writer worked.
        has_order=weights.get("actorder") in ("group", "dynamic", True),
    )


def _is_target(target: str, name: str) -> bool:
    if target.startswith("re:"):
        try:
            return re.match(target[3:], name) is not None
        except re.error:
            raise CorruptFileError(f"config.json: the target {target!r} is no pattern") from None
    return target == "Linear" or target == name or name.endswith(f".{target}")


def _refuse(config: Mapping[str, Any], key: str) -> None:
    value = config.get(key)
    if value not in (None, {}, [], False):
        raise UnsupportedModelError(f"config.json: compressed-tensors with {key} {str(value)[:80]} is not supported")
