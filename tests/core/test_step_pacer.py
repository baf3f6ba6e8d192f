"""A prompt is read in pieces that keep the steps of running answers short; what comes out does not change."""

from __future__ import annotations

import pytest

from octavo.core.step_pacer import MIN_CHUNK, StepPacer
from tests.core.tiny_core import TinyCore, tokens_alone


def test_before_anything_was_measured_a_chunk_is_small() -> None:
    assert StepPacer(0.06).limit_prompt_tokens(4, 1) == 128


def test_a_chunk_fills_what_decoding_leaves_of_the_target() -> None:
    pacer = StepPacer(0.06)
    pacer.note_step(num_prompt_tokens=0, num_decode_tokens=12, time_s=0.02)
    pacer.note_step(num_prompt_tokens=128, num_decode_tokens=12, time_s=0.02 + 0.0125)
    # Just under 0.1 ms a token, 40 ms left, and whole tiles of 16 rows.
    assert pacer.limit_prompt_tokens(12, 1) == 400


def test_tokens_far_into_a_prompt_are_dearer_so_chunks_shrink() -> None:
    pacer = StepPacer(0.06)
    limits = []
    for cost in (0.1e-3, 0.2e-3, 0.4e-3, 0.8e-3):
        pacer.note_step(num_prompt_tokens=100, num_decode_tokens=0, time_s=100 * cost)
        limits.append(pacer.limit_prompt_tokens(12, 1))
    assert limits == sorted(limits, reverse=True)
    assert limits[0] in (592, 608)  # 600, in whole tiles
    assert limits[-1] < 128


def test_with_many_prompts_waiting_steps_get_longer() -> None:
    pacer = StepPacer(0.06)
    pacer.note_step(num_prompt_tokens=0, num_decode_tokens=48, time_s=0.02)
    pacer.note_step(num_prompt_tokens=128, num_decode_tokens=48, time_s=0.02 + 0.0125)
    limits = [pacer.limit_prompt_tokens(num_decoding=48, num_prompts=count) for count in (1, 4, 8, 12)]
    assert limits[0] == limits[1] == 400
    assert 1000 <= limits[2] <= 1040  # twice the target, and decoding still takes its 20 ms
    assert limits[3] > limits[2]


def test_where_decoding_takes_longer_than_the_target_prompts_get_as_much_time() -> None:
    pacer = StepPacer(0.06)
    pacer.note_step(num_prompt_tokens=0, num_decode_tokens=12, time_s=0.2)
    pacer.note_step(num_prompt_tokens=100, num_decode_tokens=12, time_s=0.2 + 0.1)
    assert pacer.limit_prompt_tokens(12, 1) in (192, 208)  # 200, in whole tiles


def test_a_chunk_never_gets_too_small_to_come_to_an_end() -> None:
    pacer = StepPacer(0.001)
    pacer.note_step(num_prompt_tokens=10, num_decode_tokens=0, time_s=100.0)
    assert pacer.limit_prompt_tokens(12, 1) == MIN_CHUNK


@pytest.mark.parametrize("time_s", [0.0, 0.001, 0.02])
def test_a_step_shorter_than_its_decoding_gives_no_endless_chunk(time_s: float) -> None:
    pacer = StepPacer(0.06)
    pacer.note_step(num_prompt_tokens=0, num_decode_tokens=12, time_s=0.03)
    pacer.note_step(num_prompt_tokens=16, num_decode_tokens=12, time_s=time_s)
    assert MIN_CHUNK <= pacer.limit_prompt_tokens(12, 1) <= 2**20


def test_what_decoding_takes_is_known_by_the_number_of_sequences() -> None:
    pacer = StepPacer(0.1)
    pacer.note_step(num_prompt_tokens=0, num_decode_tokens=1, time_s=0.01)
    pacer.note_step(num_prompt_tokens=0, num_decode_tokens=40, time_s=0.05)
    pacer.note_step(num_prompt_tokens=300, num_decode_tokens=40, time_s=0.05 + 0.03)
    # 0.1 ms a token, 50 ms left beside 40 sequences and 90 ms beside one, where the prompt's weight is that of twelve.
    assert pacer.limit_prompt_tokens(40, 1) in (496, 512)
    assert pacer.limit_prompt_tokens(1, 0) in (896, 912)


