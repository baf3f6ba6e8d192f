"""The rotary tables, against the formulas written out one number at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.models.rope import FrequencyDivisors, LinearScaling, Llama3Scaling, RopeConfig, rotary_table


def test_a_row_holds_cosines_then_sines_of_position_times_frequency() -> None:
    table = rotary_table(RopeConfig(theta=100.0, rotary_dim=4), 3)
    assert table.dtype == np.float32
    expected = [
        [math.cos(position), math.cos(position / 10), math.sin(position), math.sin(position / 10)]
        for position in range(3)
    ]
    np.testing.assert_allclose(table, expected, rtol=0, atol=1e-6)


def test_linear_scaling_divides_positions() -> None:
    plain, scaled = RopeConfig(100.0, 4), RopeConfig(100.0, 4, LinearScaling(4.0))
    np.testing.assert_allclose(rotary_table(scaled, 9)[8], rotary_table(plain, 3)[2], rtol=0, atol=1e-6)


def test_divisors_divide_each_frequency_by_its_own_number() -> None:
    rope = RopeConfig(100.0, 4, FrequencyDivisors((1.0, 8.0)))
    np.testing.assert_allclose(rope.inverse_frequencies(), [1.0, 0.1 / 8])


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_llama3_scaling_stretches_long_waves_and_leaves_short_ones(theta: float) -> None:
    plain = RopeConfig(theta, 64).inverse_frequencies()
    scaled = RopeConfig(theta, 64, Llama3Scaling(8.0, 1.0, 4.0, 8192)).inverse_frequencies()
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            assert after == before
        elif wavelength > 8192 / 1:
            assert after == pytest.approx(before / 8)
        else:
            share = (8192 / wavelength - 1) / (4 - 1)
            assert after == pytest.approx(share * before + (1 - share) * before / 8)
