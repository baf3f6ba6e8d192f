"""The block formats of GGUF tensors: their sizes, and what their bytes mean as `WeightData`.

Formats with one scale for 32 weights (Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q8_0) map to `GroupQuantized` without loss:
its dequantization gives the very float32 numbers of the format's definition. Q6_K has a scale for 16 weights; see
`_decode_q6_k`. `decode_exact` gives the defined float32 values of any format.

All block layouts are little-endian. `raw` is [N, blocks in a row, bytes of a block] uint8 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.ops.interface import QUANT_GROUP_SIZE, BFloat16, GroupQuantized, WeightData

_SUPER_BLOCK = 256  # weights in a block of the K formats


@dataclass(frozen=True, slots=True)
class GGMLType:
    """block_size: weights in a block; block_bytes: bytes of a block."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    12: GGMLType("Q4_K", _SUPER_BLOCK, 144),
    13: GGMLType("Q5_K", _SUPER_BLOCK, 176),
    14: GGMLType("Q6_K", _SUPER_BLOCK, 210),
    30: GGMLType("BF16", 1, 2),
}

FLOAT_TYPES = ("F32", "F16", "BF16")

# Formats that exist and that we do not read, so that the error can say which one it met.
UNREADABLE_TYPE_NAMES: dict[int, str] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


def decode(type_name: str, raw: np.ndarray, shape: tuple[int, ...]) -> WeightData:
    """One tensor's bytes (uint8, flat) as weight data of `shape`: codes for a quantized matrix, else floats.

    Float tensors are views of `raw`. A quantized tensor that is not a matrix comes as float32.
    """
    if type_name == "F32":
        return raw.view("<f4").reshape(shape)
    if type_name == "F16":
        return raw.view("<f2").reshape(shape)
    if type_name == "BF16":
        return BFloat16(raw.view("<u2").reshape(shape))
    if len(shape) != 2:
        return decode_exact(type_name, raw, shape)
    return _QUANTIZED[type_name](_blocks(type_name, raw, shape))


