"""Stories of shared prefixes: hits, eviction, namespaces, prompts that arrive together, sliding windows."""

from __future__ import annotations

from tests.core.tiny_core import TinyCore, tokens_alone


def run(core: TinyCore, request_id: str, prompt: range | tuple[int, ...], **options: object) -> None:
    core.add(request_id, prompt, **{"max_tokens": 1, **options})  # type: ignore[arg-type]
    core.finish()


def num_cached(core: TinyCore, request_id: str) -> int:
    return core.finals(request_id)[0].num_cached_tokens


def test_a_full_hit_recomputes_only_the_last_token_and_does_not_write_it() -> None:
    core = TinyCore()
    run(core, "a", range(8))
    assert core.blocks() == (4, 2, 0)
    core.add("b", range(8), max_tokens=2)
    result = core.step()
    assert core.table("b") == [0, 1]
    assert core.scheduled() == {"b": 1}
    assert core.executor.starts[core.seq_id("b")] == (7, 8)
    assert (result.stats.num_prefix_query_tokens, result.stats.num_prefix_hit_tokens) == (8, 8)
    core.finish()
    assert num_cached(core, "b") == 8
    assert core.tokens("b") == tokens_alone(range(8), max_tokens=2)


def test_a_partial_hit_shares_whole_blocks_only() -> None:
    core = TinyCore()
    core.add("a", range(11), max_tokens=3)
    core.step()
    core.add("b", (*range(6), 60, 61, 62), max_tokens=2)
    result = core.step()
    assert core.table("a") == [0, 1, 2]
    assert core.table("b") == [0, 3, 4], "the second block differs in its third token"
    assert core.executor.starts[core.seq_id("b")] == (4, 4)
    assert result.stats.num_prefix_hit_tokens == 4
    core.finish()
    assert num_cached(core, "b") == 4
    assert core.tokens("b") == tokens_alone((*range(6), 60, 61, 62), max_tokens=2)


def test_the_same_block_after_another_prefix_is_no_hit() -> None:
    core = TinyCore()
    run(core, "a", (1, 1, 1, 1, 5, 6, 7, 8))
    run(core, "b", (2, 2, 2, 2, 5, 6, 7, 8))
    assert num_cached(core, "b") == 0
    run(core, "c", (5, 6, 7, 8, 9))
    assert num_cached(core, "c") == 0


def test_the_answer_is_found_as_part_of_the_next_turn() -> None:
    core = TinyCore()
    core.add("a", range(6), max_tokens=4)
    core.finish()
    turn = (*range(6), *core.tokens("a"), 70, 71)
    run(core, "b", turn)
    assert num_cached(core, "b") == 8
    assert core.tokens("b") == tokens_alone(turn, max_tokens=1)


def test_tail_blocks_are_evicted_before_the_prefix_they_continue() -> None:
    core = TinyCore()
    run(core, "a", range(12))
    assert core.blocks() == (3, 3, 0)
    core.add("b", range(20, 35), max_tokens=2)
    core.step()
    assert core.table("b") == [3, 4, 5, 2], "three free ones, then the tail of a"
    core.finish()
    run(core, "c", range(12))
    assert num_cached(core, "c") == 8


def test_an_evicted_prefix_is_computed_again() -> None:
    core = TinyCore()
    run(core, "a", range(8))
    run(core, "b", range(20, 43))
    run(core, "c", range(8))
    assert num_cached(core, "c") == 0
    assert core.tokens("c") == core.tokens("a")


def test_salts_keep_prefixes_apart() -> None:
    core = TinyCore()
    run(core, "a", range(8), salt="alice")
    run(core, "b", range(8), salt="bob")
    run(core, "c", range(8))
    run(core, "d", range(8), salt="alice")
    assert [num_cached(core, name) for name in "abcd"] == [0, 0, 0, 8]


def test_nothing_is_shared_with_prefix_caching_off() -> None:
    core = TinyCore(enable_prefix_caching=False)
    run(core, "a", range(8))
    assert core.blocks() == (6, 0, 0)
    core.add("b", range(8), max_tokens=1)
    result = core.step()
    assert result.stats.num_prefix_query_tokens == 0
    assert num_cached(core, "b") == 0


def test_a_reset_cache_finds_nothing_of_before_not_even_from_those_who_still_run() -> None:
    core = TinyCore()
    core.add("a", range(4), max_tokens=8)
    core.step(2)
    core.core.reset_prefix_cache()
    core.core.check_invariants()
    core.add("waiting", range(4), max_tokens=1)
    core.finish()
    turn = (*range(4), *core.tokens("a"))
    run(core, "b", turn)
    assert num_cached(core, "waiting") == 0
    assert num_cached(core, "b") == 4, "the block that was computed after the reset, none of a's"
    assert core.tokens("b") == tokens_alone(turn, max_tokens=1)


