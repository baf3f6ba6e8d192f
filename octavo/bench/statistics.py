"""Percentiles and medians. Pure functions; standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Between the two nearest values, in proportion; None of nothing. values: in any order."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float | None:
    return percentile(values, 50)


def percentiles_ms(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """{"ttft_p50_ms": ..., "ttft_p90_ms": ..., "ttft_p99_ms": ...}"""
    result = {}
    for percent in PERCENTILES:
        value = percentile(seconds, percent)
        result[f"{name}_p{percent}_ms"] = None if value is None else value * 1e3
    return result


def medians_of_rounds(rounds: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Each metric's median over the rounds that have it."""
    return {name: median(_known(each.get(name) for each in rounds)) for name in _names(rounds)}


def middle_half(values: Sequence[float]) -> list[int]:
    """The indexes of the values between the first and the third quartile (at least one), in order of index: what an
    average is taken of when an interruption should not count."""
    assert values
    order = sorted(range(len(values)), key=values.__getitem__)
    cut = len(order) // 4
    return sorted(order[cut : len(order) - cut])


def _names(rounds: Sequence[Mapping[str, float | None]]) -> list[str]:
    return list(dict.fromkeys(name for each in rounds for name in each))


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
