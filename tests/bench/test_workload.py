from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from octavo.bench.workload import (
    default_num_requests,
    make_prompt,
    make_workload,
    parse_counts,
    plan_arrivals,
    plan_requests,
    poisson_times,
)
from octavo.errors import ConfigError


def test_the_same_seed_asks_the_same_and_another_round_something_else() -> None:
    workload = make_workload("fixed", seed=3)
    assert plan_requests(workload, 4) == plan_requests(workload, 4)
    prompts = [{request.prompt for request in plan_requests(workload, 8, round_index)} for round_index in (0, 1)]
    assert len(prompts[0] | prompts[1]) == 16
    assert plan_requests(make_workload("fixed", seed=4), 4) != plan_requests(workload, 4)


def test_prompts_have_the_length_that_was_asked_for() -> None:
    for request in plan_requests(make_workload("fixed", 50, 7), 3):
        assert (len(request.prompt.split()), request.max_tokens) == (50, 7)


def test_a_ragged_load_is_half_long_half_short() -> None:
    lengths = Counter(request.max_tokens for request in plan_requests(make_workload("ragged"), 32))
    assert lengths == {120: 16, 20: 16}


def test_a_shared_prefix_is_shared_and_what_follows_is_not() -> None:
    requests = plan_requests(make_workload("shared-prefix", 32), 5)
    words = [request.prompt.split() for request in requests]
    assert len({tuple(each[:512]) for each in words}) == 1
    assert len({tuple(each[512:]) for each in words}) == 5
    assert {len(each) for each in words} == {544}


def test_the_long_prompt_comes_last() -> None:
    requests = plan_requests(make_workload("long-prompt"), 15)
    assert [request.is_long_prompt for request in requests] == [False] * 15 + [True]
    assert len(requests[-1].prompt.split()) == 2000


def test_arrivals_are_as_many_as_the_rate_says_and_in_order() -> None:
    times = poisson_times(random.Random(0), rate=10.0, duration_s=1000.0)
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 1000.0
    # 10,000 expected; five standard deviations of a Poisson count are 500.
    assert 9500 < len(times) < 10_500
    gaps = [after - before for before, after in itertools.pairwise(times)]
    # Exponential gaps: a share exp(-1) is longer than the mean.
    assert sum(gap > 0.1 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.025)


def test_arrivals_have_their_times() -> None:
    requests = plan_arrivals(make_workload("fixed"), rate=5.0, duration_s=10.0)
    due = [request.due_s for request in requests]
    assert due == sorted(due)
    assert requests == plan_arrivals(make_workload("fixed"), rate=5.0, duration_s=10.0)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "a", "1,-2", "1.5"])
def test_counts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--concurrency is"):
        parse_counts("--concurrency", text)


def test_counts_and_defaults() -> None:
    assert parse_counts("--rows", "1, 4,16") == [1, 4, 16]
    assert [default_num_requests(users) for users in (1, 4, 16, 64, 100)] == [4, 8, 32, 64, 100]
    assert len(make_prompt(random.Random(0), 12).split()) == 12


@pytest.mark.parametrize(("scenario", "lengths"), [("sideways", (None, None)), ("fixed", (0, None)), ("fixed", (1, 0))])
def test_an_impossible_workload_is_refused(scenario: str, lengths: tuple[int | None, int | None]) -> None:
    with pytest.raises(ConfigError, match="--"):
        make_workload(scenario, *lengths)
