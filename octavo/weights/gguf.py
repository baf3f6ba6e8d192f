"""Reads GGUF files: header and tensor directory in one pass over a memory map, tensors on demand.

Every length is checked against what is left of the file before anything is allocated, so that a damaged file is a
sentence and not a crash. Versions 2 and 3, little-endian. Format: the ggml project's gguf.md.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import CorruptFileError, ModelSourceError, UnsupportedModelError
from octavo.ops.interface import WeightData
from octavo.quant.ggml import GGML_TYPES, UNREADABLE_TYPE_NAMES, decode, decode_exact
from octavo.weights.pages import release_pages

_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_NESTING = 4  # arrays of arrays: no real file has any

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, np.dtype] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
# The fewest bytes a value of a type can take, to refuse absurd counts before looping over them.
_MIN_BYTES = {**{code: dtype.itemsize for code, dtype in _SCALARS.items()}, _STRING: 8, _ARRAY: 12}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """shape: NumPy order, [N, K] for a matrix; type: "F32", "Q4_K", ...; offset: in the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file.

    metadata: key -> bool, int, float, str or list of them ("general.architecture", "tokenizer.ggml.tokens", ...)
    tensors:  name -> TensorInfo, in the file's order

    Raises ModelSourceError when there is no such file, CorruptFileError when it is damaged or truncated, and
    UnsupportedModelError for a version or a tensor format we cannot read.
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
        parser = _Parser(self.path, self._map)
        self.metadata, self.tensors = parser.parse()

    @property
    def weights_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors.values())

    def read(self, name: str, exact_float: bool = False) -> WeightData:
        """A tensor as weight data. Float tensors are views of the memory map: read-only, and read when touched.

        exact_float: float32 exactly as the format defines, also where the codes of `read` only come close (Q6_K).
        Raises KeyError for an unknown name.
        """
        info = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, info.num_bytes, info.offset)
        return (decode_exact if exact_float else decode)(info.type, raw, info.shape)

    def release(self) -> None:
        """Give the pages that were read back to the system; they are read again when touched again."""
        release_pages(self._map)


