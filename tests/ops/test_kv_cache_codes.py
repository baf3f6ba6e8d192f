"""The int8 KV cache: the same codes in every backend, and close to the keys and values that were written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops.cpu import runnable_isas
from octavo.ops.interface import AttentionBatch
from octavo.ops.reference import ReferenceOps
from tests.ops.conftest import get_cpu
from tests.ops.op_inputs import attention_batch, normal

NUM_BLOCKS = 40


def cache_with(ops, key, value, block_size=16):
    """Positions in order of their slots, all in int8."""
    num_blocks = -(-len(key) // block_size)
    cache = ops.allocate_layer_cache(num_blocks, block_size, key.shape[1], key.shape[2], "int8")
    ops.write_kv(key, value, cache, np.arange(len(key)))
    return cache


def attend(ops, cache, query, context, block_size=16, scale=1.0):
    """One row of query [num_heads, head_dim] over the first `context` positions -> [num_heads, head_dim]."""
    table = np.arange(-(-context // block_size), dtype=np.int32)[None]
    batch = AttentionBatch(np.array([0, 1], np.int32), np.array([context], np.int32), table, np.array([-1]))
    return ops.paged_attention(query[None], cache, batch, scale)[0]


def read_values(ops, cache, num_positions, head_dim):
    """The values as they are kept: position 0 alone is what a context of one sees, and so on by block copies."""
    query = np.zeros((1, head_dim), np.float32)
    seen = []
    for position in range(num_positions):
        ops.copy_blocks([cache], [(position, 0)])
        seen.append(attend(ops, cache, query, 1, block_size=1)[0])
    return np.stack(seen)


@pytest.mark.parametrize("isa", runnable_isas())
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    heads_per_key=st.integers(1, 8),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 3, 8, 12, 20, 48, 64, 80, 100, 128, 256]),
    block_size=st.sampled_from([1, 4, 5, 16, 32, 48]),
    window=st.sampled_from([None, 1, 10, 200]),
    soft_cap=st.sampled_from([None, 5.0]),
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=4),
)
def test_any_shape_is_the_reference_within_rounding(
    isa, seed, heads_per_key, num_kv_heads, head_dim, block_size, window, soft_cap, rows
):
    """A code that differed would be off by a hundredth; what differs is the order of additions."""
    rng = np.random.default_rng(seed)
    cpu, reference = get_cpu(isa), ReferenceOps()
    num_blocks = 4 * (130 // block_size + 1)
    batch = attention_batch(rng, [(new, new + past) for new, past in rows], block_size, num_blocks, window)
    caches = [
        (o, o.allocate_layer_cache(num_blocks, block_size, num_kv_heads, head_dim, "int8")) for o in (cpu, reference)
    ]
    for table, context in zip(batch.block_tables, batch.context_lens, strict=True):
        blocks = table[np.arange(context) // block_size]
        slots = np.where(blocks >= 0, blocks * np.int64(block_size) + np.arange(context) % block_size, -1)
        key, value = (normal(rng, context, num_kv_heads, head_dim) for _ in range(2))
        key *= rng.lognormal(size=head_dim).astype(np.float32)
        key /= np.abs(key).max()
        for ops, cache in caches:
            ops.write_kv(key, value, cache, slots)
    query = normal(rng, int(batch.query_start[-1]), num_kv_heads * heads_per_key, head_dim)
    mine, truth = (ops.paged_attention(query, cache, batch, 1.0, window, soft_cap) for ops, cache in caches)
    np.testing.assert_allclose(mine, truth, rtol=0, atol=5e-5)


def test_a_value_is_kept_to_half_a_code_whatever_its_size(cpu):
    rng = np.random.default_rng(1)
    values = normal(rng, 60, 1, 64) * np.logspace(-30, 30, 60, dtype=np.float32)[:, None, None]
    kept = read_values(cpu, cache_with(cpu, values, values, block_size=1), 60, 64)
    step = np.abs(values[:, 0]).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(kept - values[:, 0]) <= 0.501 * step)
    # one code apart at most: that all are kept exactly would be no codes
    assert np.mean(kept == values[:, 0]) < 0.1


def test_what_is_too_small_for_codes_is_zero(cpu, reference):
    tiny = np.full((1, 1, 32), 9e-36, np.float32)
    for ops in (cpu, reference):
        assert np.all(read_values(ops, cache_with(ops, tiny, tiny, block_size=1), 1, 32) == 0)


def test_a_channel_of_the_keys_that_is_far_larger_costs_the_others_little(cpu):
    """As in real models. Rounded as they are, the other channels of these keys would have four codes each."""
    rng = np.random.default_rng(2)
    key, value = normal(rng, 200, 1, 64), normal(rng, 200, 1, 64)
    key[:, :, 5] += 60
    query = normal(rng, 8, 64)
    query[:, 5] *= 0.1
    exact = cpu.allocate_layer_cache(13, 16, 1, 64, "float32")
    cpu.write_kv(key, value, exact, np.arange(200))
    expected = attend(cpu, exact, query, 200, scale=0.125)
    got = attend(cpu, cache_with(cpu, key, value), query, 200, scale=0.125)
    assert np.abs(got - expected).max() < 0.03


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("is_key", [True, False])
def test_what_is_no_number_fails_the_rows_that_see_it_and_no_others(cpu, reference, broken, is_key):
    rng = np.random.default_rng(3)
    key, value = normal(rng, 40, 1, 32), normal(rng, 40, 1, 32)
    query = normal(rng, 40, 2, 32)
    table = np.arange(3, dtype=np.int32)[None]
    batch = AttentionBatch(np.array([0, 40], np.int32), np.array([40], np.int32), table, np.arange(40))
    for ops in (cpu, reference):
        clean = ops.paged_attention(query, cache_with(ops, key, value), batch, 0.2)
        spoilt_key, spoilt_value = key.copy(), value.copy()
        (spoilt_key if is_key else spoilt_value)[25, 0, 7] = broken
        result = ops.paged_attention(query, cache_with(ops, spoilt_key, spoilt_value), batch, 0.2)
        assert np.isnan(result[25:]).all()
        np.testing.assert_array_equal(result[:25], clean[:25])
