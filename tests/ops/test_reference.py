"""The reference ops against formulas written out another way, and their promise of batch invariance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.errors import ConfigError, ShapeError
from octavo.ops.interface import AttentionBatch, BFloat16, GroupQuantized, PenaltyRows, SampledRows, SamplingBatch
from octavo.ops.reference import ReferenceLayerCache, ReferenceOps

OPS = ReferenceOps()


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# --- weights --------------------------------------------------------------------------------------------------


def test_parts_of_all_kinds_lie_side_by_side() -> None:
    codes = GroupQuantized(
        np.full((1, 32), 3, np.uint8), np.full((1, 1), 0.5, np.float32), np.ones((1, 1), np.float32), 4
    )
    bits = BFloat16(np.full((1, 32), 0x4000, np.uint16))
    weight = OPS.pack_weight([codes, bits, np.full((1, 32), 4.0, np.float16), np.full((2, 32), 5.0, np.float32)])
    assert weight.shape == (5, 32)
    assert weight.dtype == "mixed"
    np.testing.assert_array_equal(weight.values[:, 7], [2.5, 2.0, 4.0, 5.0, 5.0])


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("float32", 1.00048828125, 1.00048828125),
        ("float16", 1.00048828125, 1.0),  # halfway between 1 and 1 + 2^-10: to even
        ("bfloat16", 1.00390625, 1.0),  # halfway between 1 and 1 + 2^-7: to even
        ("bfloat16", 1.01171875, 1.015625),  # halfway, to even, upward
        ("bfloat16", -3.0e38, -3.004055e38),
    ],
)
def test_conversion_rounds_to_nearest_even(dtype: str, value: float, expected: float) -> None:
    weight = OPS.pack_weight([np.full((1, 32), value, np.float32)], dtype)
    assert weight.dtype == dtype
    np.testing.assert_allclose(weight.values[0, 0], expected, rtol=1e-7)


def test_wrong_weights_are_refused() -> None:
    with pytest.raises(ShapeError, match="one width"):
        OPS.pack_weight([normal(2, 32), normal(2, 64)])
    with pytest.raises(ShapeError, match="matrix"):
        OPS.pack_weight([normal(32)])
    with pytest.raises(ConfigError, match="int4"):
        OPS.pack_weight([normal(2, 32)], "int4")


# --- the forward pass -----------------------------------------------------------------------------------------


def test_linear_is_the_product_with_bias() -> None:
    x, weight, bias = normal(5, 64), normal(300, 64, seed=1), normal(300, seed=2)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T + bias
    np.testing.assert_array_equal(OPS.linear(x, OPS.pack_weight([weight]), bias), expected.astype(np.float32))


def test_linear_of_a_row_does_not_depend_on_the_others() -> None:
    x, weight = normal(33, 96), OPS.pack_weight([normal(300, 96, seed=1)])
    together = OPS.linear(x, weight)
    for row in range(33):
        np.testing.assert_array_equal(OPS.linear(x[row : row + 1], weight)[0], together[row])


def test_embedding_picks_and_scales_rows() -> None:
    table = normal(10, 32)
    np.testing.assert_array_equal(
        OPS.embedding(OPS.pack_weight([table]), np.array([3, 0, 3], np.int32), 2.0), table[[3, 0, 3]] * 2
    )
    with pytest.raises(ShapeError, match="10 rows"):
        OPS.embedding(OPS.pack_weight([table]), np.array([10], np.int32))


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_rms_norm_divides_by_the_root_mean_square(shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape), normal(8, seed=1)
    expected = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(OPS.rms_norm(x, weight, 1e-5), expected, rtol=1e-6)


def test_add_rms_norm_changes_the_residual_and_returns_its_norm() -> None:
    x, residual, weight = normal(3, 8), normal(3, 8, seed=1), normal(8, seed=2)
    total = x + residual
    normed = OPS.add_rms_norm(x, residual, weight, 1e-6)
    np.testing.assert_array_equal(residual, total)
    np.testing.assert_array_equal(normed, OPS.rms_norm(total, weight, 1e-6))


def test_rotary_embedding_turns_pairs_and_leaves_the_rest() -> None:
    angle = 0.3
    table = np.array([[1, 1, 0, 0], [math.cos(angle), 1, math.sin(angle), 0]], np.float32)  # rotary_dim 4
    heads = np.zeros((2, 3, 6), np.float32)
    heads[:, :, 0], heads[:, :, 4:] = 1.0, 9.0
    packed = np.concatenate([heads, heads[:, :1]], axis=1).reshape(2, -1)  # q and k are strided views of one array
    query, key = packed[:, :18].reshape(2, 3, 6), packed[:, 18:].reshape(2, 1, 6)
    OPS.rotary_embedding(query, key, np.array([0, 1], np.int32), table)
    turned = [math.cos(angle), 0, math.sin(angle), 0, 9, 9]
    for x in (query, key):
        np.testing.assert_allclose(x[0, -1], [1, 0, 0, 0, 9, 9], rtol=1e-6)
        np.testing.assert_allclose(x[1, -1], turned, rtol=1e-6)
    np.testing.assert_allclose(packed[1, :6], turned, rtol=1e-6)


def test_gated_activations() -> None:
    gate_up = np.array([[0.0, 1.0, -200.0, 3.0, 2.0, 5.0]], np.float32)
    np.testing.assert_allclose(OPS.silu_and_mul(gate_up), [[0.0, 2 / (1 + math.exp(-1)), 0.0]], rtol=1e-6)
    tanh = math.tanh(math.sqrt(2 / math.pi) * 1.044715)
    np.testing.assert_allclose(OPS.gelu_and_mul(gate_up), [[0.0, 1 + tanh, 0.0]], rtol=1e-6)
    with pytest.raises(ShapeError):
        OPS.silu_and_mul(normal(1, 3))


# --- the cache ------------------------------------------------------------------------------------------------

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 4, 2, 8


class Sequence:
    """Random query, key and value of one sequence, written to blocks that lie apart."""

    def __init__(self, length: int, block_ids: list[int], seed: int):
        self.length, self.block_ids = length, block_ids
        self.query = normal(length, NUM_HEADS, HEAD_DIM, seed=seed)
        self.key = normal(length, NUM_KV_HEADS, HEAD_DIM, seed=seed + 1)
        self.value = normal(length, NUM_KV_HEADS, HEAD_DIM, seed=seed + 2)

    def slots(self) -> np.ndarray:
        return np.array(
            [self.block_ids[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(self.length)], np.int64
        )

    def dense_attention(self, scale: float, window: int | None, soft_cap: float | None) -> np.ndarray:
        key, value = (
            np.repeat(x.astype(np.float64), NUM_HEADS // NUM_KV_HEADS, axis=1) for x in (self.key, self.value)
        )
        scores = np.einsum("qhd,khd->hqk", self.query.astype(np.float64), key) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        distance = np.arange(self.length)[:, None] - np.arange(self.length)[None, :]
        is_hidden = (distance < 0) | (distance >= (window or self.length))
        weights = np.exp(np.where(is_hidden, -np.inf, scores))
        return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), value)


def filled_cache(*sequences: Sequence, dtype: str = "float32") -> ReferenceLayerCache:
    cache = OPS.allocate_layer_cache(16, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype)
    for sequence in sequences:
        OPS.write_kv(sequence.key, sequence.value, cache, sequence.slots())
    return cache


def attention_batch(sequences: list[Sequence], contexts: list[int], counts: list[int]) -> AttentionBatch:
    width = max(len(sequence.block_ids) for sequence in sequences)
    return AttentionBatch(
        query_start=np.cumsum([0, *counts]).astype(np.int32),
        context_lens=np.array(contexts, np.int32),
        block_tables=np.array([s.block_ids + [-1] * (width - len(s.block_ids)) for s in sequences], np.int32),
        slot_mapping=np.full(sum(counts), -1, np.int64),
    )


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (1, None), (5, None), (None, 0.5), (3, 2.0)])
def test_paged_attention_is_dense_attention(window: int | None, soft_cap: float | None) -> None:
    first, second = Sequence(11, [7, 2, 9], 10), Sequence(6, [0, 15], 20)
    cache = filled_cache(first, second)
    batch = attention_batch([second, first], [6, 11], [6, 11])
    out = OPS.paged_attention(np.concatenate([second.query, first.query]), cache, batch, 0.35, window, soft_cap)
    expected = [sequence.dense_attention(0.35, window, soft_cap) for sequence in (second, first)]
    np.testing.assert_allclose(out, np.concatenate(expected), rtol=0, atol=1e-6)


def test_paged_attention_of_a_chunk_has_the_bits_of_the_whole() -> None:
    first, second = Sequence(11, [7, 2, 9], 10), Sequence(6, [0, 15], 20)
    cache = filled_cache(first, second)
    whole = OPS.paged_attention(first.query, cache, attention_batch([first], [11], [11]), 0.35, 6)
    batch = attention_batch([second, first], [6, 9], [1, 3])  # one decode row, and rows 6 to 8 of the other
    rows = np.concatenate([second.query[5:], first.query[6:9]])
    np.testing.assert_array_equal(OPS.paged_attention(rows, cache, batch, 0.35, 6)[1:], whole[6:9])


def test_blocks_behind_a_window_may_be_gone_but_none_within_it() -> None:
    sequence = Sequence(11, [7, 2, 9], 10)
    cache = filled_cache(sequence)
    whole = OPS.paged_attention(sequence.query, cache, attention_batch([sequence], [11], [11]), 0.35, 3)
    sequence.block_ids = [-1, 2, 9]
    batch = attention_batch([sequence], [11], [3])
    np.testing.assert_array_equal(OPS.paged_attention(sequence.query[8:], cache, batch, 0.35, 3), whole[8:])
    with pytest.raises(ShapeError, match="visible position has no block"):
        OPS.paged_attention(sequence.query[8:], cache, batch, 0.35, None)


def test_a_float16_cache_holds_rounded_keys_and_values() -> None:
    sequence = Sequence(5, [3, 1], 10)
    cache = filled_cache(sequence, dtype="float16")
    assert cache.num_bytes == 2 * 16 * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM * 2
    np.testing.assert_array_equal(cache.keys[3, 0], sequence.key[0].astype(np.float16))
    np.testing.assert_array_equal(cache.values[1, 0], sequence.value[4].astype(np.float16))


def test_an_int8_cache_holds_codes_and_scales_of_values() -> None:
    cache = OPS.allocate_layer_cache(1, 2, 1, 4, "int8")
    values = np.array([[[254.0, -127.0, 3.0, 5.0]], [[0.0, 0.0, 0.0, -1.0]]], np.float32)
    OPS.write_kv(values, values, cache, np.arange(2))
    assert cache.num_bytes == 2 * 2 * (4 + 4)
    # 1.5 and 2.5 go to the even neighbour, -63.5 too
    assert cache.values[0].tolist() == [[[127, -64, 2, 2]], [[0, 0, 0, -127]]]
    np.testing.assert_array_equal(cache.value_scales[0, :, 0], np.array([2, 1 / 127], np.float32))


def test_an_int8_cache_holds_keys_as_sums_and_differences() -> None:
    cache = OPS.allocate_layer_cache(1, 1, 1, 6, "int8")
    key = np.array([[[100.0, 27.0, 0.0, 1.0, 2.0, 1.0]]], np.float32)  # six channels are three pairs
    OPS.write_kv(key, key, cache, np.arange(1))
    assert cache.keys[0, 0, 0].tolist() == [127, 73, 1, -1, 3, 1]
    assert cache.key_scales[0, 0, 0] == 1
    four = OPS.allocate_layer_cache(1, 1, 1, 4, "int8")
    OPS.write_kv(key[..., :4], key[..., :4], four, np.arange(1))
    # (100 + 27) + (0 + 1), (100 - 27) + (0 - 1), and the differences; each times 127 / 128
    assert four.keys[0, 0, 0].tolist() == [127, 71, 125, 73]


def test_a_row_without_a_slot_is_not_written() -> None:
    cache = OPS.allocate_layer_cache(2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, "float32")
    rows = np.ones((2, NUM_KV_HEADS, HEAD_DIM), np.float32)
    OPS.write_kv(rows, rows, cache, np.array([-1, 5], np.int64))
    written = cache.keys.reshape(8, -1).any(axis=1)
    assert written.tolist() == [False] * 5 + [True] + [False] * 2
    with pytest.raises(ShapeError, match="cache of 8"):
        OPS.write_kv(rows, rows, cache, np.array([0, 8], np.int64))


def test_blocks_are_copied_in_the_order_given() -> None:
    sequence = Sequence(8, [0, 1], 10)
    cache = filled_cache(sequence)
    OPS.copy_blocks([cache], [(0, 2), (1, 0), (2, 3)])
    np.testing.assert_array_equal(cache.keys[3], sequence.key[:4])
    np.testing.assert_array_equal(cache.values[0], sequence.value[4:])


def test_taken_rows_are_a_copy() -> None:
    x = normal(4, 3)
    taken = OPS.take_rows(x, np.array([2, 0], np.int32))
    np.testing.assert_array_equal(taken, x[[2, 0]])
    assert not np.shares_memory(taken, x)


# --- sampling -------------------------------------------------------------------------------------------------


def sample(
    rows: list[list[float]],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    random: float = 0.0,
    num_logprobs: int = -1,
    penalties: PenaltyRows | None = None,
    banned: tuple[np.ndarray, np.ndarray] | None = None,
) -> SampledRows:
    """The same settings for all rows."""
    count = len(rows)
    batch = SamplingBatch(
        temperature=np.full(count, temperature, np.float32),
        top_k=np.full(count, top_k, np.int32),
        top_p=np.full(count, top_p, np.float32),
        min_p=np.full(count, min_p, np.float32),
        random=np.full(count, random, np.float64),
        num_logprobs=np.full(count, num_logprobs, np.int32),
        penalties=penalties,
        banned=banned,
    )
    return OPS.sample(np.array(rows, np.float32), batch)


LOGITS = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]


def drawn(**settings: float) -> set[int]:
    """All tokens that can be drawn."""
    return {int(sample([LOGITS], random=r / 1000, **settings).token_ids[0]) for r in range(1000)}  # type: ignore[arg-type]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sample([[1.0, 3.0, 3.0], [5.0, 5.0, 5.0]], temperature=0).token_ids.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("random", "token_id"), [(0.0, 0), (0.09, 0), (0.11, 1), (0.49, 1), (0.51, 2), (0.71, 3), (0.9999, 3)]
)
def test_the_draw_walks_the_probabilities_in_order_of_id(random: float, token_id: int) -> None:
    assert sample([LOGITS], random=random).token_ids.tolist() == [token_id]


def test_temperature_sharpens() -> None:
    # p^2 is 0.01, 0.16, 0.04, 0.09 of 0.30: token 1 ends at 0.17 / 0.30
    assert sample([LOGITS], temperature=0.5, random=0.56).token_ids.tolist() == [1]
    assert sample([LOGITS], temperature=0.5, random=0.57).token_ids.tolist() == [2]
    assert sample([LOGITS], temperature=1e-30, random=0.999).token_ids.tolist() == [1]


def test_filters_keep_the_best() -> None:
    assert drawn(top_k=2) == {1, 3}
    assert drawn(top_p=0.39) == {1}
    assert drawn(top_p=0.65) == {1, 3}
    assert drawn(top_p=0.75) == {1, 2, 3}
    assert drawn(top_p=1e-4) == {1}
    assert drawn(min_p=0.6) == {1, 3}
    assert drawn(min_p=1.0) == {1}
    # after top_k 2 the two are renormalized: 0.4 / 0.7 reaches 0.55
    assert drawn(top_k=2, top_p=0.55) == {1}


def test_banned_tokens_are_never_taken_but_logprobs_stay_raw() -> None:
    banned = (np.array([0, 0], np.int32), np.array([1, 3], np.int32))
    result = sample([LOGITS, LOGITS], temperature=0, num_logprobs=2, banned=banned)
    assert result.token_ids.tolist() == [2, 1]
    np.testing.assert_allclose(result.logprobs, [math.log(0.2), math.log(0.4)], rtol=1e-5)
    assert result.top_ids.tolist() == [[1, 3], [1, 3]]
    np.testing.assert_allclose(result.top_logprobs[0], [math.log(0.4), math.log(0.3)], rtol=1e-5)


def test_penalties_act_on_the_listed_tokens_of_their_row() -> None:
    penalties = PenaltyRows(
        rows=np.array([1], np.int32),
        start=np.array([0, 3], np.int32),
        token_ids=np.array([0, 1, 2], np.int32),
        output_counts=np.array([0, 3, 1], np.int32),
        presence=np.array([0.5], np.float32),
        frequency=np.array([0.25], np.float32),
        repetition=np.array([2.0], np.float32),
    )
    logits = np.array([[4.0, 4.0, -1.0, 1.0]] * 2, np.float32)
    count = 2
    OPS.sample(
        logits,
        SamplingBatch(
            temperature=np.zeros(count, np.float32),
            top_k=np.zeros(count, np.int32),
            top_p=np.ones(count, np.float32),
            min_p=np.zeros(count, np.float32),
            random=np.zeros(count),
            num_logprobs=np.full(count, -1, np.int32),
            penalties=penalties,
        ),
    )
    np.testing.assert_array_equal(logits[0], [4.0, 4.0, -1.0, 1.0])
    # prompt only: repetition. 3 times: and 3 * 0.25 + 0.5. Negative, once: times 2, less 0.75.
    np.testing.assert_array_equal(logits[1], [2.0, 2.0 - 1.25, -2.0 - 0.75, 1.0])


@pytest.mark.parametrize("row", [[1.0, math.nan], [-math.inf, -math.inf], [1.0, math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_gives_no_token_and_disturbs_no_other(row: list[float], temperature: float) -> None:
    result = sample([row, [0.0, 9.0]], temperature=temperature, num_logprobs=1)
    assert result.token_ids.tolist() == [-1, 1 if temperature == 0 else 0]
    assert result.top_ids.tolist() == [[-1], [1]]


def test_a_row_whose_tokens_are_all_banned_gives_no_token() -> None:
    banned = (np.zeros(2, np.int32), np.arange(2, dtype=np.int32))
    assert sample([[0.0, 9.0]], banned=banned).token_ids.tolist() == [-1]


def test_zero_logprobs_wanted_gives_the_sampled_one_only() -> None:
    result = sample([LOGITS], temperature=0, num_logprobs=0)
    assert result.top_ids.shape == (1, 0)
    np.testing.assert_allclose(result.logprobs, [math.log(0.4)], rtol=1e-5)
    assert sample([LOGITS], temperature=0).logprobs.tolist() == [0.0]


def test_best_alternatives_are_in_order_with_ties_by_lower_id() -> None:
    assert sample([[1.0, 2.0, 2.0, 0.0]], num_logprobs=4).top_ids.tolist() == [[1, 2, 0, 3]]
