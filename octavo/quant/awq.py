"""AWQ checkpoints (AutoAWQ, version "gemm"): 4 bits with zero points. Lin et al. 2023.

qweight  [K, N / 8] int32, the outputs packed, 8 in a word in the order of _OUTPUT_OF_FIELD
qzeros   [G, N / 8] int32, likewise
scales   [G, N] float16
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.errors import CorruptFileError, UnsupportedModelError
from octavo.quant.stored import (
    ReadPart,
    Shape,
    StoredCodes,
    StoredModule,
    check_group_size,
    check_module,
    count_groups,
)

# Field i of a word, bits 4i to 4i + 3, belongs to this one of the word's 8 outputs.
_OUTPUT_OF_FIELD = (0, 2, 4, 6, 1, 3, 5, 7)


class AWQScheme:
    name = "awq"
    parts = ("qweight", "qzeros", "scales")
    may_reorder = False

    def __init__(self, config: Mapping[str, Any]):
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            raise UnsupportedModelError(f"config.json: awq with {bits!r} bits is not supported; 4 are")
        self.group_size = check_group_size("awq", config.get("group_size", config.get("q_group_size")))
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise UnsupportedModelError(f"config.json: the awq version {version!r} is not supported; 'gemm' is")
        if config.get("zero_point", True) is not True:
            raise UnsupportedModelError("config.json: awq without zero_point is not supported")

    def describe_module(self, name: str, parts: Mapping[str, Shape]) -> StoredModule | None:
        if "qweight" not in parts:
            return None
        if len(parts["qweight"]) != 2:
            raise CorruptFileError(f"{name}.qweight has the shape {list(parts['qweight'])}, which is no matrix")
        num_columns, num_rows = parts["qweight"][0], parts["qweight"][1] * 8
        group_size = num_columns if self.group_size == -1 else self.group_size
        num_groups = count_groups(num_columns, group_size)
        module = StoredModule(name, (num_rows, num_columns), parts, 4, group_size)
        return check_module(module, {"qzeros": (num_groups, num_rows // 8), "scales": (num_groups, num_rows)})

    def find_order(self, module: StoredModule, read: ReadPart) -> np.ndarray | None:
        return None

    def decode(self, module: StoredModule, read: ReadPart) -> StoredCodes:
        return StoredCodes(
            codes=_unpack(read("qweight")),
            scale=np.ascontiguousarray(read("scales").T),
            zero=_unpack(read("qzeros")).astype(np.float32),
            bits=4,
            group_size=module.group_size,
        )


def _unpack(words: np.ndarray) -> np.ndarray:
    """[R, N / 8] words -> [N, R] uint8: unpacked, put in order and turned around."""
    turned = np.ascontiguousarray(words.T.astype("<i4", copy=False))
    num_words, num_rows = turned.shape
    packed = turned.view(np.uint8).reshape(num_words, num_rows, 4)
    codes = np.empty((num_words, 8, num_rows), np.uint8)
    for field, output in enumerate(_OUTPUT_OF_FIELD):
        codes[:, output] = packed[:, :, field // 2] >> (4 * (field % 2)) & 0x0F
    return codes.reshape(num_words * 8, num_rows)