def decode_exact(type_name: str, raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """One tensor's bytes as float32 of `shape`: what the format defines, to the bit."""
    if type_name == "F32":
        return raw.view("<f4").reshape(shape)
    if type_name == "F16":
        return raw.view("<f2").reshape(shape).astype(np.float32)
    if type_name == "BF16":
        return BFloat16(raw.view("<u2").reshape(shape)).to_float32()
    blocks = _blocks(type_name, raw, shape)
    if type_name == "Q6_K":
        codes, scale = _q6_k_codes(blocks)
        return (codes.astype(np.float32).reshape(*scale.shape, 16) * scale[..., None]).reshape(shape)
    return _QUANTIZED[type_name](blocks).dequantize().reshape(shape)


def _blocks(type_name: str, raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    ggml_type = next(known for known in GGML_TYPES.values() if known.name == type_name)
    return raw.reshape(-1, shape[-1] // ggml_type.block_size, ggml_type.block_bytes)


def _halves(raw: np.ndarray, first: int, count: int = 1) -> np.ndarray:
    """`count` float16 numbers at byte `first` of each block: [N, blocks, count] float32."""
    return np.ascontiguousarray(raw[..., first : first + 2 * count]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray, run: int) -> np.ndarray:
    """[N, blocks, B] bytes -> [N, blocks * 2 * B] uint8 codes: each run of `run` bytes holds `run` codes in its low
    halves, then the next `run` codes in its high halves."""
    num_rows = len(packed)
    if run == 16:
        return _nibbles_of_16(packed)
    packed = packed.reshape(num_rows, -1, run)
    codes = np.empty((num_rows, packed.shape[1], 2, run), np.uint8)
    np.bitwise_and(packed, 0x0F, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])
    return codes.reshape(num_rows, -1)


def _nibbles_of_16(packed: np.ndarray) -> np.ndarray:
    """Eight codes at a time, one column of words after the other: NumPy is slow in loops of 16 steps."""
    words = np.ascontiguousarray(packed).view("<u8").reshape(-1, 2)
    codes = np.empty((len(words), 2, 2), "<u8")
    low_halves, four = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4)
    for column in range(2):
        np.bitwise_and(words[:, column], low_halves, out=codes[:, 0, column])
        high = words[:, column] >> four
        np.bitwise_and(high, low_halves, out=codes[:, 1, column])
    return codes.view(np.uint8).reshape(len(packed), -1)


def _flat(per_group: np.ndarray) -> np.ndarray:
    """[N, blocks, groups in a block] -> [N, groups in a row], contiguous."""
    return np.ascontiguousarray(per_group.reshape(len(per_group), -1))


def _decode_q4_0(raw: np.ndarray) -> GroupQuantized:
    """w = d * (q - 8). The product of an 11-bit d and a small integer is exact, so -8 d as minimum loses nothing."""
    scale = _flat(_halves(raw, 0))
    return GroupQuantized(_nibbles(raw[..., 2:18], 16), scale, scale * np.float32(-8), bits=4)


def _decode_q4_1(raw: np.ndarray) -> GroupQuantized:
    """w = d * q + m"""
    return GroupQuantized(_nibbles(raw[..., 4:20], 16), _flat(_halves(raw, 0)), _flat(_halves(raw, 2)), bits=4)


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """32 bits in 4 bytes, lowest first: [N, blocks, 4] -> [N, 32 * blocks] uint8 of 0 or 16."""
    bits = np.unpackbits(raw, axis=-1, bitorder="little")
    return (bits << 4).reshape(len(raw), -1)


def _decode_q5_0(raw: np.ndarray) -> GroupQuantized:
    """w = d * (q - 16)"""
    codes = (_nibbles(raw[..., 6:22], 16) | _fifth_bits(raw[..., 2:6])).view(np.int8) - np.int8(16)
    return GroupQuantized(codes, _flat(_halves(raw, 0)), None, bits=8)


def _decode_q5_1(raw: np.ndarray) -> GroupQuantized:
    """w = d * q + m"""
    codes = (_nibbles(raw[..., 8:24], 16) | _fifth_bits(raw[..., 4:8])).view(np.int8)
    return GroupQuantized(codes, _flat(_halves(raw, 0)), _flat(_halves(raw, 2)), bits=8)


def _decode_q8_0(raw: np.ndarray) -> GroupQuantized:
    """w = d * q"""
    codes = np.ascontiguousarray(raw[..., 2:34]).view(np.int8).reshape(len(raw), -1)
    return GroupQuantized(codes, _flat(_halves(raw, 0)), None, bits=8)


def _k_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of the 8 groups of a Q4_K or Q5_K block: [N, groups in a row] float32 each.

    Bytes 0-1 and 2-3 are d and dmin; bytes 4-15 hold 8 scales and 8 minimums of 6 bits:

        bytes 0-3    scale 0-3 in bits 0-5, top two bits of scale 4-7 in bits 6-7
        bytes 4-7    minimum 0-3 in bits 0-5, top two bits of minimum 4-7 in bits 6-7
        bytes 8-11   low four bits of scale 4-7 in bits 0-3, of minimum 4-7 in bits 4-7
    """
    packed = raw[..., 4:16]
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=-1)
    return _flat(_halves(raw, 0) * scales.astype(np.float32)), _flat(_halves(raw, 2) * minimums.astype(np.float32))


def _decode_q4_k(raw: np.ndarray) -> GroupQuantized:
    """w = (d * scale) * q - (dmin * minimum)"""
    scale, minimum = _k_scales(raw)
    return GroupQuantized(_nibbles(raw[..., 16:144], 32), scale, -minimum, bits=4)


def _decode_q5_k(raw: np.ndarray) -> GroupQuantized:
    """As Q4_K, with bit g of byte i of qh as the fifth bit of code i in group g."""
    scale, minimum = _k_scales(raw)
    high = raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # [N, blocks, 8 groups, 32]
    codes = _nibbles(raw[..., 48:176], 32) | (high << 4).reshape(len(raw), -1)
    return GroupQuantized(codes.view(np.int8), scale, -minimum, bits=8)


def _q6_k_codes(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N, K] int8 (-32 to 31) and the scale of each 16 of them, [N, K / 16] float32.

    A block is two halves of 128 weights, of four runs of 32 each. Run r takes its low four bits from the low (r < 2)
    or high half of byte 32 * (r % 2) + i, and its top two from bits 2r and 2r + 1 of byte i of qh.
    """
    num_rows, num_blocks = raw.shape[:2]
    low = raw[..., 0:128].reshape(num_rows, num_blocks, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=3).reshape(num_rows, num_blocks, 2, 4, 32)
    high = raw[..., 128:192].reshape(num_rows, num_blocks, 2, 1, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (low | high << 4).view(np.int8) - np.int8(32)
    sub_scales = np.ascontiguousarray(raw[..., 192:208]).view(np.int8).astype(np.float32)
    return codes.reshape(num_rows, -1), _flat(_halves(raw, 208) * sub_scales)


def _decode_q6_k(raw: np.ndarray) -> GroupQuantized:
    """Q6_K in groups of 32 with 8-bit codes: not exact everywhere, but far below the format's own error.

    Of the two runs of 16 in a group let A be the one with the larger scale. The group's scale is A's divided by the
    largest whole number k (at least 4) that keeps all codes within 8 bits. So A's weights are exact (k times their
    code), and so are the others when the scales are equal; otherwise a weight is off by at most 1/2k, so 1/8, of A's
    step, where Q6_K itself was off by up to half of its own run's step. Measured on Gemma 3 270M's Q4_K_M file: 0.41 %
    of the weights' root mean square, where plain rounding to 8 bits is off by 0.56 %.
    """
    codes, scale = _q6_k_codes(raw)
    num_rows = len(codes)
    units = codes.reshape(num_rows, -1, 2, 16).astype(np.float32)
    scale = scale.reshape(num_rows, -1, 2)
    use_second = np.abs(scale[..., 1]) > np.abs(scale[..., 0])
    larger = np.where(use_second, scale[..., 1], scale[..., 0])
    relative = np.divide(scale, larger[..., None], out=np.zeros_like(scale), where=larger[..., None] != 0)
    units *= relative[..., None]  # in steps of A, between -32 and 32
    span = np.maximum(units.max(axis=(2, 3)) / 127, units.min(axis=(2, 3)) / -128)
    k = np.floor(np.divide(1, span, out=np.ones_like(span), where=span > 1e-6) * np.float32(1.000001))
    new_codes = np.clip(np.rint(units * k[..., None, None]), -128, 127).astype(np.int8)
    return GroupQuantized(new_codes.reshape(num_rows, -1), larger / k, None, bits=8)


_QUANTIZED: dict[str, Callable[[np.ndarray], GroupQuantized]] = {
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q8_0": _decode_q8_0,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
}

assert QUANT_GROUP_SIZE == 32, "the decoders above make groups of 32"
