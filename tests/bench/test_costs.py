"""Bytes and operations against counts made by hand for tiny shapes."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.bench import costs
from octavo.bench.costs import Cost


def test_linear() -> None:
    # 2 rows of 3 floats in, 2 rows of 5 floats out, the weight once; a product and a sum for each of 2 * 5 * 3.
    assert costs.linear(2, 5, 3, weight_bytes=17, is_integer=True) == Cost((6 + 10) * 4 + 17, 60, True)


def test_row_ops() -> None:
    assert costs.rms_norm(2, 8) == Cost((16 + 16 + 8) * 4, 64)
    assert costs.add_rms_norm(2, 8) == Cost((4 * 16 + 8) * 4, 80)
    assert costs.add(2, 8) == Cost(3 * 16 * 4, 16)
    assert costs.gated(2, 8, is_gelu=False) == Cost((32 + 16) * 4, 80)
    assert costs.gated(2, 8, is_gelu=True).operations == 144
    assert costs.take_rows(2, 8) == Cost(2 * 16 * 4, 0)
    assert costs.embedding(2, 8, row_bytes=5.0) == Cost(2 * 8 * 4 + 10, 16)
    assert costs.sample(2, 100) == Cost(800, 400)


def test_attention_s_memory() -> None:
    # Two rows, 4 query heads and 2 key heads of 8 dimensions: each is read and written; 6 numbers a row of the table.
    assert costs.rotary_embedding(2, 4, 2, 6) == Cost(2 * (2 * 6 * 6) * 4 + 2 * 6 * 4, 3 * 72)
    # Key and value of 2 heads: read as floats, written as halves.
    assert costs.write_kv(3, 2, 8, item_bytes=2) == Cost(2 * 3 * 16 * (4 + 2), 0)
    assert costs.paged_attention(2, 4, 2, 8, 2, (10, 20), num_pairs=30) == Cost(
        2 * 2 * 32 * 4 + 2 * 16 * 2 * 30, 4 * 32 * 30
    )


@pytest.mark.parametrize(("rows", "context_len"), [(1, 1), (1, 7), (4, 4), (3, 10)])
def test_pairs_are_those_of_a_causal_mask(rows: int, context_len: int) -> None:
    mask = np.tril(np.ones((context_len, context_len)))
    assert costs.count_prefill_pairs(rows, context_len) == mask[context_len - rows :].sum()
    assert costs.count_decode_pairs(rows, context_len) == rows * mask[-1].sum()


def test_the_slower_of_moving_and_computing_is_the_limit() -> None:
    assert Cost(100, 10).limit_s(bytes_per_s=50, operations_per_s=1) == 10
    assert Cost(100, 10).limit_s(bytes_per_s=5, operations_per_s=1) == 20
