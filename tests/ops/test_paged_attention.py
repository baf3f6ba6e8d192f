"""Attention over the paged cache: against the reference, and bit for bit against itself however the work is cut."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import ConfigError, ShapeError
from octavo.ops.interface import KV_CACHE_DTYPES, AttentionBatch
from tests.ops.op_inputs import attention_batch, misaligned, normal, with_gaps

MIXED = [(1, 1), (7, 7), (1, 40), (5, 90), (33, 33), (1, 130), (70, 150)]


def fill_cache(rng, ops_and_caches, batch, num_kv_heads, head_dim, block_size):
    """The same random keys and values for every position of every sequence, in each cache."""
    for table, context in zip(batch.block_tables, batch.context_lens, strict=True):
        positions = np.arange(context)
        blocks = table[positions // block_size]
        slots = np.where(blocks >= 0, blocks * np.int64(block_size) + positions % block_size, -1)
        key, value = normal(rng, context, num_kv_heads, head_dim), normal(rng, context, num_kv_heads, head_dim)
        for ops, cache in ops_and_caches:
            ops.write_kv(key, value, cache, slots)


@pytest.mark.parametrize("cache_dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (9, 3, 64, 16),
        (4, 1, 256, 16),
        (4, 4, 96, 8),
        (8, 2, 128, 32),
        (2, 1, 40, 4),
        (3, 3, 8, 1),
        (2, 2, 72, 128),
        (5, 1, 13, 5),
    ],
)
@pytest.mark.parametrize("window", [None, 20])
def test_mixed_batches_are_the_reference_within_rounding(
    cpu, reference, cache_dtype, num_heads, num_kv_heads, head_dim, block_size, window
):
    """Scores are sums of head_dim products of size 1 to 3, outputs averages: errors of about 1e-6, bounded at 2e-5.

    AMX rounds queries to bfloat16, by 2^-9 at most: a score of five or so moves by 0.01, and its weight by as much.
    """
    is_rounded = cpu.isa == "amx" and cache_dtype == "bfloat16" and block_size == 16 and head_dim % 32 == 0
    rng = np.random.default_rng(head_dim + block_size)
    num_blocks = 600 if block_size < 4 else 200
    batch = attention_batch(rng, MIXED, block_size, num_blocks, window)
    caches = [
        (ops, ops.allocate_layer_cache(num_blocks, block_size, num_kv_heads, head_dim, cache_dtype))
        for ops in (cpu, reference)
    ]
    fill_cache(rng, caches, batch, num_kv_heads, head_dim, block_size)
    query = normal(rng, int(batch.query_start[-1]), num_heads, head_dim)
    for soft_cap in (None, 5.0):
        mine, truth = (
            ops.paged_attention(query, cache, batch, head_dim**-0.5, window, soft_cap) for ops, cache in caches
        )
        np.testing.assert_allclose(mine, truth, rtol=0, atol=0.02 if is_rounded else 2e-5)


@pytest.mark.parametrize("cache_dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (300, None), (None, 3.0)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (2, 1, 40, 8)])
def test_chunks_batches_blocks_and_threads_leave_the_bits_alone(
    cpu_threads, cache_dtype, window, soft_cap, num_heads, num_kv_heads, head_dim, block_size
):
    """A context of 1,300 positions (three splits) at once, in chunks, token by token at the end; blocks renumbered."""
    rng = np.random.default_rng(3)
    length, num_blocks = 1300, 400
    key, value = normal(rng, length, num_kv_heads, head_dim), normal(rng, length, num_kv_heads, head_dim)
    query = normal(rng, length, num_heads, head_dim)
    expected = None
    for ops in cpu_threads:
        for chunks in ([1300], [1, 63, 436, 500, 300], [1297, 1, 1, 1], [1290, 2, 3, 5]):
            cache = ops.allocate_layer_cache(num_blocks, block_size, num_kv_heads, head_dim, cache_dtype)
            table = rng.permutation(num_blocks)[None].astype(np.int32)
            outputs, start = [], 0
            for chunk in chunks:
                rows = slice(start, start + chunk)
                positions = np.arange(start, start + chunk)
                slots = table[0, positions // block_size] * np.int64(block_size) + positions % block_size
                ops.write_kv(key[rows], value[rows], cache, slots)
                seen = table.copy()
                if window is not None:
                    seen[0, : max(0, start - window + 1) // block_size] = -1
                batch = AttentionBatch(np.array([0, chunk], np.int32), np.array([start + chunk], np.int32), seen, slots)
                outputs.append(ops.paged_attention(query[rows], cache, batch, 0.2, window, soft_cap))
                start += chunk
            result = np.concatenate(outputs)
            expected = result if expected is None else expected
            assert np.array_equal(result, expected), (ops.num_threads, chunks)


@pytest.mark.parametrize("cache_dtype", ["float16", "bfloat16", "int8"])
def test_a_sequence_has_the_same_bits_beside_others(cpu, cache_dtype):
    rng = np.random.default_rng(4)
    batch = attention_batch(rng, [*MIXED, (1, 700), (3, 600)], 16, 200)
    cache = cpu.allocate_layer_cache(200, 16, 2, 64, cache_dtype)
    fill_cache(rng, [(cpu, cache)], batch, 2, 64, 16)
    query = normal(rng, int(batch.query_start[-1]), 6, 64)
    together = cpu.paged_attention(query, cache, batch, 0.125)
    for sequence in range(len(batch.context_lens)):
        rows = slice(batch.query_start[sequence], batch.query_start[sequence + 1])
        alone = AttentionBatch(
            np.array([0, rows.stop - rows.start], np.int32),
            batch.context_lens[sequence : sequence + 1],
            batch.block_tables[sequence : sequence + 1],
            batch.slot_mapping[rows],
        )
        assert np.array_equal(cpu.paged_attention(query[rows], cache, alone, 0.125), together[rows])


def test_queries_may_be_views_of_a_fused_buffer(cpu):
    rng = np.random.default_rng(5)
    batch = attention_batch(rng, [(5, 20), (1, 9)], 16, 20)
    cache = cpu.allocate_layer_cache(20, 16, 2, 64, "float16")
    fill_cache(rng, [(cpu, cache)], batch, 2, 64, 16)
    query = normal(rng, 6, 4, 64)
    expected = cpu.paged_attention(query, cache, batch, 0.125)
    for other in (misaligned(query), with_gaps(query)):
        assert np.array_equal(cpu.paged_attention(other, cache, batch, 0.125), expected)


@pytest.mark.parametrize("cache_dtype", KV_CACHE_DTYPES)
def test_what_lies_in_a_block_beyond_the_context_is_never_read(cpu, cache_dtype):
    """Old keys and values, NaN even, in slots that the sequence has not reached."""
    rng = np.random.default_rng(6)
    batch = attention_batch(rng, [(1, 5), (3, 18)], 16, 8)
    clean = cpu.allocate_layer_cache(8, 16, 1, 32, cache_dtype)
    dirty = cpu.allocate_layer_cache(8, 16, 1, 32, cache_dtype)
    nan = np.full((128, 1, 32), np.nan, np.float32)
    cpu.write_kv(nan, nan, dirty, np.arange(128))
    fill_cache(rng, [(cpu, clean), (cpu, dirty)], batch, 1, 32, 16)
    query = normal(rng, 4, 2, 32)
    assert np.array_equal(cpu.paged_attention(query, clean, batch, 0.2), cpu.paged_attention(query, dirty, batch, 0.2))


def test_a_nan_query_fails_its_own_row_only(cpu):
    rng = np.random.default_rng(7)
    batch = attention_batch(rng, [(3, 30), (2, 600)], 16, 60)
    cache = cpu.allocate_layer_cache(60, 16, 1, 32, "float32")
    fill_cache(rng, [(cpu, cache)], batch, 1, 32, 16)
    query = normal(rng, 5, 1, 32)
    expected = cpu.paged_attention(query, cache, batch, 0.2)
    query[[1, 4]] = np.nan
    result = cpu.paged_attention(query, cache, batch, 0.2)
    assert np.isnan(result[[1, 4]]).all()
    assert np.array_equal(result[[0, 2, 3]], expected[[0, 2, 3]])


def test_very_large_and_very_small_scores(cpu, reference):
    rng = np.random.default_rng(8)
    batch = attention_batch(rng, [(4, 80)], 16, 10)
    caches = [(ops, ops.allocate_layer_cache(10, 16, 1, 32, "float32")) for ops in (cpu, reference)]
    fill_cache(rng, caches, batch, 1, 32, 16)
    query = normal(rng, 4, 1, 32) * np.array([1e-6, 1, 50, 300], np.float32)[:, None, None]
    mine, truth = (ops.paged_attention(query, cache, batch, 1.0) for ops, cache in caches)
    # a score of 1,500 is known to 1e-4 in float32, so weights err by as much
    np.testing.assert_allclose(mine, truth, rtol=1e-3, atol=1e-3)


def test_rows_with_slot_minus_one_are_not_written(cpu):
    rng = np.random.default_rng(9)
    batch = attention_batch(rng, [(4, 4)], 16, 2)
    cache = cpu.allocate_layer_cache(2, 16, 1, 32, "float32")
    key = normal(rng, 4, 1, 32)
    cpu.write_kv(key, key, cache, batch.slot_mapping)
    query = normal(rng, 4, 1, 32)
    before = cpu.paged_attention(query, cache, batch, 1.0)
    cpu.write_kv(key * 2, key * 2, cache, np.full(4, -1, np.int64))
    assert np.array_equal(cpu.paged_attention(query, cache, batch, 1.0), before)


@pytest.mark.parametrize("cache_dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("block_size", [4, 16])
def test_copied_blocks_hold_the_same(cpu, cache_dtype, block_size):
    rng = np.random.default_rng(10)
    caches = [cpu.allocate_layer_cache(10, block_size, 2, 24, cache_dtype) for _ in range(2)]
    batch = attention_batch(rng, [(1, 2 * block_size - 1)], block_size, 5)
    for cache in caches:
        fill_cache(rng, [(cpu, cache)], batch, 2, 24, block_size)
    first, second = int(batch.block_tables[0, 0]), int(batch.block_tables[0, 1])
    query = normal(rng, 1, 4, 24)
    before = [cpu.paged_attention(query, cache, batch, 1.0) for cache in caches]
    cpu.copy_blocks(caches, [(first, 7), (second, 8), (7, 9)])
    batch.block_tables[0, :2] = 9, 8
    assert all(
        np.array_equal(cpu.paged_attention(query, cache, batch, 1.0), output)
        for cache, output in zip(caches, before, strict=True)
    )
    with pytest.raises(ShapeError, match="cannot copy block 3 to 10"):
        cpu.copy_blocks(caches, [(3, 10)])


def test_num_bytes_of_a_cache(cpu, reference):
    assert cpu.allocate_layer_cache(10, 16, 3, 64, "float16").num_bytes == 2 * 10 * 16 * 3 * 64 * 2
    assert cpu.allocate_layer_cache(10, 32, 3, 96, "float32").num_bytes == 2 * 10 * 32 * 3 * 96 * 4
    for ops in (cpu, reference):
        assert ops.allocate_layer_cache(10, 32, 3, 96, "bfloat16").num_bytes == 2 * 10 * 32 * 3 * 96 * 2
        assert ops.allocate_layer_cache(10, 32, 3, 96, "int8").num_bytes == 2 * 10 * 32 * 3 * (96 + 4)
    with pytest.raises(ConfigError, match="'fp8'; use one of float16, bfloat16, float32, int8"):
        cpu.allocate_layer_cache(10, 16, 3, 64, "fp8")
    with pytest.raises(ShapeError, match="at most 1024 dimensions, not 2048"):
        cpu.allocate_layer_cache(10, 16, 1, 2048, "int8")


def test_what_does_not_fit_is_refused(cpu):
    rng = np.random.default_rng(11)
    batch = attention_batch(rng, [(2, 20)], 16, 4)
    cache = cpu.allocate_layer_cache(4, 16, 2, 32, "float16")
    query = normal(rng, 2, 4, 32)
    rows = normal(rng, 2, 2, 32)
    with pytest.raises(ShapeError, match="slot_mapping has 64"):
        cpu.write_kv(rows, rows, cache, np.array([0, 64], np.int64))
    with pytest.raises(ShapeError):
        cpu.write_kv(rows, rows[:1], cache, np.array([0, 1], np.int64))
    with pytest.raises(ShapeError, match="3 heads, not a multiple"):
        cpu.paged_attention(query[:, :3].copy(), cache, batch, 1.0)
    batch.block_tables[0, 1] = 4
    with pytest.raises(ShapeError, match="block 1 of sequence 0 is 4"):
        cpu.paged_attention(query, cache, batch, 1.0)
    batch.context_lens[0] = 1
    with pytest.raises(ShapeError, match="2 rows and a context of 1"):
        cpu.paged_attention(query, cache, batch, 1.0)
    batch.query_start[1] = 3
    with pytest.raises(ShapeError, match="query_start"):
        cpu.paged_attention(query, cache, batch, 1.0)