def test_a_number_of_sequences_never_seen_is_guessed_from_the_nearest() -> None:
    pacer = StepPacer(0.1)
    pacer.note_step(num_prompt_tokens=0, num_decode_tokens=8, time_s=0.01)
    pacer.note_step(num_prompt_tokens=100, num_decode_tokens=0, time_s=0.01)
    # 17 ms for up to 31 sequences, 28.9 for up to 63, 8 for up to 7
    assert pacer.limit_prompt_tokens(16, 0) in (816, 832)
    assert pacer.limit_prompt_tokens(63, 0) in (704, 720)
    assert pacer.limit_prompt_tokens(7, 0) in (912, 928)


def test_a_decode_time_that_was_guessed_too_low_does_not_starve_prompts() -> None:
    # Steps of 30 ms and 0.2 ms a prompt token, of which only small batches were seen alone.
    pacer = StepPacer(0.02)
    pacer.note_step(num_prompt_tokens=0, num_decode_tokens=4, time_s=0.007)
    num_tokens = 512
    for _ in range(20):
        pacer.note_step(num_tokens, num_decode_tokens=60, time_s=0.03 + 0.0002 * num_tokens)
        num_tokens = min(512, pacer.limit_prompt_tokens(60, 1))
    assert num_tokens >= 64


def test_several_prompts_get_a_chunk_each() -> None:
    pacer = StepPacer(0.001)
    pacer.note_step(num_prompt_tokens=100, num_decode_tokens=0, time_s=10.0)
    assert [pacer.limit_prompt_tokens(60, count) for count in (1, 2, 5)] == [MIN_CHUNK, 128, 320]


class TwoTokens(StepPacer):
    def limit_prompt_tokens(self, num_decoding: int, num_prompts: int) -> int:
        return 2


def test_only_while_others_decode_is_a_prompt_cut_smaller() -> None:
    core = TinyCore(max_num_batched_tokens=8, num_blocks=20)
    core.core.scheduler.pacer = TwoTokens(0.06)
    core.add("a", range(6), max_tokens=3)
    core.step()
    assert core.scheduled() == {"a": 6}, "nobody waits for a token"
    core.add("b", range(20, 31), max_tokens=2)
    core.add("c", range(40, 43), max_tokens=2)
    core.step()
    assert core.scheduled() == {"a": 1, "b": 2}, "c waits: the two tokens are used up"
    core.step()
    assert core.scheduled() == {"a": 1, "b": 2}
    core.step()
    assert core.scheduled() == {"b": 7, "c": 1}, "a is done, so the whole budget is for prompts"
    core.step(4)
    assert core.tokens("a") == tokens_alone(range(6), max_tokens=3)
    assert core.tokens("b") == tokens_alone(range(20, 31), max_tokens=2)
    assert core.tokens("c") == tokens_alone(range(40, 43), max_tokens=2)


def test_the_core_tells_the_pacer_what_a_step_computed() -> None:
    core = TinyCore(max_num_batched_tokens=100, num_blocks=20)
    core.core.pace(0.06)
    noted: list[tuple[int, int, float]] = []

    class Recorder(StepPacer):
        def note_step(self, num_prompt_tokens: int, num_decode_tokens: int, time_s: float) -> None:
            noted.append((num_prompt_tokens, num_decode_tokens, time_s))

    core.core.scheduler.pacer = Recorder(0.06)
    core.add("a", range(6))
    for time_s in (0.5, 0.25):
        stats = core.step().stats
        stats.step_time_s = time_s
        core.core.note_step_time(stats)
        if time_s == 0.5:
            core.add("b", range(20, 25))
    assert noted == [(6, 0, 0.5), (5, 1, 0.25)]
