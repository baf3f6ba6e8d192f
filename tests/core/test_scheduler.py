"""Stories of who runs when: chunks, budget, seats, preemption, policies."""

from __future__ import annotations

import pytest

from octavo.core.interfaces import FinishReason
from octavo.errors import ConfigError
from tests.core.tiny_core import TinyCore, tokens_alone


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    core = TinyCore(max_num_batched_tokens=4)
    core.add("a", range(10), max_tokens=2)
    result = core.step()
    assert core.scheduled() == {"a": 4}
    assert core.table("a") == [0]
    assert result.outputs == []
    core.step()
    assert core.scheduled() == {"a": 4}
    assert core.table("a") == [0, 1]
    result = core.step()
    assert core.scheduled() == {"a": 2}
    assert core.table("a") == [0, 1, 2]
    assert len(result.outputs[0].new_token_ids) == 1
    assert result.stats.num_prompt_tokens == 2
    assert result.stats.num_generated_tokens == 1
    core.step()
    assert core.scheduled() == {"a": 1}
    assert core.told[-1].finish_reason is FinishReason.LENGTH
    assert core.tokens("a") == tokens_alone(range(10), max_tokens=2)


def test_running_sequences_come_before_waiting_ones_and_share_the_budget() -> None:
    core = TinyCore(max_num_batched_tokens=6)
    core.add("a", range(4))
    core.step()
    core.add("b", range(20, 30))
    core.step()
    assert core.scheduled() == {"a": 1, "b": 5}
    core.step()
    assert core.scheduled() == {"a": 1, "b": 5}
    core.step()
    assert core.scheduled() == {"a": 1, "b": 1}


def test_a_long_prompt_leaves_a_token_for_each_running_sequence_behind_it() -> None:
    # The long one is the older one, so it comes first in every step; the answers of the others must not freeze.
    core = TinyCore(max_num_batched_tokens=5, policy="priority", num_blocks=20)
    core.add("b", range(4), priority=1)
    core.step()
    core.add("a", range(20, 40), priority=0)
    core.step()
    assert core.scheduled() == {"b": 1, "a": 4}, "on admission it stands behind"
    core.step()
    assert core.scheduled() == {"a": 4, "b": 1}


def test_at_most_max_num_seqs_run() -> None:
    core = TinyCore(max_num_seqs=2)
    for name in "abc":
        core.add(name, (1, 2), max_tokens=2)
    result = core.step()
    assert core.scheduled() == {"a": 2, "b": 2}
    assert (result.stats.num_running, result.stats.num_waiting) == (2, 1)
    core.step(2)
    assert core.scheduled() == {"c": 2}


def test_without_chunked_prefill_a_prompt_runs_whole_or_not_at_all() -> None:
    core = TinyCore(max_num_batched_tokens=24, enable_chunked_prefill=False, num_blocks=20)
    core.add("a", range(14))
    core.add("b", range(20, 34))
    core.add("c", (1, 2))
    core.step()
    assert core.scheduled() == {"a": 14}, "b does not fit into the rest of the step, and c must not pass it"
    core.step()
    assert core.scheduled() == {"a": 1, "b": 14, "c": 2}


def test_without_chunked_prefill_what_no_step_could_hold_is_cut_all_the_same() -> None:
    core = TinyCore(max_num_batched_tokens=8, enable_chunked_prefill=False)
    core.add("a", range(10), max_tokens=1)
    core.step()
    assert core.scheduled() == {"a": 8}
    core.step()
    assert core.scheduled() == {"a": 2}
    assert core.tokens("a") == tokens_alone(range(10), max_tokens=1)


def test_the_newest_is_preempted_when_blocks_run_out_and_resumes_with_the_same_tokens() -> None:
    core = TinyCore(enable_prefix_caching=False)
    core.add("a", range(8), max_tokens=14)
    core.add("b", range(20, 30), max_tokens=6)
    core.step()
    assert (core.table("a"), core.table("b")) == ([0, 1], [2, 3, 4])
    core.step()
    assert (core.table("a"), core.table("b")) == ([0, 1, 5], [2, 3, 4])
    core.step()
    result = core.step()
    # The 13th token of b needs a block, and b is the newest: it makes room itself.
    assert core.scheduled() == {"a": 1}
    assert core.executor.preempted == [core.seq_id("b")]
    assert result.stats.num_preemptions == 1
    assert core.status("b") == "preempted"
    assert core.table("b") == []
    core.finish()
    assert core.tokens("a") == tokens_alone(range(8), max_tokens=14)
    assert core.tokens("b") == tokens_alone(range(20, 30), max_tokens=6)
    assert core.blocks() == (6, 0, 0)


