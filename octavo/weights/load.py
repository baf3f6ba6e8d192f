"""Names to parameters: checks that a checkpoint has exactly what a model wants, then hands it over piece by piece.

Nothing is read before the check has passed. Memory peaks at the packed weights and the one tensor, or group of tensors
that are packed together, in the making.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from octavo.errors import CorruptFileError, IncompleteWeightsError
from octavo.ops.interface import QUANT_GROUP_SIZE, Array, BFloat16, GroupQuantized, Ops, Weight, WeightData
from octavo.quant.groups import quantize_groups
from octavo.weights.checkpoint import Checkpoint

OnProgress = Callable[[int, int], None]  # (bytes read, bytes in all)

# Left over in many checkpoints and of no use: tables that are computed anew, and the head of a tied model, which
# transformers ignores too.
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|attn_rot_embd\.weight$|\.attn\.(masked_)?bias$|^lm_head\.weight$")
_MAX_NAMES_SHOWN = 8


def check_complete(checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises IncompleteWeightsError naming what is missing or left over, CorruptFileError for a wrong shape."""
    missing = [name for name in wanted if name not in checkpoint.tensor_shapes]
    left_over = [
        name
        for name in checkpoint.tensor_shapes
        if name not in wanted and not _HARMLESS.search(name) and not _is_empty_bias(checkpoint, name)
    ]
    if missing or left_over:
        problems = []
        if missing:
            problems.append(f"{len(missing)} of {len(wanted)} parameters are missing: {_some(missing)}")
        if left_over:
            problems.append(f"{len(left_over)} tensors are no parameters of this model: {_some(left_over)}")
        raise IncompleteWeightsError(f"{checkpoint.path}: {'; '.join(problems)}")
    for name, shape in wanted.items():
        found = tuple(checkpoint.tensor_shapes[name])
        if found != tuple(shape):
            raise CorruptFileError(
                f"{checkpoint.path}: {name} has the shape {list(found)}, but its configuration asks for {list(shape)}"
            )


class ParameterLoader:
    """A `ParameterSource` (octavo.models.layers) over a checkpoint.

    quantization: what becomes of the weight matrices:
                  "checkpoint"  those in codes stay in their codes, the others floats
                  "none"        all are floats; "auto" as dtype asks for float32 where they were in codes
                  "int8"        all in 8-bit codes; those that the checkpoint has in codes are taken as their exact
                                floats
                  "int4"        likewise 4-bit, but for embedding, head, v_proj and down_proj: 8-bit
                  A matrix whose rows 32 does not divide stays in floats.
    dtype:        of the matrices that are floats: "auto" (as stored), "float32", "float16", "bfloat16"
    on_progress:  called after each read
    num_bytes:    of all that was handed out, on the device
    matrix_bytes: of the weight matrices, by format: "4-bit", "8-bit", "float16", ...

    Vectors (norms, biases) are float32 always.
    """

    def __init__(
        self,
        ops: Ops,
        checkpoint: Checkpoint,
        wanted: Mapping[str, tuple[int, ...]],
        dtype: str = "auto",
        on_progress: OnProgress | None = None,
        *,
        quantization: str = "checkpoint",
    ):
        assert quantization in ("checkpoint", "none", "int8", "int4"), quantization
        check_complete(checkpoint, wanted)
        self._ops = ops
        self._checkpoint = checkpoint
        self._quantization = quantization
        self._dtype = dtype
        self._on_progress = on_progress
        self._bytes_read = 0
        self._bytes_wanted = sum(checkpoint.num_bytes(name) for name in wanted)
        self.num_bytes = 0
        self.matrix_bytes: dict[str, int] = {}

    def weight(self, names: Sequence[str]) -> Weight:
        parts = [self._read_matrix(name) for name in names]
        if not any(_is_view(part) for part in parts):
            self._checkpoint.release(names)  # before the packing, so that file, codes and packed weight do not add up
        has_codes = any(isinstance(part, GroupQuantized) for part in parts)
        # A dtype given to pack_weight would turn codes into floats.
        if has_codes and self._dtype != "auto":
            parts = [part if isinstance(part, GroupQuantized) else _convert(part, self._dtype) for part in parts]
        weight = self._ops.pack_weight(parts, "auto" if has_codes else self._dtype)
        self._count_matrix(parts, "auto" if has_codes else self._dtype, weight.num_bytes)
        self._has_read(names, weight.num_bytes)
        return weight

    def vector(self, names: Sequence[str]) -> Array:
        parts = [_to_float32(self._checkpoint.read(name, exact_float=True)) for name in names]
        vector = np.concatenate(parts)  # also a copy: what it was read from is a file's memory map
        self._has_read(names, vector.nbytes)
        return self._ops.to_device(vector)

    def _read_matrix(self, name: str) -> WeightData:
        data = self._checkpoint.read(name, exact_float=self._quantization != "checkpoint")
        bits = _bits_of(self._quantization, name)
        if bits is None or isinstance(data, GroupQuantized) or data.shape[1] % QUANT_GROUP_SIZE:
            return data
        try:
            return quantize_groups(data, bits)
        except ValueError as error:
            raise CorruptFileError(f"{self._checkpoint.path}: {name} {error}") from None

    def _count_matrix(self, parts: Sequence[WeightData], dtype: str, num_bytes: int) -> None:
        """Share out a weight's bytes among the formats of its parts, by the numbers that each has."""
        formats = [describe_format(part, dtype) for part in parts]
        ideal = [_BITS[name] * part.shape[0] for name, part in zip(formats, parts, strict=True)]
        left = num_bytes
        for index, name in enumerate(formats):
            share = left if index == len(formats) - 1 else int(num_bytes * ideal[index] / sum(ideal))
            self.matrix_bytes[name] = self.matrix_bytes.get(name, 0) + share
            left -= share

    def _has_read(self, names: Sequence[str], num_bytes: int) -> None:
        self._checkpoint.release(names)
        self.num_bytes += num_bytes
        self._bytes_read += sum(self._checkpoint.num_bytes(name) for name in names)
        if self._on_progress is not None:
            self._on_progress(self._bytes_read, self._bytes_wanted)


