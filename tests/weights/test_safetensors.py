"""The safetensors reader: what it reads, and what it says about files and folders that are wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from octavo.errors import CorruptFileError, ModelLoadError, ModelSourceError, UnsupportedModelError
from octavo.ops.interface import BFloat16
from octavo.weights.safetensors import SafetensorsFile, SafetensorsFolder

_MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)


def raw_safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def entry(shape: list[Any], begin: Any, end: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_floats_of_both_widths_are_read(tmp_path: Path) -> None:
    save_file({"a": _MATRIX, "b": _MATRIX.astype(np.float16)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert {name: (info.shape, info.dtype) for name, info in file.tensors.items()} == {
        "a": ((3, 4), "F32"),
        "b": ((3, 4), "F16"),
    }
    np.testing.assert_array_equal(file.read("a"), _MATRIX)
    np.testing.assert_array_equal(file.read("b"), _MATRIX.astype(np.float16))


def test_bfloat16_is_read_as_its_bits(tmp_path: Path) -> None:
    bits = np.array([[0x3F80, 0xC000]], np.uint16)  # 1.0, -2.0
    (tmp_path / "x").write_bytes(raw_safetensors({"w": entry([1, 2], 0, 4, "BF16")}, bits.tobytes()))
    data = SafetensorsFile(tmp_path / "x").read("w")
    assert isinstance(data, BFloat16)
    np.testing.assert_array_equal(data.to_float32(), [[1.0, -2.0]])


def test_data_that_lies_at_an_odd_byte_is_read(tmp_path: Path) -> None:
    header = json.dumps({"w": entry([3, 4], 0, 48)}).encode()
    (tmp_path / "x").write_bytes(raw_safetensors(header + b" " * (1 - len(header) % 2), _MATRIX.tobytes()))
    np.testing.assert_array_equal(SafetensorsFile(tmp_path / "x").read("w"), _MATRIX)


def test_a_scalar_and_an_empty_tensor_are_no_trouble(tmp_path: Path) -> None:
    header = {"scalar": entry([], 0, 4), "empty": entry([0, 4], 4, 4)}
    (tmp_path / "x").write_bytes(raw_safetensors(header, struct.pack("<f", 2.5)))
    file = SafetensorsFile(tmp_path / "x")
    assert float(file.read("scalar")) == 2.5  # type: ignore[arg-type]
    assert file.read("empty").shape == (0, 4)


WRONG_FILES: dict[str, tuple[bytes, type[Exception], str]] = {
    "empty": (b"", CorruptFileError, "empty"),
    "short": (b"abc", CorruptFileError, "fetch it again"),
    "header length": (raw_safetensors({}, length=1 << 62), CorruptFileError, "should have 4611686018427387904 bytes"),
    "not json": (raw_safetensors(b"{nonsense"), CorruptFileError, "not JSON"),
    "not utf-8": (raw_safetensors(b'{"\xff": 1}'), CorruptFileError, "not JSON"),
    "deep json": (raw_safetensors(b"[" * 100_000), CorruptFileError, "not JSON"),
    "not an object": (raw_safetensors([1]), CorruptFileError, "not a JSON object"),
    "name twice": (raw_safetensors(b'{"a": 1, "a": 2}'), CorruptFileError, "occurs twice"),
    "no entry": (raw_safetensors({"a": 5}), CorruptFileError, "'a' is malformed"),
    "no shape": (raw_safetensors({"a": {"dtype": "F32", "data_offsets": [0, 4]}}), CorruptFileError, "malformed"),
    "three offsets": (
        raw_safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}),
        CorruptFileError,
        "malformed",
    ),
    "negative": (raw_safetensors({"a": entry([-1], 4, 0)}, b"\0" * 8), CorruptFileError, "negative"),
    "fraction": (raw_safetensors({"a": entry([0.5], 0, 2)}, b"\0" * 8), CorruptFileError, "negative"),
    "size": (raw_safetensors({"a": entry([3], 0, 8)}, b"\0" * 8), CorruptFileError, "needs 12 bytes but has 8"),
    "truncated": (raw_safetensors({"a": entry([4], 0, 16)}, b"\0" * 8), CorruptFileError, "truncated"),
    "huge": (raw_safetensors({"a": entry([1 << 62], 0, 1 << 64)}, b"\0" * 8), CorruptFileError, "truncated"),
    "overlap": (
        raw_safetensors({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, b"\0" * 8), CorruptFileError, "overlap",
    ),
    "dtype": (raw_safetensors({"a": entry([2], 0, 8, "F31")}, b"\0" * 8), UnsupportedModelError, "dtype 'F31'"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(WRONG_FILES))
def test_a_wrong_file_is_named_with_what_is_wrong(what: str, tmp_path: Path) -> None:
    content, error, message = WRONG_FILES[what]
    path = tmp_path / "wrong.safetensors"
    path.write_bytes(content)
    with pytest.raises(error, match=message) as raised:
        SafetensorsFile(path)
    assert str(path) in str(raised.value)


def test_an_unreadable_dtype_is_refused_when_read_and_not_before(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(raw_safetensors({"ids": entry([1], 0, 8, "I64")}, b"\0" * 8))
    file = SafetensorsFile(tmp_path / "x")
    with pytest.raises(UnsupportedModelError, match="'ids' is I64; F32, F16, BF16 can be read"):
        file.read("ids")


@settings(max_examples=200, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=5), cut=st.integers(0, 400))
def test_a_damaged_file_is_read_or_refused_but_never_crashes(
    edits: list[tuple[int, int]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = raw_safetensors(
        {"a": entry([3, 4], 0, 48), "b": entry([4], 48, 56, "BF16")}, _MATRIX.tobytes() + b"12345678"
    )
    damaged = bytearray(content)
    for position, byte in edits:
        damaged[position % len(damaged)] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(damaged[: max(0, len(damaged) - cut // 2)] if cut % 2 else damaged)
    try:
        file = SafetensorsFile(path)
        shapes = {name: file.read(name).shape for name in file.tensors}
    except ModelLoadError:
        return
    assert shapes == {name: info.shape for name, info in file.tensors.items()}


def sharded_folder(folder: Path) -> Path:
    save_file({"a": _MATRIX}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": 2 * _MATRIX}, folder / "model-00002-of-00002.safetensors")
    write_index(folder, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_sharded_folder_reads_like_one_file(tmp_path: Path) -> None:
    folder = SafetensorsFolder(sharded_folder(tmp_path))
    assert set(folder.tensors) == {"a", "b"}
    np.testing.assert_array_equal(folder.read("b"), 2 * _MATRIX)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded_folder(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelSourceError, match=r"of 2 weight files 1 are missing: model-00002-of-00002.safetensors"):
        SafetensorsFolder(tmp_path)


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(tmp_path: Path) -> None:
    sharded_folder(tmp_path)
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"})
    with pytest.raises(CorruptFileError, match=r"says that 'c' is in model-00002-of-00002.safetensors, but it is not"):
        SafetensorsFolder(tmp_path)


def test_an_index_may_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "../elsewhere.safetensors"})
    with pytest.raises(CorruptFileError, match="not a file of this folder"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}'])
def test_an_unreadable_index_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CorruptFileError, match="no readable weight_map"):
        SafetensorsFolder(tmp_path)


def test_a_folder_of_pickles_is_told_from_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"neither model\.safetensors nor"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelSourceError, match="pickled weights only"):
        SafetensorsFolder(tmp_path)
