"""Reads safetensors folders: one file or shards with an index, memory-mapped, tensors on demand.

Our own reader, because NumPy has no bfloat16 and the library's NumPy side refuses it. Format: 8 bytes of header length,
a JSON header {name: {dtype, shape, data_offsets}}, the data. Every number in the header is checked before it is used.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import CorruptFileError, ModelSourceError, UnsupportedModelError
from octavo.ops.interface import BFloat16, WeightData
from octavo.weights.pages import release_pages

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "U16": 2, "U32": 4,
    "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
}  # fmt: skip
_READABLE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_READABLE_IN_PARTS = {**_READABLE, "I8": "<i1", "U8": "<u1", "I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True, slots=True)
class SafetensorInfo:
    """offset: in the file, in bytes; dtype: the format's word, "F32", "BF16", ..."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int


class SafetensorsFile:
    """One open file. tensors: name -> SafetensorInfo.

    Raises ModelSourceError when it cannot be opened, CorruptFileError when it is damaged or truncated.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise CorruptFileError(f"{self.path}: the file is empty") from None
        except OSError as error:
            raise ModelSourceError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        header, data_start = self._header()
        self.tensors = {
            name: self._tensor(name, entry, data_start) for name, entry in header.items() if name != "__metadata__"
        }
        by_offset = sorted(self.tensors.values(), key=lambda info: info.offset)
        for before, after in itertools.pairwise(by_offset):
            if before.offset + before.num_bytes > after.offset:
                raise self._corrupt(f"the tensors {before.name!r} and {after.name!r} overlap")

    def read(self, name: str) -> WeightData:
        """A float tensor, as a view of the memory map. Raises UnsupportedModelError for a dtype we cannot read."""
        return self._read(name, _READABLE)

    def read_part(self, name: str) -> np.ndarray:
        """A tensor that is part of a quantized weight: a view for integers, float32 for any float."""
        values = self._read(name, _READABLE_IN_PARTS)
        if isinstance(values, BFloat16):
            return values.to_float32()
        return values.astype(np.float32, copy=False) if values.dtype.kind == "f" else values

    def release(self) -> None:
        """Give the pages that were read back to the system; they are read again when touched again."""
        release_pages(self._map)

    def _read(self, name: str, readable: dict[str, str]) -> np.ndarray | BFloat16:
        info = self.tensors[name]
        if info.dtype not in readable:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} is {info.dtype}; {', '.join(readable)} can be read"
            )
        count = math.prod(info.shape)
        # Copied when the header's length leaves the data unaligned, which the format allows.
        raw = np.frombuffer(self._map, np.uint8, info.num_bytes, info.offset)
        dtype = np.dtype(readable[info.dtype])
        if info.offset % dtype.itemsize:
            raw = raw.copy()
        values = raw.view(dtype)[:count].reshape(info.shape)
        return BFloat16(values) if info.dtype == "BF16" else values

    def _header(self) -> tuple[dict[str, Any], int]:
        size = len(self._map)
        length = int.from_bytes(self._map[:8], "little")
        if size < 8 or length > size - 8:
            raise self._corrupt(f"its header should have {length} bytes, but the file has {size}; fetch it again")
        if length > _MAX_HEADER_BYTES:
            raise self._corrupt(f"its header claims {length} bytes; {_MAX_HEADER_BYTES} are the limit")
        try:
            header = json.loads(self._map[8 : 8 + length], object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            raise self._corrupt(f"its header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise self._corrupt("its header is not a JSON object")
        return header, 8 + length

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) != len(pairs):
            raise self._corrupt("a name occurs twice in its header")
        return keys

    def _tensor(self, name: str, entry: Any, data_start: int) -> SafetensorInfo:
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = [begin, end, *shape]
        except (TypeError, KeyError, ValueError):
            raise self._corrupt(f"the entry of tensor {name!r} is malformed") from None
        if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
            raise self._corrupt(f"the entry of tensor {name!r} has a number that is none or negative")
        if dtype not in _ITEM_BYTES:
            raise UnsupportedModelError(f"{self.path}: tensor {name!r} has the unknown dtype {dtype!r}")
        num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
        if end - begin != num_bytes:
            raise self._corrupt(f"tensor {name!r} of shape {shape} needs {num_bytes} bytes but has {end - begin}")
        if data_start + end > len(self._map):
            raise self._corrupt(
                f"tensor {name!r} ends at byte {data_start + end}, but the file has {len(self._map)}; "
                "it is truncated, fetch it again"
            )
        return SafetensorInfo(name, tuple(shape), dtype, data_start + begin, num_bytes)

    def _corrupt(self, problem: str) -> CorruptFileError:
        return CorruptFileError(f"{self.path}: {problem}")


class SafetensorsFolder:
    """All tensors of a folder: model.safetensors, or the shards that model.safetensors.index.json names."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._file_of: dict[str, SafetensorsFile] = {}
        if (self.folder / _SINGLE).exists():
            file = SafetensorsFile(self.folder / _SINGLE)
            self._file_of = dict.fromkeys(file.tensors, file)
        elif (self.folder / _INDEX).exists():
            self._open_shards()
        else:
            raise ModelSourceError(self._nothing_found())
        self.tensors = {name: file.tensors[name] for name, file in self._file_of.items()}

    def read(self, name: str) -> WeightData:
        return self._file_of[name].read(name)

    def read_part(self, name: str) -> np.ndarray:
        return self._file_of[name].read_part(name)

    def release(self, names: Iterable[str]) -> None:
        """Give the pages of the files that hold these tensors back to the system."""
        for file in {self._file_of[name] for name in names}:
            file.release()

    def _open_shards(self) -> None:
        index_path = self.folder / _INDEX
        try:
            weight_map = json.loads(index_path.read_bytes())["weight_map"]
            shard_of = {str(name): str(shard) for name, shard in weight_map.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CorruptFileError(f"{index_path}: has no readable weight_map") from None
        shard_names = sorted(set(shard_of.values()))
        for shard in shard_names:
            if Path(shard).name != shard:
                raise CorruptFileError(f"{index_path}: names {shard!r}, which is not a file of this folder")
        missing = [shard for shard in shard_names if not (self.folder / shard).exists()]
        if missing:
            raise ModelSourceError(
                f"{self.folder}: of {len(shard_names)} weight files {len(missing)} are missing: "
                f"{', '.join(missing[:5])}"
            )
        files = {shard: SafetensorsFile(self.folder / shard) for shard in shard_names}
        for name, shard in shard_of.items():
            if name not in files[shard].tensors:
                raise CorruptFileError(f"{index_path}: says that {name!r} is in {shard}, but it is not")
            self._file_of[name] = files[shard]

    def _nothing_found(self) -> str:
        if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pth")):
            return (
                f"{self.folder}: has pickled weights only (.bin, .pth), which can run code when read; "
                f"Octavo reads {_SINGLE}, or a GGUF file"
            )
        return f"{self.folder}: has neither {_SINGLE} nor {_INDEX}"