def describe_format(data: WeightData, dtype: str) -> str:
    """What the start-up page calls the format that a matrix is packed in: "4-bit", "8-bit", "float16", ..."""
    if isinstance(data, GroupQuantized):
        return f"{data.bits}-bit" if dtype == "auto" else dtype
    if dtype != "auto":
        return dtype
    return "bfloat16" if isinstance(data, BFloat16) else data.dtype.name


def estimate_weights_bytes(checkpoint: Checkpoint, dtype: str, quantization: str) -> int:
    """What the weights will take in memory, from shapes and sizes alone. Arguments as of ParameterLoader.

    On the cpu backend exact, or a little more: errors about memory name a share that must do when it is typed, and they
    come before anything is loaded.
    """
    return int(sum(_estimate_bytes(checkpoint, name, dtype, quantization) for name in checkpoint.tensor_shapes))


def _estimate_bytes(checkpoint: Checkpoint, name: str, dtype: str, quantization: str) -> float:
    shape = checkpoint.tensor_shapes[name]
    count = math.prod(shape)
    if len(shape) != 2 or not count:
        return 4 * count
    num_bytes = checkpoint.num_bytes(name)
    stored_bits = 8 * num_bytes / count
    is_in_codes = checkpoint.quantization is not None and stored_bits < _MAX_BITS_OF_CODES
    if quantization == "checkpoint":
        bits = (4 if stored_bits < _MAX_BITS_OF_4_BIT_CODES else 8) if is_in_codes else None
    else:
        bits = _bits_of(quantization, name) if shape[1] % QUANT_GROUP_SIZE == 0 else None
    if bits is not None:
        is_wide = quantization == "checkpoint" and not _has_half_scales(checkpoint, name)
        return count * (_BITS[f"{bits}-bit"] + (_BITS_OF_WIDE_SCALES[bits] if is_wide else 0)) / 8
    if dtype != "auto":
        return count * _BITS[dtype] / 8
    return 4 * count if is_in_codes else num_bytes


def _has_half_scales(checkpoint: Checkpoint, name: str) -> bool:
    """Also of all the matrices that are packed into one with it: one float among them makes floats of all."""
    if (match := _FUSED.search(name)) is None:
        return checkpoint.has_half_scales(name)
    fused = ("q", "k", "v") if match[1] in "qkv" else ("gate", "up")
    siblings = (name[: match.start(1)] + part + name[match.end(1) :] for part in fused)
    return all(checkpoint.has_half_scales(sibling) for sibling in siblings if sibling in checkpoint.tensor_shapes)


_FUSED = re.compile(r"\.(q|k|v|gate|up)_proj\.")
# As stored, with scales and minimums: 4-bit formats take up to 5 bits a weight (Q4_1), those that are kept in 8 bits
# from 5.5 (Q5_0) to 9 (groups of 32 with scale and zero point); floats take 16.
_MAX_BITS_OF_4_BIT_CODES = 5.25
_MAX_BITS_OF_CODES = 12
# What scales (and of 4 bits the minimums) take beyond _BITS when they are float32.
_BITS_OF_WIDE_SCALES = {4: 1.0, 8: 0.5}


# Bits a weight, with the scale and the sum of the codes (and for 4 bits the minimum) in 16 bits for each 32.
_BITS: dict[str, float] = {"4-bit": 5.5, "8-bit": 9, "float16": 16, "bfloat16": 16, "float32": 32}
_KEEPS_8_BITS = re.compile(r"^model\.embed_tokens\.|^lm_head\.|\.v_proj\.|\.down_proj\.")


def _bits_of(quantization: str, name: str) -> int | None:
    """The bits that a matrix is quantized to. What _KEEPS_8_BITS matches costs most at 4: without it int4 would be a
    fifth smaller and twice as far off (docs/quantization.md has the figures)."""
    if quantization == "int4":
        return 8 if _KEEPS_8_BITS.search(name) else 4
    return 8 if quantization == "int8" else None


def _convert(data: np.ndarray | BFloat16, dtype: str) -> np.ndarray | BFloat16:
    values = _to_float32(data)
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = values.view(np.uint32)
    # Round to nearest, ties to even: add half of the last kept place, less one where that place is even.
    return BFloat16(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16))


def _is_empty_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Some writers of GPTQ files give every module a bias, all zeros where the model has none."""
    if checkpoint.quantization != "gptq" or not name.endswith(".bias"):
        return False
    return not _to_float32(checkpoint.read(name)).any()


def _is_view(data: WeightData) -> bool:
    """Whether it may be a view of a file: codes have been unpacked, float weights are used where they lie."""
    return not isinstance(data, GroupQuantized)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    return shown if len(names) <= _MAX_NAMES_SHOWN else f"{shown} and {len(names) - _MAX_NAMES_SHOWN} more"


def _to_float32(data: WeightData) -> np.ndarray:
    if isinstance(data, BFloat16):
        return data.to_float32()
    assert not isinstance(data, GroupQuantized), "a vector in codes"
    return data.astype(np.float32)
