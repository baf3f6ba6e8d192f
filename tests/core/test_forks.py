"""Stories of n > 1: one prompt, several generations, copy on write."""

from __future__ import annotations

import pytest

from octavo.core.interfaces import FinishReason
from tests.core.tiny_core import TinyCore, tokens_alone


@pytest.mark.parametrize("has_cache", [True, False])
def test_siblings_fork_from_the_leader_and_copy_the_shared_tail_when_they_write(has_cache: bool) -> None:
    core = TinyCore(enable_prefix_caching=has_cache)
    core.add("a", range(6), n=2, max_tokens=3)
    core.step()
    assert (core.status("a", 0), core.status("a", 1)) == ("running", "waiting")
    assert core.table("a", 0) == core.table("a", 1) == [0, 1]
    assert core.blocks() == (4, 0, 2)

    core.step()
    # The leader writes position 6 into a copy. The sibling only computes position 5 again, for its logits.
    assert core.executor.block_copies == [(1, 2)]
    assert (core.table("a", 0), core.table("a", 1)) == ([0, 2], [0, 1])
    assert core.executor.starts[core.seq_id("a", 1)] == (5, 6)

    core.step()
    assert core.executor.block_copies == [], "the tail is the sibling's alone by now"
    assert (core.table("a", 0), core.table("a", 1)) == ([], [0, 1])
    core.finish()
    for index in range(2):
        assert core.tokens("a", index) == tokens_alone(range(6), index, max_tokens=3)
    assert core.tokens("a", 0) != core.tokens("a", 1)
    assert len(core.finals("a")) == 1


def test_a_prompt_of_whole_blocks_needs_no_copy() -> None:
    core = TinyCore()
    core.add("a", range(8), n=2, max_tokens=2)
    core.step(2)
    assert core.executor.block_copies == []
    assert core.table("a", 1) == [0, 1]
    core.finish()
    for index in range(2):
        assert core.tokens("a", index) == tokens_alone(range(8), index, max_tokens=2)


def test_siblings_wait_while_one_computes_the_prompt_and_others_pass() -> None:
    core = TinyCore(max_num_batched_tokens=6)
    core.add("a", range(10), n=2, max_tokens=2)
    core.step()
    core.add("b", (50, 51), max_tokens=1)
    core.step()
    assert core.executor.num_tokens == {core.seq_id("a", 0): 4, core.seq_id("b"): 2}
    assert core.table("a", 1) == core.table("a", 0)


def test_when_the_leader_is_aborted_a_sibling_takes_over() -> None:
    core = TinyCore(max_num_batched_tokens=4, enable_prefix_caching=False)
    core.add("a", range(10), n=3, max_tokens=2)
    core.step()
    outputs = core.abort("a", 0)
    assert [(output.index, output.finish_reason, output.is_final) for output in outputs] == [
        (0, FinishReason.ABORT, False)
    ]
    assert core.blocks() == (6, 0, 0)
    core.step()
    assert core.executor.num_tokens == {core.seq_id("a", 1): 4}
    core.finish()
    for index in (1, 2):
        assert core.tokens("a", index) == tokens_alone(range(10), index, max_tokens=2)
    assert len(core.finals("a")) == 1


def test_the_leader_that_ends_with_its_first_token_leaves_the_prompt_to_its_siblings() -> None:
    core = TinyCore()
    core.add("a", range(6), n=2, max_tokens=1)
    core.step()
    assert core.status("a", 0) == "finished"
    assert core.table("a", 1) == [0, 1]
    core.step()
    assert core.executor.starts == {core.seq_id("a", 1): (5, 6)}
    assert core.tokens("a", 1) == tokens_alone(range(6), 1, max_tokens=1)
    assert not core.core.has_unfinished()


def test_a_waiting_fork_gives_up_its_blocks_before_anyone_is_preempted() -> None:
    core = TinyCore(max_num_seqs=1, num_blocks=4)
    core.add("a", range(6), n=2, max_tokens=10)
    core.step()
    assert core.table("a", 1) == [0, 1]
    core.step()
    assert core.table("a", 0) == [0, 2]
    core.step(5)
    assert (core.table("a", 0), core.table("a", 1)) == ([0, 2, 3], [0, 1])
    core.step()
    # Position 12 needs a fourth block: the sibling, which waits for a seat, gives up the old tail.
    assert core.executor.preempted == []
    assert (core.table("a", 0), core.table("a", 1)) == ([0, 2, 3, 1], [])
    core.finish()
    for index in range(2):
        assert core.tokens("a", index) == tokens_alone(range(6), index, max_tokens=10)


@pytest.mark.parametrize("has_cache", [True, False])
def test_three_generations_survive_preemption(has_cache: bool) -> None:
    # vllm#8844: an assertion when a request with n > 1 was preempted.
    core = TinyCore(enable_prefix_caching=has_cache)
    core.add("a", range(6), n=3, max_tokens=12)
    num_preemptions = 0
    while core.core.has_unfinished():
        num_preemptions += core.step().stats.num_preemptions
    assert num_preemptions > 0
    for index in range(3):
        assert core.tokens("a", index) == tokens_alone(range(6), index, max_tokens=12)
    assert len(core.finals("a")) == 1


def test_a_failed_leader_shares_nothing() -> None:
    core = TinyCore()
    core.add("a", range(6), n=2, max_tokens=2)
    core.executor.nan_seq_ids.add(core.seq_id("a", 0))
    core.step()
    assert core.told[-1].error == "The logits are not numbers."
    assert not core.told[-1].is_final
    assert core.blocks() == (6, 0, 0)
    core.finish()
    assert core.tokens("a", 1) == tokens_alone(range(6), 1, max_tokens=2)
    assert len(core.finals("a")) == 1
