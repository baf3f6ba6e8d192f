"""Stories of how requests end: limits, stop tokens, aborts, failures; and the numbers that are told."""

from __future__ import annotations

import pytest

from octavo.core.interfaces import FinishReason, ModelRunnerOutput, SchedulerOutput
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.sequence import Sequence
from octavo.errors import InvalidRequestError
from tests.core.tiny_core import EOS, TinyCore, tokens_alone


def test_a_prompt_that_fills_the_window_gets_its_final_answer_at_once() -> None:
    core = TinyCore()
    (output,) = core.add("a", range(24))
    assert (output.finish_reason, output.is_final) == (FinishReason.ERROR, True)
    assert output.error is not None
    assert "24 tokens, but max_model_len is 24" in output.error
    assert not core.core.has_unfinished()
    assert core.add("a", range(23)) == [], "the id is free again"


def test_a_request_that_the_whole_cache_cannot_hold_is_refused_with_the_numbers() -> None:
    core = TinyCore(num_blocks=3)
    outputs = core.add("a", range(6), max_tokens=8, n=2)
    assert [(output.index, output.is_final) for output in outputs] == [(0, False), (1, True)]
    error = outputs[0].error or ""
    for part in ("14 tokens", "need 4 KV cache blocks", "has 3", "--kv-cache-memory-bytes", "--max-model-len"):
        assert part in error
    # The last of 13 tokens is never written: 12 fill the pool exactly.
    assert core.add("b", range(6), max_tokens=7) == []
    core.finish()
    assert core.tokens("b") == tokens_alone(range(6), max_tokens=7)


def test_an_empty_prompt_is_refused() -> None:
    (output,) = TinyCore().add("a", ())
    assert output.is_final
    assert "no tokens" in (output.error or "")


def test_a_second_unfinished_request_of_the_same_id_is_refused() -> None:
    core = TinyCore()
    core.add("a", (1, 2))
    with pytest.raises(InvalidRequestError, match="'a' belongs to a request that is not finished") as caught:
        core.add("a", (3, 4))
    assert caught.value.param == "request_id"
    core.finish()
    assert len(core.finals("a")) == 1


@pytest.mark.parametrize(
    ("params", "reason", "stop_reason", "num_tokens"),
    [
        ({"max_tokens": 5}, FinishReason.STOP, None, 3),
        ({"max_tokens": 2}, FinishReason.LENGTH, None, 2),
        ({"max_tokens": 3}, FinishReason.STOP, None, 3),
        ({"max_tokens": 5, "ignore_eos": True}, FinishReason.LENGTH, None, 5),
        ({"max_tokens": 5, "stop_token_ids": (11,)}, FinishReason.STOP, 11, 2),
        ({"max_tokens": 5, "stop_token_ids": (EOS,), "ignore_eos": True}, FinishReason.STOP, EOS, 3),
        ({"max_tokens": None, "ignore_eos": True}, FinishReason.LENGTH, None, 22),
    ],
)
def test_how_a_sequence_ends(
    params: dict[str, object], reason: FinishReason, stop_reason: int | None, num_tokens: int
) -> None:
    script = {0: 10, 1: 11, 2: EOS}
    core = TinyCore(choose=lambda scheduled: script.get(len(scheduled.token_ids) - 2, 12))
    core.add("a", (1, 2), **params)  # type: ignore[arg-type]
    core.finish()
    assert (core.told[-1].finish_reason, core.told[-1].stop_reason) == (reason, stop_reason)
    assert core.tokens("a") == [10, 11, EOS, *([12] * 20)][:num_tokens], "an end token is part of the output"


def test_end_tokens_are_banned_before_min_tokens_and_end_nothing() -> None:
    core = TinyCore(choose=lambda scheduled: EOS)
    core.executor.vocab_size = 200
    core.add("a", (1, 2), max_tokens=8, min_tokens=2, stop_token_ids=(EOS + 1,))
    core.step()
    assert core.executor.banned == {core.seq_id("a"): (EOS, EOS + 1)}
    core.step(2)
    assert core.executor.banned == {core.seq_id("a"): ()}
    assert core.tokens("a") == [EOS + 2, EOS + 2, EOS]
    assert core.told[-1].finish_reason is FinishReason.STOP


def test_an_end_token_before_min_tokens_does_not_end_even_if_it_is_sampled() -> None:
    request = Request(
        request_id="a",
        prompt_token_ids=(1,),
        sampling_params=SamplingParams(max_tokens=4, min_tokens=1),
        seed=0,
        eos_token_ids=(EOS,),
    )
    sequence = Sequence(request, 0, 0, [], max_model_len=24, num_kv_groups=1)
    assert sequence.append_token(EOS) == (None, None)
    assert sequence.append_token(EOS) == (FinishReason.STOP, None)


def test_siblings_draw_from_seeds_of_their_own_and_the_first_from_the_requests() -> None:
    core = TinyCore()
    core.add("a", (1, 2), n=3)
    seeds = [core.sequence("a", index).scheduled.seed for index in range(3)]
    assert seeds[0] == 1
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_negative_seed_is_mapped_into_64_bits() -> None:
    request = Request(request_id="a", prompt_token_ids=(1,), sampling_params=SamplingParams(), seed=-1)
    sequence = Sequence(request, 0, 0, [], max_model_len=24, num_kv_groups=1)
    assert sequence.scheduled.seed == 2**64 - 1


def test_abort_while_waiting() -> None:
    core = TinyCore(max_num_seqs=1)
    core.add("a", (1, 2))
    core.add("b", (3, 4))
    core.step()
    (output,) = core.abort("b")
    assert (output.finish_reason, output.is_final, output.new_token_ids) == (FinishReason.ABORT, True, [])
    core.finish()
    assert core.tokens("a") == tokens_alone((1, 2))


