"""What adapters add: the reference's values, and bits that depend on a row and its adapter alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.errors import ShapeError
from octavo.ops.interface import MAX_LORA_RANK, BFloat16, LoraPart, LoraRows, SublayerLora
from octavo.ops.sublayers import run_attention_sublayer, run_mlp_sublayer
from tests.ops.op_inputs import attention_batch, normal
from tests.ops.test_sublayers import make_attention, make_mlp, positions_of

KINDS = ["float32", "float16", "bfloat16"]


def lora_rows(*groups: list[int]) -> LoraRows:
    start = np.cumsum([0, *(len(group) for group in groups)]).astype(np.int32)
    return LoraRows(np.array([row for group in groups for row in group], np.int32), start)


def as_kind(values: np.ndarray, kind: str) -> Any:
    if kind == "bfloat16":
        return BFloat16((np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16))
    return values.astype(kind)


def lora_part(
    rng: np.random.Generator, rank: int, width: int, first: int, num_outputs: int, kind: str = "float16"
) -> LoraPart:
    down, up = normal(rng, rank, width) / np.float32(width**0.5), normal(rng, num_outputs, rank)
    return LoraPart(first, as_kind(down, kind), as_kind(up, kind), 0.75)


def pack(ops: Any, seed: int, ranks: list[int], width: int, num_outputs: int, kind: str = "float16") -> Any:
    """Parts of these ranks, each with its share of the outputs; rank 0 leaves its share alone."""
    rng = np.random.default_rng(seed)
    share = num_outputs // len(ranks)
    parts = [lora_part(rng, rank, width, i * share, share, kind) for i, rank in enumerate(ranks) if rank]
    return ops.pack_lora(parts, num_outputs, width)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "num_outputs"), [(96, 192), (37, 45), (8, 3), (576, 960), (40, 16)])
def test_the_values_are_the_reference_s(cpu, reference, kind, width, num_outputs):
    ranks = [[1, 16, 3], [0, 64, 0], [8, 8, 8], [5, 0, 1]]
    rows = lora_rows([1, 2, 9], [4], [], [0, 3, 5, 6, 7, 8, 11, 12, 13])
    x, before = normal(np.random.default_rng(0), 14, width), normal(np.random.default_rng(1), 14, num_outputs)
    results = []
    for ops in (cpu, reference):
        weights = [pack(ops, seed, each, width, num_outputs, kind) for seed, each in enumerate(ranks)]
        out = before.copy()
        ops.lora_delta(x, out, rows, weights)
        results.append(out)
    assert np.array_equal(results[0][10], before[10])  # a row without adapter is left alone, to the bit
    # A number of down(x) is about 1 and has width roundings, and an output sums up to 64 of them.
    assert np.abs(results[0] - results[1]).max() < 64 * width**0.5 * 2**-23


def test_a_row_s_bits_depend_on_its_adapter_only(cpu_threads):
    width, num_outputs = 96, 192
    x = normal(np.random.default_rng(2), 40, width)
    seen = []
    for ops in cpu_threads:
        mine = pack(ops, 7, [16, 0, 5], width, num_outputs)
        others = [pack(ops, seed, [rank] * 3, width, num_outputs) for seed, rank in enumerate((1, 8, 64, 33))]
        for rows, weights in (
            (lora_rows([20]), [mine]),
            (lora_rows([19, 20, 21]), [mine]),
            (lora_rows(list(range(40))), [mine]),
            (lora_rows([1, 2, 3], [7, 20], [8], [9], [0, 39]), [others[0], mine, *others[1:]]),
            (lora_rows([1, 2, 3], [20, 22, 30, 31, 32]), [None, mine]),
        ):
            out = np.zeros((40, num_outputs), np.float32)
            ops.lora_delta(x, out, rows, weights)
            seen.append(out[20])
    for other in seen[1:]:
        assert np.array_equal(seen[0], other)


@pytest.mark.parametrize("options", [{}, {"has_output_norm": True}, {"has_bias": True}], ids=str)
def test_the_sublayers_have_the_bits_of_their_ops_and_rows_without_adapter_keep_theirs(cpu, options):
    hidden = 96
    attention, mlp = make_attention(cpu, 3, **options), make_mlp(cpu, 4, **options)
    rng = np.random.default_rng(1)
    batch = attention_batch(rng, [(1, 1), (7, 7), (1, 40), *[(240, 245)] * 3, (1, 9)], 16, 120)
    num_rows = int(batch.query_start[-1])
    before = normal(rng, num_rows, hidden)
    rows = lora_rows(
        list(range(1, 8)), [num_rows - 1]
    )  # of sequence 1, and of the last one: behind the MLP's first cut
    pairs = [
        SublayerLora(
            rows,
            [pack(cpu, seed, ranks, hidden, 320) for seed, ranks in enumerate(([16, 4, 8], [1, 0, 64]))],
            [pack(cpu, 9, [8], width, hidden), None],
        )
        for width in (192, 160)  # of the output's and of down's inputs
    ]
    results = []
    for run_attention, run_mlp, lora in (
        (cpu.attention_sublayer, cpu.mlp_sublayer, (None, None)),
        (cpu.attention_sublayer, cpu.mlp_sublayer, pairs),
        (
            lambda *args: run_attention_sublayer(cpu, *args),
            lambda *args: run_mlp_sublayer(cpu, *args),
            pairs,
        ),
    ):
        residual, cache = before.copy(), cpu.allocate_layer_cache(120, 16, 2, 32, "float16")
        run_attention(attention, residual, positions_of(batch), batch, cache, lora[0])
        run_mlp(mlp, residual, lora[1])
        results.append(residual)
    plain, fused, single = results
    has_adapter = np.zeros(num_rows, bool)
    has_adapter[rows.rows] = True
    assert np.array_equal(fused, single)
    assert np.array_equal(fused[~has_adapter], plain[~has_adapter])
    assert (fused[has_adapter] != plain[has_adapter]).any(axis=1).all()


def test_bytes_are_those_of_the_matrices(cpu):
    weight = pack(cpu, 0, [16, 16, 16], 576, 960)
    assert weight.num_bytes == 2 * 16 * (3 * 576 + 960)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [LoraPart(0, np.zeros((2, 32), np.float32), np.zeros((8, 3), np.float32), 1.0)],
        [LoraPart(0, np.zeros((2, 31), np.float32), np.zeros((8, 2), np.float32), 1.0)],
        [LoraPart(60, np.zeros((2, 32), np.float32), np.zeros((8, 2), np.float32), 1.0)],
        [LoraPart(first, np.zeros((2, 32), np.float32), np.zeros((8, 2), np.float32), 1.0) for first in (0, 7)],
        [LoraPart(0, np.zeros((MAX_LORA_RANK + 1, 32), np.float32), np.zeros((8, MAX_LORA_RANK + 1), np.float32), 1.0)],
        [LoraPart(0, np.zeros((2, 32), np.float16), np.zeros((8, 2), np.float32), 1.0)],
    ],
)
def test_matrices_that_do_not_fit_are_refused(cpu, parts):
    with pytest.raises(ShapeError):
        cpu.pack_lora(parts, 64, 32)


def test_rows_that_do_not_fit_are_refused(cpu):
    weight = pack(cpu, 0, [4], 32, 64)
    x, out = np.zeros((3, 32), np.float32), np.zeros((3, 64), np.float32)
    for rows in (lora_rows([3]), lora_rows([-1]), lora_rows([1, 0]), lora_rows([0, 0]), lora_rows([0], [1])):
        with pytest.raises(ShapeError):
            cpu.lora_delta(x, out, rows, [weight])
    with pytest.raises(ShapeError):
        cpu.lora_delta(x, np.zeros((3, 65), np.float32), lora_rows([0]), [weight])
