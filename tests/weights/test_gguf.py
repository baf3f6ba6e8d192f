"""The GGUF reader: what it reads, and what it says about files that are wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import CorruptFileError, ModelLoadError, ModelSourceError, UnsupportedModelError
from octavo.weights.gguf import GGUFFile
from tests.weights.gguf_files import gguf, raw_gguf, string, tensor_entry, write_gguf

_MATRIX = np.arange(24, dtype=np.float32).reshape(4, 6)
_METADATA = {
    "a.flag": True,
    "a.number": 7,
    "a.fraction": 0.5,
    "a.text": "héllo",
    "a.tokens": ["<s>", "▁a", "", "b"],
    "a.scores": [0.0, -1.5],
    "a.types": [3, 1, 1],
    "a.flags": [True, False],
}


def small_file(folder: Path) -> Path:
    quantized = gguf.quants.quantize(
        np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    return write_gguf(
        folder / "small.gguf",
        metadata=_METADATA,
        tensors={"matrix": _MATRIX, "half": _MATRIX.astype(np.float16)},
        quantized={"codes": (quantized, "Q8_0")},
    )


def test_metadata_and_tensors_are_those_that_were_written(tmp_path: Path) -> None:
    file = GGUFFile(small_file(tmp_path))
    assert file.metadata["general.architecture"] == "llama"
    assert {key: file.metadata[key] for key in _METADATA} == _METADATA
    assert {name: (info.shape, info.type) for name, info in file.tensors.items()} == {
        "matrix": ((4, 6), "F32"),
        "half": ((4, 6), "F16"),
        "codes": ((4, 64), "Q8_0"),
    }
    np.testing.assert_array_equal(file.read("matrix"), _MATRIX)
    np.testing.assert_array_equal(file.read("half"), _MATRIX.astype(np.float16))
    reader = gguf.GGUFReader(tmp_path / "small.gguf")
    for tensor in reader.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(file.read(tensor.name, exact_float=True), expected)
    assert file.weights_bytes == sum(tensor.n_bytes for tensor in reader.tensors)


def test_reading_an_unknown_name_is_a_key_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        GGUFFile(small_file(tmp_path)).read("nothing")


def test_a_missing_file_and_a_folder_are_said_to_be_unreadable(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelSourceError, match="cannot be read"):
            GGUFFile(path)


def _u32_key(name: str, value: int) -> bytes:
    return string(name) + struct.pack("<II", 4, value)


def _array_key(name: str, element_type: int, count: int, rest: bytes = b"") -> bytes:
    return string(name) + struct.pack("<IIQ", 9, element_type, count) + rest


_F32 = tensor_entry("t", (8,), 0, 0)
_DATA = b"\0" * 64
_DEEP = string("deep") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10 + struct.pack("<IQ", 4, 0)

WRONG_FILES = {
    "empty": (b"", CorruptFileError, "empty"),
    "short": (b"GGUF\3\0\0\0", CorruptFileError, "too few"),
    "magic": (raw_gguf(magic=b"PK\3\4"), CorruptFileError, "no GGUF file"),
    "version 1": (raw_gguf(version=1), UnsupportedModelError, "version 1"),
    "big endian": (raw_gguf(version=3 << 24), UnsupportedModelError, "big-endian"),
    "tensor count": (raw_gguf(num_tensors=1 << 60), CorruptFileError, "claims 1152921504606846976 tensors"),
    "key count": (raw_gguf(num_keys=1 << 40), CorruptFileError, "metadata keys"),
    "key length": (raw_gguf([struct.pack("<Q", 1 << 62) + b"abcdefgh"]), CorruptFileError, "ends inside"),
    "key type": (raw_gguf([string("k") + struct.pack("<II", 77, 0)]), CorruptFileError, "unknown type 77"),
    "key not utf-8": (raw_gguf([string(b"\xff\xfe") + struct.pack("<II", 4, 0)]), CorruptFileError, "not UTF-8"),
    "token not utf-8": (raw_gguf([_array_key("k", 8, 1, string(b"\xc3"))]), CorruptFileError, "not UTF-8"),
    "duplicate key": (raw_gguf([_u32_key("k", 1), _u32_key("k", 2)]), CorruptFileError, "'k' occurs twice"),
    "array length": (raw_gguf([_array_key("k", 4, 1 << 61)]), CorruptFileError, "elements of 'k'"),
    "array of strings length": (raw_gguf([_array_key("k", 8, 1 << 50)]), CorruptFileError, "elements of 'k'"),
    "array element type": (raw_gguf([_array_key("k", 99, 1)]), CorruptFileError, "unknown type 99"),
    "string in array": (
        raw_gguf([_array_key("k", 8, 1, struct.pack("<Q", 1 << 63))]), CorruptFileError, "ends inside an element",
    ),
    "nested arrays": (raw_gguf([_DEEP]), CorruptFileError, "nested"),
    "alignment": (raw_gguf([_u32_key("general.alignment", 12)]), CorruptFileError, "general.alignment is 12"),
    "alignment 0": (raw_gguf([_u32_key("general.alignment", 0)]), CorruptFileError, "general.alignment is 0"),
    "dimensions": (raw_gguf(entries=[tensor_entry("t", (1,) * 5, 0, 0)]), CorruptFileError, "5 dimensions"),
    "no dimensions": (
        raw_gguf(entries=[tensor_entry("t", (), 0, 0)], data=_DATA), CorruptFileError, "0 dimensions",
    ),
    "zero dimension": (raw_gguf(entries=[tensor_entry("t", (4, 0), 0, 0)]), CorruptFileError, "a dimension is 0"),
    "huge": (
        raw_gguf(entries=[tensor_entry("t", (1 << 62, 1 << 62), 0, 0)], data=_DATA), CorruptFileError, "truncated",
    ),
    "truncated data": (raw_gguf(entries=[tensor_entry("t", (8,), 0, 32)], data=b"\0" * 48), CorruptFileError, "fetch"),
    "offset": (raw_gguf(entries=[tensor_entry("t", (8,), 0, 1 << 63)], data=_DATA), CorruptFileError, "truncated"),
    "misaligned": (raw_gguf(entries=[tensor_entry("t", (4,), 0, 4)], data=_DATA), CorruptFileError, "alignment 32"),
    "duplicate tensor": (raw_gguf(entries=[_F32, _F32], data=_DATA), CorruptFileError, "tensor 't' occurs twice"),
    "overlap": (
        raw_gguf(entries=[tensor_entry("t", (16,), 0, 0), tensor_entry("u", (8,), 0, 32)], data=_DATA),
        CorruptFileError,
        "'t' and 'u' overlap",
    ),
    "known format": (
        raw_gguf(entries=[tensor_entry("t", (256,), 23, 0)], data=_DATA), UnsupportedModelError, "stored as IQ4_XS",
    ),
    "unknown format": (
        raw_gguf(entries=[tensor_entry("t", (256,), 4321, 0)], data=_DATA), UnsupportedModelError, "number 4321",
    ),
    "row not whole blocks": (
        raw_gguf(entries=[tensor_entry("t", (33, 2), 8, 0)], data=_DATA), CorruptFileError, "rows of 33",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(WRONG_FILES))
def test_a_wrong_file_is_named_with_what_is_wrong(what: str, tmp_path: Path) -> None:
    content, error, message = WRONG_FILES[what]
    path = tmp_path / "wrong.gguf"
    path.write_bytes(content)
    with pytest.raises(error, match=message) as raised:
        GGUFFile(path)
    assert str(path) in str(raised.value)


@pytest.fixture(scope="module")
def small_content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return small_file(tmp_path_factory.mktemp("small")).read_bytes()


def test_a_file_cut_anywhere_is_an_error(small_content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    end_of_tensors = max(info.offset + info.num_bytes for info in _tensors(small_content, path))
    for length in range(0, end_of_tensors, 7):
        path.write_bytes(small_content[:length])
        with pytest.raises(CorruptFileError):
            GGUFFile(path)


@settings(max_examples=300, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_file_is_read_or_refused_but_never_crashes(
    edits: list[tuple[int, int]], small_content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    damaged = bytearray(small_content)
    for position, byte in edits:
        damaged[position % len(damaged)] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        file = GGUFFile(path)
    except ModelLoadError:
        return
    with np.errstate(all="ignore"):
        for name, info in file.tensors.items():
            assert file.read(name, exact_float=True).shape == info.shape  # type: ignore[union-attr]


def _tensors(content: bytes, path: Path) -> list:
    path.write_bytes(content)
    return list(GGUFFile(path).tensors.values())
