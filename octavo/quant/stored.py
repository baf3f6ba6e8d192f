"""What checkpoints that were quantized by other programs have in common: a module is several tensors, which together
mean one weight matrix in codes.

One file a scheme: `gptq`, `awq`, `compressed_tensors`. Each reads its part of config.json's quantization_config,
refuses by name what it does not know, and turns a module's tensors into `GroupQuantized` without loss:
w = scale * (q - zero) = scale * q + minimum, with the scale of a larger group repeated for each 32 weights.

Tensor layouts are those of the programs that write them; integers are packed in 32-bit words, little-endian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from octavo.errors import CorruptFileError, UnsupportedModelError
from octavo.ops.interface import QUANT_GROUP_SIZE, GroupQuantized

Shape = tuple[int, ...]
# Reads one tensor of a module by the name of its part ("qweight"): integers as they are, floats as float32.
ReadPart = Callable[[str], np.ndarray]


@dataclass(frozen=True, slots=True)
class StoredModule:
    """name: "model.layers.0.mlp.up_proj"; shape: of its weight, [N, K]; parts: part -> shape of that tensor."""

    name: str
    shape: tuple[int, int]
    parts: Mapping[str, Shape]
    bits: int
    group_size: int


class QuantScheme(Protocol):
    """name: as in quantization_config's quant_method, and as --quantization takes it
    parts: the tensors that may belong to one module, by the last part of their name
    may_reorder: whether modules may say by a tensor of their own which input belongs to which group
    """

    @property
    def name(self) -> str: ...

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def may_reorder(self) -> bool: ...

    def describe_module(self, name: str, parts: Mapping[str, Shape]) -> StoredModule | None:
        """The module whose tensors these are, None when its weight is an ordinary float.
        Raises CorruptFileError when shapes do not fit together, UnsupportedModelError for what we cannot read."""
        ...

    def find_order(self, module: StoredModule, read: ReadPart) -> np.ndarray | None:
        """The group of each input, [K], where the groups do not simply follow one another; else None."""
        ...

    def decode(self, module: StoredModule, read: ReadPart) -> StoredCodes: ...


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """w[n, k] = scale[n, g] * (codes[n, k] - zero[n, g]), g the group of input k.

    codes: [N, K] uint8, also for 8 bits; scale: [N, G] float32; zero: [N, G] float32, or one number
    group_size: inputs in a group; order: [K] the group of each input, or None for k // group_size
    """

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | int
    bits: int
    group_size: int
    order: np.ndarray | None = None

    def to_groups(self) -> GroupQuantized:
        """In groups of 32, exactly. The groups must follow one another, and 32 must divide K and their size."""
        assert self.order is None
        num_columns = self.codes.shape[1]
        half = 2 ** (self.bits - 1)
        if self.bits == 8:
            codes = (self.codes ^ np.uint8(0x80)).view(np.int8)  # q - 128
            zero = self.zero - np.float32(128)
        else:
            codes, zero = self.codes, np.asarray(self.zero, np.float32)
        # A symmetric scheme of 8 bits has zero = 128 everywhere, and needs no minimum.
        minimum = None if self.bits == 8 and np.ndim(self.zero) == 0 and self.zero == half else -self.scale * zero
        return GroupQuantized(
            codes,
            self._per_32(self.scale, num_columns),
            None if minimum is None else self._per_32(minimum, num_columns),
            self.bits,
        )

    def dequantize(self) -> np.ndarray:
        """[N, K] float32, in whatever order the groups are."""
        num_columns = self.codes.shape[1]
        order = np.arange(num_columns) // self.group_size if self.order is None else self.order
        zero = np.broadcast_to(np.asarray(self.zero, np.float32), self.scale.shape)
        values = self.codes.astype(np.float32)
        values -= zero[:, order]
        values *= self.scale[:, order]
        return values

    def _per_32(self, numbers: np.ndarray, num_columns: int) -> np.ndarray:
        repeated = np.repeat(numbers, self.group_size // QUANT_GROUP_SIZE, axis=1)
        return np.ascontiguousarray(repeated[:, : num_columns // QUANT_GROUP_SIZE])


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """[..., W] 32-bit words -> [..., W * 32 / bits] uint8, lowest bits first."""
    packed = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    if bits == 8:
        return packed
    codes = np.empty((*packed.shape[:-1], packed.shape[-1], 2), np.uint8)
    np.bitwise_and(packed, 0x0F, out=codes[..., 0])
    np.right_shift(packed, 4, out=codes[..., 1])
    return codes.reshape(*packed.shape[:-1], -1)


def check_bits(scheme: str, bits: Any) -> int:
    """Raises UnsupportedModelError for any number of bits but 4 and 8."""
    if bits not in (4, 8) or isinstance(bits, bool):
        raise UnsupportedModelError(f"config.json: {scheme} with {bits!r} bits is not supported; 4 and 8 are")
    return int(bits)


def check_group_size(scheme: str, group_size: Any) -> int:
    """-1 (one group a row) or a multiple of 32. Raises UnsupportedModelError."""
    is_number = isinstance(group_size, int) and not isinstance(group_size, bool)
    if not is_number or (group_size != -1 and (group_size < 1 or group_size % QUANT_GROUP_SIZE)):
        raise UnsupportedModelError(
            f"config.json: {scheme} with group_size {group_size!r} is not supported; multiples of "
            f"{QUANT_GROUP_SIZE}, and -1 for a whole row, are"
        )
    return int(group_size)


def check_module(module: StoredModule, wanted: Mapping[str, Shape], optional: Iterable[str] = ()) -> StoredModule:
    """Raises CorruptFileError when the tensors are not those `wanted`, and UnsupportedModelError for an odd K."""
    for part, shape in wanted.items():
        if part not in module.parts:
            if part not in optional:
                raise CorruptFileError(f"{module.name}: the tensor {module.name}.{part} is missing")
        elif tuple(module.parts[part]) != shape:
            raise CorruptFileError(
                f"{module.name}.{part} has the shape {list(module.parts[part])}, but {list(shape)} belongs to "
                f"{module.bits}-bit codes of a {list(module.shape)} matrix in groups of {module.group_size}"
            )
    if module.shape[1] % QUANT_GROUP_SIZE:
        raise UnsupportedModelError(
            f"{module.name} has {module.shape[1]} inputs; only multiples of {QUANT_GROUP_SIZE} can be kept in codes"
        )
    return module


def count_groups(num_columns: int, group_size: int) -> int:
    return math.ceil(num_columns / group_size)