def test_a_resumed_sequence_finds_its_own_blocks_in_the_cache() -> None:
    core = TinyCore(policy="priority", max_num_seqs=1)
    core.add("a", range(9), max_tokens=6, priority=1)
    core.step(4)
    assert core.table("a") == [0, 1, 2]
    core.add("urgent", range(20, 24), max_tokens=1, priority=0)
    core.step()
    assert core.status("a") == "preempted"
    assert core.blocks() == (2, 3 + 1, 0), "a's three full blocks are cached, and the one of the other"
    core.step()
    assert core.executor.starts[core.seq_id("a")] == (12, 12)
    assert core.scheduled() == {"a": 1}
    assert core.table("a")[:3] == [0, 1, 2]
    core.finish()
    assert core.tokens("a") == tokens_alone(range(9), max_tokens=6)
    assert core.told[-1].num_cached_tokens == 0, "of the first admission"


def test_a_preempted_sequence_is_not_starved_by_newcomers() -> None:
    # vllm#41951: preempted, then overtaken again and again by later arrivals.
    core = TinyCore(enable_prefix_caching=False, max_num_seqs=3)
    core.add("a", range(8), max_tokens=14)
    core.add("b", range(20, 30), max_tokens=6)
    num_steps = 0
    while core.status("b") != "preempted":
        core.step()
    while not core.finals("b"):
        core.add(f"new {num_steps}", (50 + num_steps, 2, 3), max_tokens=2)
        core.step()
        num_steps += 1
        assert num_steps < 30
    assert core.tokens("b") == tokens_alone(range(20, 30), max_tokens=6)
    core.finish()


def test_victims_of_a_more_urgent_newcomer_give_back_their_share_of_the_step() -> None:
    # vllm#23347: three run, the pool is full, a more urgent one arrives; the victims had their turn in this very step.
    core = TinyCore(policy="priority", max_num_batched_tokens=10, enable_prefix_caching=False)
    for name, priority in (("a", 1), ("b", 2), ("c", 3)):
        core.add(name, tuple(range(priority * 20, priority * 20 + 5)), priority=priority)
    core.step(3)
    assert [core.status(name) for name in "abc"] == ["running"] * 3
    assert core.blocks() == (0, 0, 6)
    core.add("urgent", range(80, 89), priority=0, max_tokens=2)
    result = core.step()
    # All three decode, then c and b make room in turn: their two tokens of the budget go to the newcomer.
    assert core.executor.preempted == [core.seq_id("c"), core.seq_id("b")]
    assert core.scheduled() == {"a": 1, "urgent": 9}
    assert (core.status("b"), core.status("c")) == ("preempted", "preempted")
    assert (core.table("b"), core.table("c")) == ([], [])
    assert result.stats.num_preemptions == 2
    core.finish()
    for name, priority in (("a", 1), ("b", 2), ("c", 3)):
        assert core.tokens(name) == tokens_alone(tuple(range(priority * 20, priority * 20 + 5)))
    assert core.tokens("urgent") == tokens_alone(range(80, 89), max_tokens=2)


def test_priority_takes_a_seat_but_not_from_an_equal() -> None:
    core = TinyCore(policy="priority", max_num_seqs=1)
    core.add("a", (1, 2), priority=1)
    core.step()
    core.add("equal", (3, 4), priority=1)
    core.step()
    assert core.scheduled() == {"a": 1}
    core.add("urgent", (5, 6), priority=0)
    core.step()
    assert core.scheduled() == {"urgent": 2}
    assert core.status("a") == "preempted"
    core.finish()
    assert [output.request_id for output in core.told if output.is_final] == ["urgent", "a", "equal"]


def test_fcfs_ignores_priorities() -> None:
    core = TinyCore(max_num_seqs=1)
    core.add("a", (1, 2), priority=9, max_tokens=3)
    core.add("b", (3, 4), priority=0, max_tokens=3)
    core.finish()
    assert [output.request_id for output in core.told if output.is_final] == ["a", "b"]


def test_a_waiting_prompt_is_not_begun_before_there_are_blocks_for_all_of_it() -> None:
    core = TinyCore(max_num_batched_tokens=4)
    core.add("a", range(13), max_tokens=2)
    core.step(4)
    assert core.table("a") == [0, 1, 2, 3]
    core.add("b", range(20, 29), max_tokens=1)
    core.add("c", (1,), max_tokens=1)
    core.step()
    assert core.status("a") == "finished"
    assert core.scheduled() == {"a": 1}, "b needs three blocks, two are free; c must not pass it"
    core.step()
    assert core.scheduled() == {"b": 4}


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'sjf'.*fcfs.*priority"):
        TinyCore(policy="sjf")
