"""Float matrices to codes: `quantize_groups` packs a matrix [N, K] in groups of 32 with 8 or 4 bits a weight.

8 bits: one scale a group, symmetric; or scale and minimum, where a matrix lies so far off zero that this halves the
mean squared error. 4 bits: scale and minimum by least squares, the best of several ranges.

Scales and minimums are rounded to float16 before the codes are chosen, so that the kernels can keep them in half the
memory and the codes make up for the rounding. Work is done a few thousand groups at a time, so nothing the size of the
matrix exists but the codes. (Threads were tried: at chunks that fit in a cache, they wait for the interpreter lock.)
"""

from __future__ import annotations

import numpy as np

from octavo.ops.interface import QUANT_GROUP_SIZE, BFloat16, GroupQuantized

FloatMatrix = np.ndarray | BFloat16

# Groups worked on at a time: 2048 x 32 float32 are 256 KiB, and some of them stay in an L2 cache.
_GROUPS_AT_A_TIME = 2048

# The ranges that are tried for 4 bits, as a part of the group's own. Cutting off the extremes makes the steps finer,
# and least squares moves the ends again. On SmolLM2's weights the error is 7.9 % (of their root mean square) without
# either, 7.5 % with the first, 7.3 % with these three and with twice as many.
_RANGES = (1.0, 0.92, 0.84)

_HALF_MAX = 65504.0
_HALF_MIN_NORMAL = 2.0**-14


