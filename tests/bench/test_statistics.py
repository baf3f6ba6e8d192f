from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.statistics import median, medians_of_rounds, middle_half, percentile, percentiles_ms

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


def test_a_percentile_lies_between_its_neighbours_in_proportion() -> None:
    values = [40.0, 10.0, 30.0, 20.0]
    assert [percentile(values, percent) for percent in (0, 50, 90, 100)] == [10.0, 25.0, pytest.approx(37.0), 40.0]
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None


@given(NUMBERS)
def test_the_median_is_the_library_s(values: list[float]) -> None:
    assert median(values) == pytest.approx(statistics.median(values))


@given(NUMBERS, st.floats(0, 100), st.floats(0, 100))
def test_percentiles_rise_and_stay_within_the_values(values: list[float], one: float, other: float) -> None:
    low, high = percentile(values, min(one, other)), percentile(values, max(one, other))
    assert low is not None
    assert high is not None
    tolerance = 1e-6 * max(abs(value) for value in values)
    assert min(values) - tolerance <= low <= high + tolerance <= max(values) + 2 * tolerance


def test_seconds_become_milliseconds_by_name() -> None:
    assert percentiles_ms("ttft", [0.5]) == {"ttft_p50_ms": 500.0, "ttft_p90_ms": 500.0, "ttft_p99_ms": 500.0}
    assert percentiles_ms("ttft", [])["ttft_p99_ms"] is None


def test_rounds_that_lack_a_metric_do_not_count_for_it() -> None:
    rounds = [{"a": 1.0, "b": None}, {"a": 3.0, "b": 5.0}, {"a": 2.0}]
    assert medians_of_rounds(rounds) == {"a": 2.0, "b": 5.0}
    assert medians_of_rounds([{"a": None}]) == {"a": None}


def test_the_middle_half_leaves_out_both_ends() -> None:
    assert middle_half([5.0, 1.0, 900.0, 4.0, 6.0, 3.0, 2.0, 7.0]) == [0, 3, 4, 5]
    assert middle_half([3.0]) == [0]
