"""Float matrices to codes: how far off, how stored, and the corners."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops.interface import BFloat16, GroupQuantized
from octavo.quant.groups import quantize_groups


def normal(num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=0.05, size=(num_rows, num_columns)).astype(np.float32)


def relative_error(quantized: GroupQuantized, values: np.ndarray) -> float:
    return float(np.sqrt(np.mean((quantized.dequantize() - values) ** 2) / np.mean(values**2)))


def minmax_error(values: np.ndarray) -> float:
    """Of 4-bit codes between the least and the greatest of each group."""
    groups = values.reshape(-1, 32)
    low = groups.min(axis=1, keepdims=True)
    step = (groups.max(axis=1, keepdims=True) - low) / 15
    return float(np.sqrt(np.mean((np.rint((groups - low) / step) * step + low - groups) ** 2) / np.mean(groups**2)))


def test_8_bits_are_off_by_half_a_step() -> None:
    values = normal(64, 96)
    quantized = quantize_groups(values, 8)
    assert quantized.codes.dtype == np.int8
    assert quantized.minimum is None
    # The scale is rounded to 11 bits, which moves the largest weight's value by a 16th of a step.
    step = np.repeat(np.abs(values.reshape(64, 3, 32)).max(axis=2) / 127, 32, axis=1)
    assert (np.abs(quantized.dequantize() - values) <= 0.57 * step).all()


def test_4_bits_come_closer_than_plain_rounding_between_the_ends() -> None:
    values = normal(64, 256)
    assert relative_error(quantize_groups(values, 4), values) < 0.95 * minmax_error(values)


def test_8_bits_take_a_minimum_where_the_weights_lie_to_one_side() -> None:
    values = normal(16, 64) + np.float32(1)
    quantized = quantize_groups(values, 8)
    assert quantized.minimum is not None
    span = np.ptp(values.reshape(16, 2, 32), axis=2)
    # Half precision of a minimum near 1 is coarser than these steps, but the codes are chosen after it is rounded.
    assert (np.abs(quantized.dequantize() - values) <= np.repeat(span / 255, 32, axis=1) * 0.6 + 2**-11).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_and_minimums_fit_in_half_precision(bits: int) -> None:
    quantized = quantize_groups(normal(8, 64), bits)
    for numbers in (quantized.scale, quantized.minimum):
        if numbers is not None:
            np.testing.assert_array_equal(numbers, numbers.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("factor", [1e-12, 1e-6, 1e6])
def test_matrices_of_any_size_keep_their_precision(bits: int, factor: float) -> None:
    values = normal(8, 64)
    usual = relative_error(quantize_groups(values, bits), values)
    scaled = values * np.float32(factor)
    assert relative_error(quantize_groups(scaled, bits), scaled) < 1.1 * usual


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_a_group_of_one_value_is_exact(bits: int, value: float) -> None:
    values = np.full((3, 64), value, np.float32)
    np.testing.assert_allclose(quantize_groups(values, bits).dequantize(), values, rtol=5e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_grid_of_16_values_is_found_again(bits: int) -> None:
    """What was quantized to 4 bits and written as floats comes back."""
    codes = np.random.default_rng(0).integers(0, 16, (4, 64))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    values = codes.astype(np.float32) * np.float32(0.0625) - np.float32(0.5)
    np.testing.assert_allclose(quantize_groups(values, bits).dequantize(), values, atol=2e-3 if bits == 8 else 2e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_any_float_format_gives_the_same_codes(bits: int) -> None:
    bfloat16 = BFloat16((normal(300, 1024).view(np.uint32) >> 16).astype(np.uint16))
    values = bfloat16.to_float32()
    one, other = quantize_groups(values, bits), quantize_groups(bfloat16, bits)
    np.testing.assert_array_equal(other.codes, one.codes)
    np.testing.assert_array_equal(other.scale, one.scale)
    half = values.astype(np.float16)
    np.testing.assert_array_equal(
        quantize_groups(half, bits).codes, quantize_groups(half.astype(np.float32), bits).codes
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_finite_numbers_are_refused(value: float) -> None:
    values = normal(4, 64)
    values[2, 33] = value
    with pytest.raises(ValueError, match="not finite"):
        quantize_groups(values, 8)


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    rows=st.lists(
        st.lists(st.floats(-10, 10, width=32, allow_subnormal=False), min_size=32, max_size=32), min_size=1, max_size=4
    ),
)
def test_no_weight_leaves_its_group_by_more_than_a_step(bits: int, rows: list[list[float]]) -> None:
    values = np.array(rows, np.float32)
    result = quantize_groups(values, bits).dequantize()
    span = np.maximum(np.ptp(values, axis=1), np.abs(values).max(axis=1)) + 1e-6
    # 4 bits may cut off the extremes: 28 % of the range at most, half on either side.
    allowed = span * (0.2 if bits == 4 else 1 / 127)
    assert (np.abs(result - values).max(axis=1) <= allowed + np.abs(values).max() * 2e-3).all()
