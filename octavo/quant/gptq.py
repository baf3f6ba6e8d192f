"""GPTQ checkpoints (AutoGPTQ, GPTQModel, Optimum): 4 and 8 bits, with and without zero points. Frantar et al. 2022.

qweight  [K * bits / 32, N] int32, the inputs packed
qzeros   [G, N * bits / 32] int32, the outputs packed; format "gptq" stores each zero point less one
scales   [G, N] float16
g_idx    [K] int32, the group of each input: k // group_size, or any order with desc_act
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
    check_bits,
    check_group_size,
    check_module,
    count_groups,
    unpack_words,
)


class GPTQScheme:
    name = "gptq"
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]):
        self.bits = check_bits("gptq", config.get("bits"))
        self.group_size = check_group_size("gptq", config.get("group_size"))
        self.may_reorder = bool(config.get("desc_act"))
        stored_format = config.get("checkpoint_format", "gptq")
        if stored_format not in ("gptq", "gptq_v2"):
            raise UnsupportedModelError(
                f"config.json: the gptq format {stored_format!r} is not supported; 'gptq' and 'gptq_v2' are"
            )
        if config.get("is_marlin_format"):
            raise UnsupportedModelError("config.json: is_marlin_format is set; only gptq's own format is supported")
        self._stores_less_one = stored_format == "gptq"
        for pattern in config.get("dynamic") or ():
            if not str(pattern).startswith("-:"):
                raise UnsupportedModelError(
                    f"config.json: gptq with settings of its own for {pattern!r} (dynamic) is not supported"
                )

    def describe_module(self, name: str, parts: Mapping[str, Shape]) -> StoredModule | None:
        if "qweight" not in parts:
            return None
        if len(parts["qweight"]) != 2:
            raise CorruptFileError(f"{name}.qweight has the shape {list(parts['qweight'])}, which is no matrix")
        fields = 32 // self.bits
        num_columns, num_rows = parts["qweight"][0] * fields, parts["qweight"][1]
        group_size = num_columns if self.group_size == -1 else self.group_size
        num_groups = count_groups(num_columns, group_size)
        module = StoredModule(name, (num_rows, num_columns), parts, self.bits, group_size)
        wanted = {
            "qzeros": (num_groups, num_rows // fields),
            "scales": (num_groups, num_rows),
            "g_idx": (num_columns,),
        }
        return check_module(module, wanted, optional=("g_idx",))

    def find_order(self, module: StoredModule, read: ReadPart) -> np.ndarray | None:
        # Without desc_act the groups follow one another, whatever g_idx says: some old writers left it empty.
        if not self.may_reorder or "g_idx" not in module.parts:
            return None
        order = read("g_idx").astype(np.int64)
        num_columns = module.shape[1]
        if np.array_equal(order, np.arange(num_columns) // module.group_size):
            return None
        if order.min() < 0 or order.max() >= module.parts["scales"][0]:
            raise CorruptFileError(f"{module.name}.g_idx names a group that {module.name}.scales does not have")
        return order

    def decode(self, module: StoredModule, read: ReadPart) -> StoredCodes:
        words = np.ascontiguousarray(read("qweight").T)  # [N, K * bits / 32]; cheaper than to turn the codes around
        zero_words = read("qzeros").astype("<u4")
        if self._stores_less_one:
            # Added to the whole words, with the carry: the writers subtract it with the borrow.
            zero_words = zero_words + np.uint32(0x11111111 if self.bits == 4 else 0x01010101)
        return StoredCodes(
            codes=unpack_words(words, self.bits),
            scale=np.ascontiguousarray(read("scales").T),
            zero=np.ascontiguousarray(unpack_words(zero_words.view("<i4"), self.bits).T.astype(np.float32)),
            bits=self.bits,
            group_size=module.group_size,
            order=self.find_order(module, read),
        )
