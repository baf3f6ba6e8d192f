"""Sampling on the CPU backend, against the reference and against what must hold by arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import ShapeError
from octavo.ops.interface import PenaltyRows
from tests.ops.op_inputs import misaligned, normal, sampling_batch, with_gaps


def assert_same(mine, truth):
    assert np.array_equal(mine.token_ids, truth.token_ids)
    assert np.array_equal(mine.top_ids, truth.top_ids)
    # log-probabilities of up to about 20 in size, rounded to float32 once; their log-sum errs by 1e-6
    np.testing.assert_allclose(mine.logprobs, truth.logprobs, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(mine.top_logprobs, truth.top_logprobs, rtol=1e-6, atol=2e-6)


def both(cpu, reference, logits, batch):
    mine, truth = cpu.sample(logits.copy(), batch), reference.sample(logits.copy(), batch)
    assert_same(mine, truth)
    return mine


@pytest.mark.parametrize("vocab_size", [1, 5, 16, 33, 1000, 4099])
def test_greedy_takes_the_best_and_the_lowest_of_equals(cpu, reference, vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = np.round(normal(rng, 9, vocab_size) * 2)  # many ties
    both(cpu, reference, logits, sampling_batch(9, num_logprobs=np.arange(-1, 8)))


@pytest.mark.parametrize("vocab_size", [7, 50, 515, 5000])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 10_000},
        {"top_p": 1e-6},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_draws_are_the_reference(cpu, reference, vocab_size, settings):
    """The same random numbers give the same tokens: float32 weights move a border by 1e-7 of the total, which no
    number of this seed comes that close to."""
    rng = np.random.default_rng(vocab_size)
    logits = normal(rng, 40, vocab_size) * np.float32(3)
    temperature = rng.choice([0.05, 0.7, 1.0, 2.0, 30.0], 40)
    batch = sampling_batch(40, temperature=temperature, random=rng.random(40), num_logprobs=3, **settings)
    both(cpu, reference, logits, batch)


def test_top_k_and_top_p_keep_the_lower_ids_of_equals(cpu, reference):
    logits = np.zeros((64, 300), np.float32)
    logits[:, 200] = 1.0
    random = np.linspace(0, 0.999, 64)
    top_k = both(cpu, reference, logits, sampling_batch(64, temperature=1.0, top_k=4, random=random))
    assert set(top_k.token_ids) == {0, 1, 2, 200}
    top_p = both(cpu, reference, logits, sampling_batch(64, temperature=1.0, top_p=0.02, random=random))
    assert set(top_p.token_ids) == {0, 1, 2, 3, 200}


@pytest.mark.parametrize("spread", [0.0, 0.01, 20.0])
def test_flat_and_peaked_rows(cpu, reference, spread):
    """A flat row keeps nearly everything, a peaked one nearly nothing."""
    rng = np.random.default_rng(5)
    logits = normal(rng, 12, 3000) * np.float32(spread)
    random = np.linspace(0.03, 0.97, 12)
    for settings in ({"top_p": 0.9}, {"top_k": 2500}, {"top_k": 2500, "top_p": 0.5}):
        both(cpu, reference, logits, sampling_batch(12, temperature=1.0, random=random, **settings))


def test_every_token_is_drawn_as_often_as_its_probability_says(cpu):
    logits = np.log(np.array([0.5, 0.0, 0.2, 0.3], np.float32) + np.float32(1e-38))
    num_draws = 10_000
    random = (np.arange(num_draws) + 0.5) / num_draws
    batch = sampling_batch(num_draws, temperature=1.0, random=random)
    result = cpu.sample(np.tile(logits, (num_draws, 1)), batch)
    counts = np.bincount(result.token_ids, minlength=4)
    np.testing.assert_allclose(counts / num_draws, [0.5, 0.0, 0.2, 0.3], atol=2e-4)


def test_the_extreme_random_numbers_stay_inside(cpu):
    rng = np.random.default_rng(6)
    logits = normal(rng, 2, 2000)
    logits[:, :3] = -np.inf
    logits[:, -3:] = -np.inf
    batch = sampling_batch(2, temperature=1.0, random=np.array([0.0, np.nextafter(1.0, 0.0)]))
    assert list(cpu.sample(logits, batch).token_ids) == [3, 1996]


def test_banned_tokens_and_penalties(cpu, reference):
    rng = np.random.default_rng(7)
    logits = normal(rng, 20, 500)
    rows = np.array([0, 3, 4, 19], np.int32)
    counts = rng.integers(0, 4, 80).astype(np.int32)
    listed = [np.argsort(-logits[row])[:count] for row, count in zip(rows, (20, 0, 30, 30), strict=True)]
    penalties = PenaltyRows(
        rows=rows,
        start=np.array([0, 20, 20, 50, 80], np.int32),
        token_ids=np.concatenate(listed).astype(np.int32),
        output_counts=counts,
        presence=np.array([0.5, 0, -0.5, 1.5], np.float32),
        frequency=np.array([0.1, 0, 0.2, 0.0], np.float32),
        repetition=np.array([1.3, 1, 0.8, 2.0], np.float32),
    )
    best = logits.argmax(-1).astype(np.int32)
    banned = (np.arange(10, 20, dtype=np.int32), best[10:])
    for temperature in (0.0, 0.8):
        batch = sampling_batch(
            20, temperature=temperature, random=rng.random(20), num_logprobs=5, penalties=penalties, banned=banned
        )
        result = both(cpu, reference, logits, batch)
        assert not np.any(result.token_ids[10:] == best[10:])
        assert np.array_equal(result.top_ids[10:, 0], best[10:])  # log-probabilities are of the raw row


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 500, 4099])
def test_masks_and_bias(cpu, reference, vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = normal(rng, 20, vocab_size)
    rows = np.array([0, 3, 4, 11, 19], np.int32)
    num_words = -(-vocab_size // 32)
    masks = rng.integers(-(2**31), 2**31, (5, num_words)).astype(np.int32)
    masks[1] = 0  # nothing may come
    masks[2] = -1  # anything may
    masks[3] = 0
    masks[3, -1] = -1  # the last word only, with bits beyond the vocabulary
    bias_rows = np.repeat(np.array([2, 4, 11, 19], np.int32), 3)
    bias = (
        bias_rows,
        rng.integers(0, vocab_size, 12).astype(np.int32),
        rng.choice([-100, 0.5, 100], 12).astype(np.float32),
    )
    for temperature in (0.0, 0.8):
        batch = sampling_batch(
            20, temperature=temperature, random=rng.random(20), num_logprobs=5, allowed=(rows, masks), bias=bias
        )
        result = both(cpu, reference, logits, batch)
        assert result.token_ids[3] == -1
        assert result.token_ids[11] >= (num_words - 1) * 32
        best = np.argmax(logits, -1)
        assert np.array_equal(result.top_ids[:3, 0], best[:3])  # log-probabilities are of the raw row
        for row, mask in zip(rows, masks, strict=True):
            token_id = int(result.token_ids[row])
            assert token_id < 0 or mask.view(np.uint32)[token_id // 32] >> (token_id % 32) & 1


def test_a_bias_does_not_bring_back_what_is_excluded(cpu, reference):
    logits = np.zeros((2, 40), np.float32)
    masks = np.array([[0b110, 0]], np.int32)
    bias = (np.array([0, 0, 1], np.int32), np.array([5, 2, 7], np.int32), np.array([100, 1, 100], np.float32))
    batch = sampling_batch(2, allowed=(np.zeros(1, np.int32), masks), bias=bias, banned=(bias[0][2:], bias[1][2:]))
    assert both(cpu, reference, logits, batch).token_ids.tolist() == [2, 0]


def test_broken_rows_fail_and_the_others_do_not(cpu, reference):
    rng = np.random.default_rng(8)
    logits = normal(rng, 8, 100)
    logits[1, 50], logits[3, 99], logits[5], logits[6, 7] = np.nan, np.inf, -np.inf, -np.inf
    for temperature in (0.0, 1.0):
        result = both(cpu, reference, logits, sampling_batch(8, temperature=temperature, num_logprobs=2))
        assert list(result.token_ids < 0) == [False, True, False, True, False, True, False, False]
    everything = (np.zeros(100, np.int32), np.arange(100, dtype=np.int32))
    assert both(cpu, reference, logits, sampling_batch(8, banned=everything)).token_ids[0] == -1


def test_logprobs_are_best_first_with_ties_by_id(cpu, reference):
    logits = np.array([[1, 3, 2, 3, 3, -np.inf, 0]], np.float32)
    result = both(cpu, reference, logits, sampling_batch(1, num_logprobs=20))
    assert list(result.top_ids[0, :7]) == [1, 3, 4, 2, 0, 6, 5]
    assert list(result.top_ids[0, 7:]) == [-1] * 13


def test_a_row_draws_the_same_in_any_batch(cpu_threads):
    rng = np.random.default_rng(9)
    logits = normal(rng, 33, 3001) * 2
    settings = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "num_logprobs": 4}
    random = rng.random(33)
    expected = cpu_threads[0].sample(logits.copy(), sampling_batch(33, random=random, **settings))
    for ops in cpu_threads:
        for row in (0, 7, 32):
            one = ops.sample(logits[row : row + 1].copy(), sampling_batch(1, random=random[row], **settings))
            assert one.token_ids[0] == expected.token_ids[row]
            assert one.logprobs[0] == expected.logprobs[row]
            assert np.array_equal(one.top_logprobs[0], expected.top_logprobs[row])
        again = ops.sample(with_gaps(misaligned(logits)), sampling_batch(33, random=random, **settings))
        assert np.array_equal(again.token_ids, expected.token_ids)


def test_what_does_not_fit_is_refused(cpu):
    logits = np.zeros((2, 10), np.float32)
    with pytest.raises(ShapeError, match="temperature has 3"):
        cpu.sample(logits, sampling_batch(3))
    with pytest.raises(ShapeError, match="banned token_ids has 10"):
        cpu.sample(logits, sampling_batch(2, banned=(np.zeros(1, np.int32), np.array([10], np.int32))))
    one = np.zeros(1, np.int32)
    with pytest.raises(ShapeError, match="allowed masks has 2"):
        cpu.sample(logits, sampling_batch(2, allowed=(one, np.zeros((1, 2), np.int32))))
    with pytest.raises(ShapeError, match="bias token_ids has 10"):
        cpu.sample(logits, sampling_batch(2, bias=(one, one + 10, np.ones(1, np.float32))))
    none = np.zeros(1, np.float32)
    penalties = PenaltyRows(np.array([2], np.int32), np.array([0, 1], np.int32), one, one, none, none, none + 1)
    with pytest.raises(ShapeError, match=r"penalties\.rows has 2"):
        cpu.sample(logits, sampling_batch(2, penalties=penalties))