class _Parser:
    """One pass over header, metadata and tensor directory. `position` is the next byte to read."""

    def __init__(self, path: Path, buffer: mmap.mmap):
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        num_tensors, num_keys = self._header()
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._corrupt(f"the metadata key {key!r} occurs twice")
            metadata[key] = self._value(self._u32(f"the type of {key!r}"), key)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self._corrupt(f"general.alignment is {alignment!r}, not a power of two from 8 to 1048576")
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        data_start = -(-self.position // alignment) * alignment
        return metadata, self._place_tensors(entries, data_start, alignment)

    def _header(self) -> tuple[int, int]:
        if self.size < 24:
            raise self._corrupt(f"{self.size} bytes are too few for a GGUF header")
        if self.buffer[:4] != b"GGUF":
            raise self._corrupt(f"it starts with {self.buffer[:4]!r}, not with b'GGUF'; this is no GGUF file")
        self.position = 4
        version = self._u32("the version")
        if version not in (2, 3):
            if version & 0xFFFF == 0:
                raise UnsupportedModelError(f"{self.path}: a big-endian GGUF file; convert it to little-endian")
            raise UnsupportedModelError(f"{self.path}: GGUF version {version}; versions 2 and 3 can be read")
        num_tensors, num_keys = self._u64("the number of tensors"), self._u64("the number of metadata keys")
        self._check_count(num_tensors, 24, "tensors")
        self._check_count(num_keys, 13, "metadata keys")
        return num_tensors, num_keys

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape, type code, offset from the start of the data)"""
        name = self._string("a tensor's name")
        num_dims = self._u32(f"the number of dimensions of tensor {name!r}")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._corrupt(f"tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
        # GGUF lists the fastest dimension first; NumPy lists it last.
        shape = tuple(self._u64(f"the shape of tensor {name!r}") for _ in range(num_dims))[::-1]
        if 0 in shape:
            raise self._corrupt(f"tensor {name!r} has the shape {list(shape)}: a dimension is 0")
        return name, shape, self._u32(f"the type of tensor {name!r}"), self._u64(f"the offset of tensor {name!r}")

    def _place_tensors(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], data_start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_code, offset in entries:
            if name in tensors:
                raise self._corrupt(f"the tensor {name!r} occurs twice")
            ggml_type = GGML_TYPES.get(type_code)
            if ggml_type is None:
                what = UNREADABLE_TYPE_NAMES.get(type_code, f"an unknown format, number {type_code}")
                readable = ", ".join(known.name for known in GGML_TYPES.values())
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name!r} is stored as {what}; these formats can be read: {readable}"
                )
            if shape[-1] % ggml_type.block_size:
                raise self._corrupt(
                    f"tensor {name!r} is {ggml_type.name} with rows of {shape[-1]}, not a multiple of "
                    f"{ggml_type.block_size}"
                )
            num_bytes = ggml_type.block_bytes
            for length in (*shape[:-1], shape[-1] // ggml_type.block_size):
                num_bytes *= length
            if offset % alignment:
                raise self._corrupt(f"tensor {name!r} starts at {offset}, not a multiple of the alignment {alignment}")
            start = data_start + offset
            if start + num_bytes > self.size:
                raise self._corrupt(
                    f"tensor {name!r} ends at byte {start + num_bytes}, but the file has {self.size}; "
                    "it is truncated, fetch it again"
                )
            tensors[name] = TensorInfo(name, shape, ggml_type.name, start, num_bytes)
        by_offset = sorted(tensors.values(), key=lambda info: info.offset)
        for before, after in itertools.pairwise(by_offset):
            if before.offset + before.num_bytes > after.offset:
                raise self._corrupt(f"the tensors {before.name!r} and {after.name!r} overlap")
        return tensors

    def _value(self, type_code: int, key: str, nesting: int = 0) -> Any:
        if type_code == _STRING:
            return self._string(f"the value of {key!r}")
        if type_code == _ARRAY:
            return self._array(key, nesting)
        return self._scalars(type_code, 1, key)[0]

    def _array(self, key: str, nesting: int) -> list[Any]:
        element_type = self._u32(f"the element type of {key!r}")
        count = self._u64(f"the length of {key!r}")
        if element_type not in _MIN_BYTES:
            raise self._corrupt(f"the elements of {key!r} have the unknown type {element_type}")
        self._check_count(count, _MIN_BYTES[element_type], f"elements of {key!r}")
        if element_type == _STRING:
            return self._strings(count, key)
        if element_type == _ARRAY:
            if nesting == _MAX_NESTING:
                raise self._corrupt(f"{key!r} is nested more than {_MAX_NESTING} deep")
            return [self._array(key, nesting + 1) for _ in range(count)]
        return self._scalars(element_type, count, key)

    def _scalars(self, type_code: int, count: int, key: str) -> list[Any]:
        dtype = _SCALARS.get(type_code)
        if dtype is None:
            raise self._corrupt(f"the value of {key!r} has the unknown type {type_code}")
        start = self._advance(count * dtype.itemsize, f"the value of {key!r}")
        if type_code == _BOOL:
            return [byte != 0 for byte in self.buffer[start : self.position]]
        return np.frombuffer(self.buffer[start : self.position], dtype).tolist()

    def _strings(self, count: int, key: str) -> list[str]:
        """The vocabulary goes through here, hundreds of thousands of strings: everything is local, on purpose."""
        buffer, unpack, size = self.buffer, _U64.unpack_from, self.size
        position = self.position
        raw: list[bytes] = []
        append = raw.append
        last_start = size - 8
        for _ in range(count):
            if position > last_start:
                raise self._truncated(f"an element of {key!r}")
            start = position + 8
            position = start + unpack(buffer, position)[0]
            if position > size:
                raise self._truncated(f"an element of {key!r}")
            append(buffer[start:position])
        self.position = position
        try:
            return [text.decode() for text in raw]
        except UnicodeDecodeError as error:
            raise self._corrupt(f"an element of {key!r} is not UTF-8: {error.object[:40]!r}") from None

    def _string(self, what: str) -> str:
        length = self._u64(f"the length of {what}")
        start = self._advance(length, what)
        text = self.buffer[start : self.position]
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise self._corrupt(f"{what} is not UTF-8: {text[:40]!r}") from None

    def _u32(self, what: str) -> int:
        return _U32.unpack_from(self.buffer, self._advance(4, what))[0]

    def _u64(self, what: str) -> int:
        return _U64.unpack_from(self.buffer, self._advance(8, what))[0]

    def _advance(self, num_bytes: int, what: str) -> int:
        """Step over `num_bytes` and return where they start."""
        start = self.position
        if num_bytes > self.size - start:
            raise self._truncated(what)
        self.position = start + num_bytes
        return start

    def _check_count(self, count: int, min_bytes: int, what: str) -> None:
        if count > (self.size - self.position) // min_bytes:
            raise self._corrupt(f"it claims {count} {what}, more than its {self.size} bytes can hold")

    def _truncated(self, what: str) -> CorruptFileError:
        return self._corrupt(f"the file of {self.size} bytes ends inside {what}; it is truncated or damaged")

    def _corrupt(self, problem: str) -> CorruptFileError:
        return CorruptFileError(f"{self.path}: {problem}")
