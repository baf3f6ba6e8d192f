"""What each op must read, write and compute, counted by hand. Pure functions; standard library only.

Bytes are what has to move once: inputs, outputs, weights, the cache. Operations are multiplications and additions (a
division, exponential or square root counts as one). M is the number of rows.

    linear            M(K + N) * 4 + weight bytes            2 M N K
    rms_norm          2 M H * 4 + 4 H                        4 M H
    add_rms_norm      4 M H * 4 + 4 H                        5 M H       (x and residual read, residual and out written)
    add               3 M H * 4                              M H
    silu/gelu_and_mul 3 M I * 4                              5 M I / 9 M I
    rotary_embedding  2 M (heads + kv heads) R * 4 + 4 M R   3 M (heads + kv heads) R
    write_kv          2 M kv_heads D (4 + cache item)        0
    paged_attention   2 M heads D * 4                        4 heads D * (pairs of a row and a position that it sees)
                      + 2 kv_heads D * cache item * context
    embedding         M K * 4 + M rows of the weight         M K
    take_rows         2 M H * 4                              0
    sample            M V * 4                                2 M V       (greedy: the largest of V, checked)
"""

from __future__ import annotations

from dataclasses import dataclass

_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """is_integer: the operations are those of quantized weights, to be put beside the integer peak."""

    num_bytes: float
    operations: float
    is_integer: bool = False

    def limit_s(self, bytes_per_s: float, operations_per_s: float) -> float:
        """The least time a machine needs that moves and computes so much a second."""
        return max(self.num_bytes / bytes_per_s, self.operations / operations_per_s)


def linear(rows: int, num_outputs: int, num_inputs: int, weight_bytes: int, is_integer: bool) -> Cost:
    moved = rows * (num_inputs + num_outputs) * _FLOAT + weight_bytes
    return Cost(moved, 2 * rows * num_outputs * num_inputs, is_integer)


def rms_norm(rows: int, width: int) -> Cost:
    return Cost(2 * rows * width * _FLOAT + width * _FLOAT, 4 * rows * width)


def add_rms_norm(rows: int, width: int) -> Cost:
    return Cost(4 * rows * width * _FLOAT + width * _FLOAT, 5 * rows * width)


def add(rows: int, width: int) -> Cost:
    return Cost(3 * rows * width * _FLOAT, rows * width)


def gated(rows: int, inner: int, is_gelu: bool) -> Cost:
    """inner: I, half of what is read."""
    return Cost(3 * rows * inner * _FLOAT, (9 if is_gelu else 5) * rows * inner)


def rotary_embedding(rows: int, num_heads: int, num_kv_heads: int, rotary_dim: int) -> Cost:
    rotated = rows * (num_heads + num_kv_heads) * rotary_dim
    return Cost(2 * rotated * _FLOAT + rows * rotary_dim * _FLOAT, 3 * rotated)


def write_kv(rows: int, num_kv_heads: int, head_dim: int, item_bytes: int) -> Cost:
    return Cost(2 * rows * num_kv_heads * head_dim * (_FLOAT + item_bytes), 0)


def paged_attention(
    rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    item_bytes: int,
    context_lens: tuple[int, ...],
    num_pairs: int,
) -> Cost:
    """context_lens: positions read of each sequence; num_pairs: over all rows, the positions that each sees."""
    moved = 2 * rows * num_heads * head_dim * _FLOAT + 2 * num_kv_heads * head_dim * item_bytes * sum(context_lens)
    return Cost(moved, 4 * num_heads * head_dim * num_pairs)


def count_decode_pairs(rows: int, context_len: int) -> int:
    """rows sequences of one row each, each at the end of its context"""
    return rows * context_len


def count_prefill_pairs(rows: int, context_len: int) -> int:
    """One sequence, its last `rows` positions: the last sees everything, each before it one less."""
    return rows * context_len - rows * (rows - 1) // 2


def embedding(rows: int, width: int, row_bytes: float) -> Cost:
    return Cost(rows * (width * _FLOAT + row_bytes), rows * width)


def take_rows(rows: int, width: int) -> Cost:
    return Cost(2 * rows * width * _FLOAT, 0)


def sample(rows: int, vocab_size: int) -> Cost:
    return Cost(rows * vocab_size * _FLOAT, 2 * rows * vocab_size)
