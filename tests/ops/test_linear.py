"""Weights and the matrix product of the CPU backend, against the reference and against themselves."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import ShapeError
from octavo.ops.interface import BFloat16, GroupQuantized
from tests.ops.op_inputs import FLOAT_KINDS, QUANTIZED_KINDS, misaligned, normal, quantized, weight_part, with_gaps

SHAPES = [(1, 32), (16, 32), (17, 96), (48, 576), (31, 160), (100, 224), (130, 1536)]


def product_bound(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """sum |x| |w|, what rounding errors are relative to."""
    return np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64).T


def quantization_bound(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Half a step of 8 bits for each x, the step being its group's range / 254; all errors one way."""
    grouped = x.reshape(len(x), -1, 32)
    steps = np.repeat((grouped.max(-1) - grouped.min(-1)) / 254, 32, axis=1)
    return 0.5 * steps.astype(np.float64) @ np.abs(weight).astype(np.float64).T


@pytest.mark.parametrize("kind", QUANTIZED_KINDS + FLOAT_KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_is_the_reference_within_its_rounding(cpu, reference, kind, shape):
    """A chain of K float32 additions errs by at most K * 2^-24 of the sum of magnitudes; 8-bit x by half a step."""
    num_outputs, width = shape
    rng = np.random.default_rng(width + num_outputs)
    part = weight_part(rng, kind, num_outputs, width)
    packed, truth = cpu.pack_weight([part]), reference.pack_weight([part])
    for num_rows in (1, 2, 5, 9):
        x = normal(rng, num_rows, width) * 10 ** rng.uniform(-3, 3, (num_rows, 1)).astype(np.float32)
        expected = reference.linear(x, truth)
        bound = width * 2.0**-23 * product_bound(x, truth.values) + 1e-30
        if kind in QUANTIZED_KINDS:
            # The code and minimum products are added apart, and each may be larger than their sum.
            largest = np.abs(part.scale[:, :, None] * part.codes.reshape(num_outputs, -1, 32)).reshape(truth.shape)
            bound = bound + width * 2.0**-23 * product_bound(x, largest) + 1.001 * quantization_bound(x, truth.values)
        assert np.all(np.abs(cpu.linear(x, packed) - expected) <= bound)


@pytest.mark.parametrize("kind", QUANTIZED_KINDS + FLOAT_KINDS)
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(cpu_threads, kind):
    rng = np.random.default_rng(7)
    part = weight_part(rng, kind, 333, 160)
    bias = normal(rng, 333)
    x = normal(rng, 64, 160)
    expected = None
    for ops in cpu_threads:
        weight = ops.pack_weight([part])
        for num_rows in (1, 2, 3, 5, 8, 16, 33, 64):
            rows = np.concatenate([ops.linear(x[i : i + num_rows], weight, bias) for i in range(0, 64, num_rows)])
            expected = rows if expected is None else expected
            assert np.array_equal(rows, expected), (ops.num_threads, num_rows)


@pytest.mark.parametrize("kind", ["q4", "q8", "float16"])
def test_large_products_do_not_depend_on_the_cut(cpu_threads, kind):
    """More than 256 rows are cut into several tasks, wide outputs into panels."""
    rng = np.random.default_rng(8)
    part = weight_part(rng, kind, 700, 64)
    x = normal(rng, 600, 64)
    results = [ops.linear(x, ops.pack_weight([part])) for ops in cpu_threads]
    weight = cpu_threads[0].pack_weight([part])
    single = np.concatenate([cpu_threads[0].linear(x[i : i + 1], weight) for i in range(600)])
    for result in results:
        assert np.array_equal(result, single)


def test_parts_of_all_kinds_lie_side_by_side(cpu, reference):
    rng = np.random.default_rng(3)
    kinds = ("q4", "q4-float-scales", "q8", "float32", "float16", "bfloat16", "q4")
    parts = [weight_part(rng, kind, 10 + index, 96) for index, kind in enumerate(kinds)]
    x, bias = normal(rng, 6, 96), normal(rng, sum(part.shape[0] for part in parts))
    together = cpu.pack_weight(parts)
    assert together.dtype == "mixed"
    assert together.shape == (len(bias), 96)
    apart = np.concatenate([cpu.linear(x, cpu.pack_weight([part])) for part in parts], axis=1) + bias
    assert np.array_equal(cpu.linear(x, together, bias), apart)
    ids = np.arange(len(bias), dtype=np.int32)
    assert np.array_equal(cpu.embedding(together, ids), reference.pack_weight(parts).values)


def test_merged_parts_of_one_kind_give_what_they_give_alone(cpu):
    rng = np.random.default_rng(4)
    parts = [quantized(rng, rows, 64, 4, exact_half=half) for rows, half in ((5, True), (40, False), (19, True))]
    x = normal(rng, 3, 64)
    merged = cpu.pack_weight(parts)
    assert merged.dtype == "q4"
    apart = np.concatenate([cpu.linear(x, cpu.pack_weight([part])) for part in parts], axis=1)
    assert np.array_equal(cpu.linear(x, merged), apart)


@pytest.mark.parametrize("kind", QUANTIZED_KINDS + FLOAT_KINDS)
@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "bfloat16"])
def test_embedding_reads_back_exactly_what_was_packed(cpu, reference, kind, dtype):
    rng = np.random.default_rng(5)
    part = weight_part(rng, kind, 37, 96)
    packed, truth = cpu.pack_weight([part], dtype), reference.pack_weight([part], dtype)
    ids = rng.permutation(37).astype(np.int32)
    for scale in (1.0, 25.3):
        assert np.array_equal(cpu.embedding(packed, ids, scale), reference.embedding(truth, ids, scale))
    assert packed.dtype == (dtype if dtype != "auto" else kind.split("-")[0])