def quantize_groups(values: FloatMatrix, bits: int) -> GroupQuantized:
    """values: [N, K] float32, float16 or bfloat16, K a multiple of 32, all finite; bits: 8 or 4.

    Raises ValueError for a weight that is not a finite number.
    """
    assert bits in (4, 8), bits
    num_rows, num_columns = values.shape
    assert num_columns % QUANT_GROUP_SIZE == 0, values.shape
    groups_in_row = num_columns // QUANT_GROUP_SIZE
    result = _Result(values, groups_in_row, bits, _lowest_and_highest(values, groups_in_row))
    rows_at_a_time = max(1, _GROUPS_AT_A_TIME // groups_in_row)
    for start in range(0, num_rows, rows_at_a_time):
        result.fill(start, min(start + rows_at_a_time, num_rows))
    return GroupQuantized(result.codes, result.scale, result.minimum, bits)


class _Result:
    """The codes in the making. lowest, highest: [N, groups] of the values."""

    def __init__(self, values: FloatMatrix, groups_in_row: int, bits: int, ends: tuple[np.ndarray, np.ndarray]):
        self.values, self.bits = values, bits
        self.lowest, self.highest = ends
        if not (np.isfinite(self.lowest).all() and np.isfinite(self.highest).all()):
            raise ValueError("has weights that are not finite numbers")
        num_rows = values.shape[0]
        largest = np.maximum(-self.lowest, self.highest)
        span = self.highest - self.lowest
        # The error of rounding goes with the square of the step.
        self.has_minimum = bits == 4 or 2 * np.sum(np.square(span / 255)) < np.sum(np.square(largest / 127))
        self.codes = np.empty(values.shape, np.uint8 if bits == 4 else np.int8)
        self.scale = np.empty((num_rows, groups_in_row), np.float32)
        self.minimum = np.empty_like(self.scale) if self.has_minimum else None
        # Half precision is for scales of the usual size. Below its normal numbers it is coarse, which harms no one as
        # long as other groups of the matrix are a lot larger.
        steps = (span / (2**bits - 1)) if self.has_minimum else largest / 127
        peak = float(steps.max(initial=0))
        self.use_half = peak >= _HALF_MIN_NORMAL and float(largest.max(initial=0)) <= _HALF_MAX

    def fill(self, start: int, stop: int) -> None:
        rows = slice(start, stop)
        grouped = _take_groups(self.values, rows)
        low, high = self.lowest[rows].ravel(), self.highest[rows].ravel()
        if self.bits == 4:
            scale, minimum = _fit_scale_and_minimum(grouped, low, high, 15)
        elif self.has_minimum:
            # Codes are from -128: the minimum is the value of code 0.
            scale = (high - low) / 255
            minimum = low + 128 * scale
        else:
            scale, minimum = np.maximum(-low, high) / 127, None
        scale, minimum = self._round(scale), None if minimum is None else self._round(minimum)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
        if minimum is not None:
            grouped -= minimum
        grouped *= inverse
        np.rint(grouped, out=grouped)
        least, most = (0, 15) if self.bits == 4 else (-128 if self.has_minimum else -127, 127)
        np.clip(grouped, least, most, out=grouped)
        shape = (stop - start, -1)
        self.codes[rows] = grouped.astype(self.codes.dtype).T.reshape(shape)
        self.scale[rows] = scale.reshape(shape)
        if self.minimum is not None and minimum is not None:
            self.minimum[rows] = minimum.reshape(shape)

    def _round(self, numbers: np.ndarray) -> np.ndarray:
        return numbers.astype(np.float16).astype(np.float32) if self.use_half else numbers.astype(np.float32)


def _fit_scale_and_minimum(
    grouped: np.ndarray, low: np.ndarray, high: np.ndarray, top_code: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of each column of [32, groups] that come closest, with codes from 0 to top_code.

    For given codes q the best scale a and minimum b are those of the straight line through the points (q, w):

        a = (n sum(qw) - sum(q) sum(w)) / (n sum(q^2) - sum(q)^2),   b = (sum(w) - a sum(q)) / n

    and what is left is sum(w^2) - b sum(w) - a sum(qw). Several ranges give several sets of codes; the best is kept.
    """
    count = np.float32(QUANT_GROUP_SIZE)
    # Around the middle of the group, so that the sums below do not cancel.
    middle = (low + high) / 2
    centered = grouped - middle
    sum_w = centered.sum(axis=0)
    half_span = (high - low) / 2
    best_gain = np.full(low.shape, -np.inf, np.float32)
    best_scale, best_minimum = np.zeros_like(low), np.zeros_like(low)
    codes = np.empty_like(grouped)
    for part in _RANGES:
        step = half_span * np.float32(2 * part / top_code)
        inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
        np.multiply(centered, inverse, out=codes)
        codes += np.float32(top_code / 2)
        np.rint(codes, out=codes)
        np.clip(codes, 0, top_code, out=codes)
        sum_q = codes.sum(axis=0)
        sum_qw = np.einsum("ig,ig->g", codes, centered)
        sum_qq = np.einsum("ig,ig->g", codes, codes)
        spread = count * sum_qq - sum_q * sum_q
        slope = np.divide(count * sum_qw - sum_q * sum_w, spread, out=np.zeros_like(spread), where=spread > 0)
        offset = (sum_w - slope * sum_q) / count
        gain = offset * sum_w + slope * sum_qw
        is_better = (gain > best_gain) & (slope > 0)
        best_gain = np.where(is_better, gain, best_gain)
        best_scale = np.where(is_better, slope, best_scale)
        best_minimum = np.where(is_better, offset, best_minimum)
    # Where no line has a slope all weights of the group are equal, and the minimum says it all.
    return best_scale, best_minimum + middle


def _lowest_and_highest(values: FloatMatrix, groups_in_row: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each group: two arrays [N, groups] float32."""
    num_rows = values.shape[0]
    lowest = np.empty((num_rows, groups_in_row), np.float32)
    highest = np.empty_like(lowest)
    rows_at_a_time = max(1, _GROUPS_AT_A_TIME // groups_in_row)
    for start in range(0, num_rows, rows_at_a_time):
        rows = slice(start, start + rows_at_a_time)
        grouped = _take_groups(values, rows)
        lowest[rows] = grouped.min(axis=0).reshape(-1, groups_in_row)
        highest[rows] = grouped.max(axis=0).reshape(-1, groups_in_row)
    return lowest, highest


def _take_groups(values: FloatMatrix, rows: slice) -> np.ndarray:
    """The groups of some rows as [32, groups] float32, a new array.

    Groups lie side by side because a sum or an extreme of long rows is ten times as fast as one of 32 neighbours.
    """
    if isinstance(values, BFloat16):
        some = BFloat16(values.bits[rows]).to_float32()
    else:
        some = values[rows].astype(np.float32, copy=False)
    return np.array(some.reshape(-1, QUANT_GROUP_SIZE).T, order="C")
