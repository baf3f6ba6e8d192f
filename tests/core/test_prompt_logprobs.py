"""Prompts that are scored: every token once, whatever is cached, preempted or forked, and few at a time."""

from __future__ import annotations

from octavo.core.admission import MAX_SCORED_ROWS
from tests.core.tiny_core import TinyCore, tokens_alone


def scores(core: TinyCore, request_id: str) -> list[tuple[int, float]]:
    return [
        (entry.token_id, entry.logprob)
        for output in core.told
        if output.request_id == request_id
        for entry in output.new_prompt_logprobs
    ]


def expected(prompt: range) -> list[tuple[int, float]]:
    return [(token_id, -float(position)) for position, token_id in enumerate(prompt) if position]


def test_each_prompt_token_but_the_first_is_scored_before_the_answer() -> None:
    core = TinyCore()
    core.add("a", range(10), prompt_logprobs=0)
    core.add("b", range(20, 21), prompt_logprobs=0)
    core.finish()
    assert scores(core, "a") == expected(range(10))
    assert scores(core, "b") == []
    assert not core.told[0].new_token_ids
    assert core.tokens("a") == tokens_alone(range(10))


def test_a_cached_prompt_is_computed_again_and_scored_the_same() -> None:
    # H17, H43: cached tokens have no logits
    core = TinyCore(num_blocks=20)
    core.add("first", range(12))
    core.finish()
    for name in ("a", "b"):
        core.add(name, range(12), prompt_logprobs=1)
        core.finish()
        assert scores(core, name) == expected(range(12))
        assert core.finals(name)[0].num_cached_tokens == 0
    core.add("last", range(12))
    core.finish()
    assert core.finals("last")[0].num_cached_tokens > 0


def test_scored_prompts_share_the_rows_of_a_step_and_others_pass() -> None:
    core = TinyCore(num_blocks=200, max_model_len=200, max_num_batched_tokens=500)
    for name, start in (("a", 0), ("b", 200)):
        core.add(name, range(start, start + 150), prompt_logprobs=0)
    core.add("c", range(400, 450))
    core.step()
    assert core.scheduled() == {"a": MAX_SCORED_ROWS, "c": 50}
    core.finish()
    assert scores(core, "a") == expected(range(150))
    assert [token for token, _ in scores(core, "b")] == list(range(201, 350))


def test_whole_prompts_are_cut_too_when_they_are_scored() -> None:
    core = TinyCore(num_blocks=200, max_model_len=200, max_num_batched_tokens=500, enable_chunked_prefill=False)
    core.add("a", range(150), prompt_logprobs=0)
    core.finish()
    assert scores(core, "a") == expected(range(150))


def test_of_n_generations_one_tells_the_scores() -> None:
    core = TinyCore(num_blocks=20)
    core.add("a", range(10), prompt_logprobs=0, n=3)
    core.finish()
    assert scores(core, "a") == expected(range(10))
    assert core.tokens("a", 2) == tokens_alone(range(10), 2)


def test_a_preempted_prompt_goes_on_where_its_scores_ended() -> None:
    core = TinyCore(num_blocks=7, max_num_batched_tokens=6, policy="priority")
    core.add("a", range(16), prompt_logprobs=0, priority=5)
    core.step(2)
    core.add("urgent", range(50, 62), priority=0, salt="x")
    num_preemptions = 0
    while core.core.has_unfinished():
        num_preemptions += core.step().stats.num_preemptions
    assert num_preemptions > 0
    assert scores(core, "a") == expected(range(16))
    assert core.tokens("a") == tokens_alone(range(16))