def test_special_values_survive_conversion(cpu, reference):
    """Ties, subnormals, the ends of the range, infinities and NaN, as NumPy converts them."""
    values = np.array([0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, -1e9, 6e-8, 2.9e-8, 2.98023224e-8, 5.97e-8, 6.1e-5,
                       1.00048828125, 1.00146484375, np.inf, -np.inf], np.float32)  # fmt: skip
    rng = np.random.default_rng(6)
    spread = np.float32(10) ** rng.uniform(-9, 5, 16 * 50).astype(np.float32) * rng.choice([-1, 1], 16 * 50)
    matrix = np.concatenate([values, spread.astype(np.float32)]).reshape(-1, 16)
    ids = np.arange(len(matrix), dtype=np.int32)
    for dtype in ("float16", "bfloat16"):
        packed = cpu.embedding(cpu.pack_weight([matrix], dtype), ids)
        assert np.array_equal(packed, reference.pack_weight([matrix], dtype).values)
    nan = np.full((1, 16), np.nan, np.float32)
    assert np.isnan(cpu.embedding(cpu.pack_weight([nan], "float16"), ids[:1])).all()


@pytest.mark.parametrize("kind", ["q4", "q8", "float32"])
def test_extreme_codes_do_not_overflow(cpu, reference, kind):
    """All codes and activations at their largest, of either sign: sums in 16 bits would wrap or saturate here."""
    width, num_outputs = 64, 20
    rng = np.random.default_rng(9)
    signs = rng.choice([-1.0, 1.0], (4, width)).astype(np.float32)
    signs[0], signs[1] = 1, -1
    if kind == "float32":
        part = np.ones((num_outputs, width), np.float32)
    else:
        codes = np.full((num_outputs, width), 15 if kind == "q4" else -128, np.uint8 if kind == "q4" else np.int8)
        part = GroupQuantized(codes, np.ones((num_outputs, 2), np.float32), None, int(kind[1]))
    expected = reference.linear(signs, reference.pack_weight([part]))
    np.testing.assert_allclose(cpu.linear(signs, cpu.pack_weight([part])), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", QUANTIZED_KINDS + FLOAT_KINDS)
def test_a_nan_or_infinity_stays_in_its_row(cpu, kind):
    rng = np.random.default_rng(10)
    weight = cpu.pack_weight([weight_part(rng, kind, 24, 96)])
    x = normal(rng, 5, 96)
    clean = cpu.linear(x, weight)
    x[1, 40], x[3, 95] = np.nan, np.inf
    result = cpu.linear(x, weight)
    assert not np.isfinite(result[[1, 3]]).any()
    assert np.array_equal(result[[0, 2, 4]], clean[[0, 2, 4]])


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_zero_and_tiny_activations_give_finite_results(cpu, kind):
    rng = np.random.default_rng(11)
    weight = cpu.pack_weight([weight_part(rng, kind, 24, 64)])
    x = np.zeros((3, 64), np.float32)
    x[1], x[2, 3] = 1e-40, 1e-37
    result = cpu.linear(x, weight)
    assert np.array_equal(result[0], np.zeros(24, np.float32))
    assert np.abs(result).max() < 1e-34


@pytest.mark.parametrize("kind", ["q4", "q8", "float32", "bfloat16"])
def test_misaligned_and_strided_rows_change_nothing(cpu, kind):
    rng = np.random.default_rng(12)
    weight = cpu.pack_weight([weight_part(rng, kind, 50, 96)])
    x, bias = normal(rng, 7, 96), normal(rng, 50)
    expected = cpu.linear(x, weight, bias)
    for other in (misaligned(x), misaligned(x, 3), with_gaps(x)):
        assert np.array_equal(cpu.linear(other, weight, misaligned(bias)), expected)


def test_widths_that_are_no_multiple_of_anything_work_in_float(cpu, reference):
    rng = np.random.default_rng(13)
    for width in (1, 7, 33):
        part = normal(rng, 21, width)
        x = normal(rng, 3, width)
        expected = reference.linear(x, reference.pack_weight([part]))
        np.testing.assert_allclose(cpu.linear(x, cpu.pack_weight([part])), expected, rtol=1e-5, atol=1e-5)


def test_no_rows_give_no_rows(cpu):
    weight = cpu.pack_weight([np.ones((5, 32), np.float32)])
    assert cpu.linear(np.empty((0, 32), np.float32), weight).shape == (0, 5)
    assert cpu.embedding(weight, np.empty(0, np.int32)).shape == (0, 32)


def test_num_bytes_counts_what_is_kept(cpu):
    rng = np.random.default_rng(14)
    codes_scales_and_sums = 64 * 128 // 2 + 3 * 64 * 4 * 2
    assert cpu.pack_weight([quantized(rng, 64, 128, 4)]).num_bytes == codes_scales_and_sums
    assert cpu.pack_weight([np.ones((64, 128), np.float16)]).num_bytes == 64 * 128 * 2


def test_what_does_not_fit_is_refused(cpu):
    weight = cpu.pack_weight([np.ones((8, 64), np.float32)])
    x = np.ones((2, 64), np.float32)
    with pytest.raises(ShapeError, match="x has 32 along axis 1, expected 64"):
        cpu.linear(np.ones((2, 32), np.float32), weight)
    with pytest.raises(ShapeError, match="x must be float32"):
        cpu.linear(x.astype(np.float64), weight)
    with pytest.raises(ShapeError, match="bias"):
        cpu.linear(x, weight, np.ones(9, np.float32))
    with pytest.raises(ShapeError, match="contiguous"):
        cpu.linear(np.ones((64, 2), np.float32).T, weight)
    with pytest.raises(ShapeError, match="token_ids has 8"):
        cpu.embedding(weight, np.array([8], np.int32))
    with pytest.raises(ShapeError, match="multiple of 32"):
        cpu.pack_weight([GroupQuantized(np.ones((2, 48), np.uint8), np.ones((2, 1), np.float32), None, 4)])
    with pytest.raises(ShapeError):
        cpu.pack_weight([np.ones((2, 32), np.float32), BFloat16(np.ones((2, 64), np.uint16))])
    with pytest.raises(ShapeError):
        cpu.pack_weight([])
