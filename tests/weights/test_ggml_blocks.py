"""Every block format against the gguf package."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.ops.interface import BFloat16, GroupQuantized
from octavo.quant.ggml import GGML_TYPES, decode, decode_exact
from tests.weights.gguf_files import gguf

SHAPE = (6, 512)
BLOCK_TYPES = [known.name for known in GGML_TYPES.values() if known.block_size > 1]


def random_blocks(type_name: str, seed: int = 0) -> np.ndarray:
    """[6, bytes of a row] of random bytes with sane float16 scales, so that every code and sub-scale occurs."""
    generator = np.random.default_rng(seed)
    ggml_type = next(known for known in GGML_TYPES.values() if known.name == type_name)
    raw = generator.integers(
        0, 256, (SHAPE[0], SHAPE[1] // ggml_type.block_size, ggml_type.block_bytes), dtype=np.uint8
    )
    scale_bytes = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}.get(type_name, [0])
    for first in scale_bytes:
        scales = generator.normal(0, 0.05, (*raw.shape[:2], 1)).astype(np.float16)
        raw[..., first : first + 2] = scales.view(np.uint8)
    return raw.reshape(SHAPE[0], -1)


def oracle(raw: np.ndarray, type_name: str) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_exact_decoding_equals_the_gguf_package_to_the_bit(type_name: str) -> None:
    raw = random_blocks(type_name)
    np.testing.assert_array_equal(decode_exact(type_name, raw.ravel(), SHAPE), oracle(raw, type_name))


@pytest.mark.parametrize("type_name", [name for name in BLOCK_TYPES if name != "Q6_K"])
def test_codes_lose_nothing(type_name: str) -> None:
    raw = random_blocks(type_name)
    data = decode(type_name, raw.ravel(), SHAPE)
    assert isinstance(data, GroupQuantized)
    assert data.shape == SHAPE
    assert data.bits == (4 if type_name.startswith("Q4") else 8)
    assert data.codes.dtype == (np.uint8 if data.bits == 4 else np.int8)
    assert data.scale.dtype == np.float32
    assert data.scale.shape == (SHAPE[0], SHAPE[1] // 32)
    np.testing.assert_array_equal(data.dequantize(), oracle(raw, type_name))


@pytest.mark.parametrize("type_name", [name for name in BLOCK_TYPES if name != "Q6_K"])
def test_four_bit_codes_fit_in_four_bits(type_name: str) -> None:
    data = decode(type_name, random_blocks(type_name).ravel(), SHAPE)
    assert isinstance(data, GroupQuantized)
    if data.bits == 4:
        assert data.codes.max() <= 15


def test_q6_k_codes_stay_within_an_eighth_of_the_coarser_step() -> None:
    raw = random_blocks("Q6_K")
    data = decode("Q6_K", raw.ravel(), SHAPE)
    assert isinstance(data, GroupQuantized)
    exact = oracle(raw, "Q6_K")
    blocks = raw.reshape(SHAPE[0], -1, 210)
    d = np.ascontiguousarray(blocks[..., 208:]).view(np.float16).astype(np.float32)
    steps = np.abs(d * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)).reshape(SHAPE[0], -1, 2)
    coarse = steps.max(axis=2)
    error = np.abs(data.dequantize() - exact).reshape(SHAPE[0], -1, 2, 16)
    rounding = 1e-6 * np.abs(exact).max()
    assert (error <= coarse[..., None, None] / 8 + rounding).all()
    # and the half of each group that has the coarser step is exact, but for float32 rounding
    is_coarse = steps == coarse[..., None]
    assert (error[is_coarse] <= rounding).all()


def test_q6_k_with_equal_scales_is_exact() -> None:
    raw = random_blocks("Q6_K").reshape(SHAPE[0], -1, 210)
    raw[..., 192:208] = 7
    raw = raw.reshape(SHAPE[0], -1)
    data = decode("Q6_K", raw.ravel(), SHAPE)
    assert isinstance(data, GroupQuantized)
    np.testing.assert_allclose(data.dequantize(), oracle(raw, "Q6_K"), rtol=1e-6, atol=1e-7)


def test_q6_k_of_zeros_is_zero() -> None:
    raw = np.zeros((SHAPE[0], SHAPE[1] // 256 * 210), np.uint8)
    data = decode("Q6_K", raw.ravel(), SHAPE)
    assert isinstance(data, GroupQuantized)
    assert not data.dequantize().any()


def test_floats_come_as_they_are() -> None:
    values = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    np.testing.assert_array_equal(decode("F32", values.ravel().view(np.uint8), (3, 8)), values)
    halves = values.astype(np.float16)
    np.testing.assert_array_equal(decode("F16", halves.ravel().view(np.uint8), (3, 8)), halves)
    upper = (values.view(np.uint32) >> 16).astype(np.uint16)
    bfloat = decode("BF16", upper.ravel().view(np.uint8), (3, 8))
    assert isinstance(bfloat, BFloat16)
    np.testing.assert_array_equal(bfloat.bits, upper)
    for name, array in (("F16", halves), ("BF16", upper)):
        exact = decode_exact(name, array.ravel().view(np.uint8), (3, 8))
        assert exact.dtype == np.float32
        np.testing.assert_array_equal(exact, oracle(array.view(np.uint8), name))


def test_a_quantized_tensor_that_is_no_matrix_comes_as_float32() -> None:
    raw = random_blocks("Q8_0")
    data = decode("Q8_0", raw.ravel(), (SHAPE[0] * SHAPE[1],))
    assert isinstance(data, np.ndarray)
    np.testing.assert_array_equal(data, oracle(raw, "Q8_0").ravel())