def test_abort_in_the_middle_of_a_prompt_leaves_its_full_blocks_in_the_cache() -> None:
    core = TinyCore(max_num_batched_tokens=6)
    core.add("a", range(10))
    core.step()
    assert core.table("a") == [0, 1]
    core.abort("a")
    assert core.blocks() == (5, 1, 0)


def test_abort_while_decoding_tells_the_executor_with_the_next_step() -> None:
    core = TinyCore()
    core.add("a", range(5))
    core.step(2)
    core.abort("a")
    assert core.step().outputs == []
    assert core.executor.finished_seq_ids == [], "an empty step is not executed"
    core.add("b", (1,), max_tokens=2)
    core.step()
    assert core.executor.finished_seq_ids == [core.seq_id("a")]


def test_abort_while_preempted_and_of_a_fork() -> None:
    core = TinyCore(policy="priority", max_num_seqs=1)
    core.add("a", range(6), n=2, priority=1)
    core.step()
    core.add("urgent", (1,), max_tokens=3)
    core.step()
    assert core.status("a", 0) == "preempted"
    assert core.table("a", 1) == [0, 1], "the fork still holds the prompt"
    outputs = core.abort("a")
    assert [output.is_final for output in outputs] == [False, True]
    assert core.blocks()[2] == 1
    core.finish()
    assert core.blocks()[2] == 0


def test_gauges_are_zero_right_after_all_is_aborted() -> None:
    # vllm#22545: they were updated by steps only.
    core = TinyCore(enable_prefix_caching=False)
    for name in "abc":
        core.add(name, range(6), n=2)
    core.step(2)
    for name in "abc":
        core.abort(name)
    stats = core.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_free_blocks) == (0, 0, 0, 6)
    assert not core.core.has_unfinished()


def test_unknown_and_finished_requests_are_aborted_without_a_word() -> None:
    core = TinyCore()
    core.add("a", (1,), max_tokens=1)
    core.finish()
    assert core.abort("a") == []
    assert core.abort("never") == []
    assert core.abort("never", 0) == []


def test_abort_sequence_ends_one_of_n() -> None:
    core = TinyCore()
    core.add("a", (1, 2), n=2, max_tokens=4)
    core.step(2)
    (output,) = core.abort("a", 0)
    assert (output.index, output.is_final) == (0, False)
    assert core.abort("a", 0) == []
    assert core.abort("a", 2) == []
    (output,) = core.abort("a", 1)
    assert (output.index, output.is_final) == (1, True)


def test_a_step_that_fails_is_run_again_one_by_one() -> None:
    core = TinyCore()
    for name, prompt in (("a", range(6)), ("b", range(20, 26)), ("c", range(40, 44))):
        core.add(name, prompt, max_tokens=4)
    core.step()
    core.executor.fail_next = True
    core.step()
    assert core.executor.num_steps == 1 + 1 + 3
    core.finish()
    for name, prompt in (("a", range(6)), ("b", range(20, 26)), ("c", range(40, 44))):
        assert core.tokens(name) == tokens_alone(prompt, max_tokens=4)


def test_only_the_sequence_that_fails_alone_ends_and_nothing_of_it_is_shared() -> None:
    core = TinyCore()
    core.add("a", range(6), max_tokens=4)
    core.add("b", range(20, 28), max_tokens=4)
    core.executor.failing_seq_ids.add(core.seq_id("b"))
    result = core.step()
    assert [(output.request_id, output.finish_reason) for output in result.outputs] == [
        ("a", None),
        ("b", FinishReason.ERROR),
    ]
    assert "RuntimeError: sequence 1 is poison" in (core.finals("b")[0].error or "")
    assert core.blocks() == (4, 0, 2)
    core.add("again", range(20, 28), max_tokens=1)
    core.finish()
    assert core.finals("again")[0].num_cached_tokens == 0
    assert core.tokens("a") == tokens_alone(range(6), max_tokens=4)


def test_a_failed_sequence_takes_back_what_it_had_published() -> None:
    core = TinyCore()
    core.add("a", range(8), max_tokens=4)
    core.step()
    core.executor.nan_seq_ids.add(core.seq_id("a"))
    core.step()
    assert core.finals("a")[0].error == "The logits are not numbers."
    assert core.blocks() == (6, 0, 0)


def test_a_failed_step_makes_the_copies_of_its_forks_again() -> None:
    core = TinyCore()
    core.add("a", range(6), n=2, max_tokens=4)
    core.step()
    core.executor.fail_next_at_once = True
    core.step()
    assert core.executor.num_steps == 1 + 1 + 2
    core.finish()
    for index in range(2):
        assert core.tokens("a", index) == tokens_alone(range(6), index, max_tokens=4)


def test_an_executor_that_forgets_a_sequence_fails_it() -> None:
    class Forgetful:
        def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            return ModelRunnerOutput()

    core = TinyCore()
    core.core.executor = Forgetful()
    core.add("a", (1, 2))
    core.step()
    assert "no token" in (core.finals("a")[0].error or "")


def test_logprobs_go_with_their_tokens() -> None:
    core = TinyCore()
    core.add("a", (1, 2), max_tokens=2, logprobs=0)
    core.finish()
    assert [output.new_logprobs[0].token_id for output in core.told] == core.tokens("a")


def test_an_empty_core_steps_quietly() -> None:
    core = TinyCore()
    result = core.step()
    assert result.outputs == []
    assert result.stats.num_scheduled_tokens == 0
    assert core.executor.num_steps == 0
