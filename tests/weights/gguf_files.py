"""Small GGUF files for tests: made by the gguf package's writer, or byte by byte to be wrong in one place."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # theirs, at import
    gguf = pytest.importorskip(
        "gguf", reason="the gguf package is the oracle of these tests; pip install 'octavo[test]'"
    )


def write_gguf(
    path: Path,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    quantized: Mapping[str, tuple[np.ndarray, str]] | None = None,
) -> Path:
    """metadata:  full key -> bool, int (as uint32), float (as float32), str or list
    quantized: name -> (bytes [N, bytes of a row], type name)
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    for name, (raw, type_name) in (quantized or {}).items():
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def tensor_entry(name: str, shape: tuple[int, ...], type_code: int, offset: int) -> bytes:
    """shape in GGUF's order, fastest first"""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + dims + struct.pack("<IQ", type_code, offset)


def raw_gguf(
    keys: list[bytes] | None = None,
    entries: list[bytes] | None = None,
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    keys, entries = keys or [], entries or []
    header = magic + struct.pack(
        "<IQQ",
        version,
        len(entries) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    head = header + b"".join(keys) + b"".join(entries)
    return head + b"\0" * (-len(head) % 32) + data