def test_prompts_that_arrive_together_compute_their_common_prefix_once() -> None:
    core = TinyCore(max_num_batched_tokens=4, num_blocks=10)
    core.add("a", range(10), max_tokens=3)
    core.add("b", (*range(8), 60), max_tokens=2)
    core.add("c", (70, 71), max_tokens=1)
    core.step()
    assert core.scheduled() == {"a": 4}
    core.step()
    assert core.scheduled() == {"a": 4}
    assert core.status("b") == "waiting"
    core.step()
    assert core.scheduled() == {"a": 2, "b": 1, "c": 1}
    assert core.table("b")[:2] == core.table("a")[:2] == [0, 1]
    core.finish()
    assert num_cached(core, "b") == 8


def test_who_waits_for_a_prefix_lets_others_pass() -> None:
    core = TinyCore(max_num_batched_tokens=6)
    core.add("a", range(8), max_tokens=1)
    core.step()
    core.add("b", range(8), max_tokens=1)
    core.add("c", (70, 71), max_tokens=1)
    core.step()
    assert core.scheduled() == {"a": 2, "c": 2}
    assert core.status("b") == "waiting"


def test_when_the_one_who_computes_a_prefix_goes_away_the_waiting_one_computes_it() -> None:
    core = TinyCore(max_num_batched_tokens=4)
    core.add("a", range(12), max_tokens=1)
    core.add("b", range(12), max_tokens=1)
    core.step()
    assert core.scheduled() == {"a": 4}
    core.abort("a")
    core.step()
    assert core.executor.starts[core.seq_id("b")] == (4, 4), "the first block had been computed"
    core.finish()
    assert core.tokens("b") == tokens_alone(range(12), max_tokens=1)


def test_a_full_hit_before_a_preemption_changes_nothing() -> None:
    core = TinyCore(policy="priority", max_num_seqs=1)
    run(core, "a", range(8))
    core.add("b", range(8), max_tokens=3, priority=1)
    core.step()
    core.add("urgent", (50,), max_tokens=1, priority=0)
    core.finish()
    assert core.tokens("b") == tokens_alone(range(8), max_tokens=3)


def test_a_window_group_lets_go_of_what_no_later_position_sees() -> None:
    core = TinyCore(kv_group_windows=(4,))
    core.add("a", range(5), max_tokens=12)
    core.step()
    assert core.table("a") == [0, 1], "position 5 sees 2 to 5"
    core.step(2)
    assert core.table("a") == [-1, 1], "position 7 sees 4 to 7"
    core.step(4)
    assert core.table("a") == [-1, -1, 2], "position 11 sees 8 to 11"
    assert core.blocks() == (3, 2, 1)


def test_groups_draw_from_one_pool_and_only_the_window_group_lets_go() -> None:
    core = TinyCore(kv_group_windows=(None, 4), num_blocks=8)
    core.add("a", range(8), max_tokens=3)
    core.step()
    assert core.table("a", group=0) == [0, 2]
    assert core.table("a", group=1) == [-1, 3], "position 8 sees 5 to 8"
    core.step()
    assert core.table("a", group=0) == [0, 2, 4]
    assert core.table("a", group=1) == [-1, 3, 5]


def test_a_window_hit_needs_only_the_visible_blocks() -> None:
    core = TinyCore(kv_group_windows=(4,), num_blocks=3, max_num_batched_tokens=4)
    core.add("a", range(13), max_tokens=1)
    core.step(4)
    # Three blocks serve four: the first was let go, and evicted for the last.
    assert core.blocks() == (1, 2, 0)
    core.add("b", range(12), max_tokens=2)
    core.step()
    # All of it is computed again but its last position, 11, which sees 8 to 11.
    assert core.table("b") == [-1, -1, 2]
    assert core.executor.starts[core.seq_id("b")] == (11, 12)
    assert core.scheduled() == {"b": 1}


def test_a_window_hit_goes_back_to_where_every_group_has_what_is_visible() -> None:
    core = TinyCore(kv_group_windows=(None, 8), num_blocks=30)
    run(core, "a", range(16))
    pool = core.core.scheduler.kv_cache.pool
    hashes = core.sequence("a").block_hashes
    lost = pool.find_block(hashes[2], 1)
    assert lost is not None
    pool.share_block(lost)
    pool.forget_block(lost)
    pool.free_block(lost)
    core.add("b", range(16), max_tokens=2)
    core.step()
    # At 16 tokens position 15 sees 8 to 15, blocks 2 and 3; at 12, position 12 sees 5 to 12, blocks 1 and 2. At 8,
    # position 8 sees 1 to 8: blocks 0 and 1 are there.
    assert core.executor.starts[core.seq_id("b")] == (8, 8)
    core.finish()
    assert num_cached(core, "b") == 8
