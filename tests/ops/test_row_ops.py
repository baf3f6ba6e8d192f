"""Norms, rotary embedding, activations, row copies and cache writes of the CPU backend."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import ShapeError
from tests.ops.op_inputs import misaligned, normal, with_gaps

WIDTHS = [1, 3, 8, 15, 16, 17, 64, 100, 576, 1000]
# A few float32 roundings (2^-24 each) of values of the result's own size; exp errs by at most 2 * 2^-23.
ROUNDING = 1e-6


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_are_the_reference_within_rounding(cpu, reference, width):
    rng = np.random.default_rng(width)
    for num_rows in (1, 3, 40):
        x, weight = normal(rng, num_rows, width), normal(rng, width)
        np.testing.assert_allclose(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), rtol=2e-6)
        residual = normal(rng, num_rows, width)
        mine, truth = residual.copy(), residual.copy()
        result, expected = cpu.add_rms_norm(x, mine, weight, 1e-6), reference.add_rms_norm(x, truth, weight, 1e-6)
        assert np.array_equal(mine, truth)
        np.testing.assert_allclose(result, expected, rtol=2e-6)
        assert cpu.add(x, mine) is mine
        assert np.array_equal(mine, reference.add(x, truth))


def test_norm_takes_any_leading_shape_and_strides(cpu, reference):
    rng = np.random.default_rng(1)
    weight = normal(rng, 24)
    fused = normal(rng, 5, 3 * 24 + 7)
    heads = fused[:, : 3 * 24].reshape(5, 3, 24)
    np.testing.assert_allclose(cpu.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6), rtol=2e-6)
    x = normal(rng, 5, 24)
    expected = cpu.rms_norm(x, weight, 1e-6)
    for other in (misaligned(x), with_gaps(x)):
        assert np.array_equal(cpu.rms_norm(other, misaligned(weight), 1e-6), expected)


def test_a_norm_of_zeros_and_of_a_nan(cpu):
    x = np.zeros((3, 40), np.float32)
    x[1, 5] = np.nan
    result = cpu.rms_norm(x, np.ones(40, np.float32), 1e-6)
    assert np.array_equal(result[[0, 2]], np.zeros((2, 40)))
    assert np.isnan(result[1]).all()


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize("width", WIDTHS)
def test_activations_are_the_reference_within_rounding(cpu, reference, name, width):
    rng = np.random.default_rng(width)
    for num_rows in (1, 30):
        gate_up = normal(rng, num_rows, 2 * width) * 6
        result, expected = getattr(cpu, name)(gate_up), getattr(reference, name)(gate_up)
        if name == "gelu_and_mul":
            # Its exponent reaches -100 and more, whose rounding is the result's relative error; and the reference's
            # 1 + tanh is known to 1e-16 only, times a gate and an up of about 30.
            np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-12)
        else:
            np.testing.assert_allclose(result, expected, rtol=2 * ROUNDING, atol=1e-30)
        for other in (misaligned(gate_up), with_gaps(gate_up)):
            assert np.array_equal(getattr(cpu, name)(other), result)


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_activations_of_extreme_gates(cpu, name):
    gates = np.array([-1e30, -1000, -100, -0.0, 0, 100, 1000, 1e4], np.float32)
    result = getattr(cpu, name)(np.concatenate([gates, np.ones(8, np.float32)])[None])[0]
    np.testing.assert_allclose(result[3:], np.maximum(gates[3:], 0), rtol=1e-6)
    assert np.abs(result[1:3]).max() < 1e-30
    nan = np.full((1, 4), np.nan, np.float32)
    assert np.isnan(getattr(cpu, name)(nan)).all()


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (96, 96), (128, 64), (40, 40), (10, 6), (256, 256)])
def test_rotary_embedding_of_strided_rows(cpu, reference, head_dim, rotary_dim):
    rng = np.random.default_rng(head_dim)
    cos_sin = normal(rng, 50, rotary_dim)
    for num_tokens in (1, 7, 33):
        fused = normal(rng, num_tokens, 5 * head_dim + 3)
        positions = rng.integers(0, 50, num_tokens).astype(np.int32)
        mine, truth = fused.copy(), fused.copy()
        for ops, x in ((cpu, mine), (reference, truth)):
            query = x[:, : 3 * head_dim].reshape(num_tokens, 3, head_dim)
            key = x[:, 3 * head_dim : 5 * head_dim].reshape(num_tokens, 2, head_dim)
            assert np.shares_memory(query, x)
            ops.rotary_embedding(query, key, positions, cos_sin)
        np.testing.assert_allclose(mine, truth, rtol=ROUNDING, atol=ROUNDING * 10)
        assert np.array_equal(mine[:, 5 * head_dim :], fused[:, 5 * head_dim :])


def test_rows_have_the_same_bits_in_any_batch(cpu_threads):
    rng = np.random.default_rng(2)
    x, weight, gates = normal(rng, 100, 576), normal(rng, 576), normal(rng, 100, 600)
    first = cpu_threads[0]
    alone = [
        np.concatenate([first.rms_norm(x[i : i + 1], weight, 1e-5) for i in range(100)]),
        np.concatenate([first.silu_and_mul(gates[i : i + 1]) for i in range(100)]),
        np.concatenate([first.gelu_and_mul(gates[i : i + 1]) for i in range(100)]),
    ]
    for ops in cpu_threads:
        together = [ops.rms_norm(x, weight, 1e-5), ops.silu_and_mul(gates), ops.gelu_and_mul(gates)]
        for a, b in zip(alone, together, strict=True):
            assert np.array_equal(a, b)


def test_take_rows(cpu):
    x = np.arange(60, dtype=np.float32).reshape(10, 6)
    rows = np.array([3, 3, 9, 0], np.int32)
    assert np.array_equal(cpu.take_rows(x, rows), x[rows])
    assert np.array_equal(cpu.take_rows(with_gaps(x), rows), x[rows])
    assert cpu.take_rows(x, rows[:0]).shape == (0, 6)
    with pytest.raises(ShapeError, match="rows has 10"):
        cpu.take_rows(x, np.array([10], np.int32))


def test_what_does_not_fit_is_refused(cpu):
    x = np.ones((2, 8), np.float32)
    with pytest.raises(ShapeError):
        cpu.rms_norm(x, np.ones(7, np.float32), 1e-5)
    with pytest.raises(ShapeError):
        cpu.add(x, np.ones((3, 8), np.float32))
    with pytest.raises(ShapeError):
        cpu.silu_and_mul(np.ones((2, 7), np.float32))
    heads = np.ones((2, 1, 8), np.float32)
    table = np.ones((4, 8), np.float32)
    with pytest.raises(ShapeError, match="positions has 4"):
        cpu.rotary_embedding(heads, heads, np.array([0, 4], np.int32), table)
    with pytest.raises(ShapeError):
        cpu.rotary_embedding(heads, heads, np.array([0, 1], np.int64), table)
    read_only = heads.copy()
    read_only.flags.writeable = False
    with pytest.raises(ShapeError, match="writable"):
        cpu.rotary_embedding(read_only, heads, np.array([0, 1], np.int32), table)
