"""Tokens to text: stops, end tokens, n > 1, and the one final delta."""

from __future__ import annotations

import pytest

from octavo.core.interfaces import FinishReason, SequenceOutput, TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.outputs import CompletionDelta
from octavo.engine.text_output import OutputAccumulator, RequestText
from octavo.text.tokenizer import Tokenizer

from .fake_model import BOS, EOS, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def step(
    text: bytes | list[int], index: int = 0, reason: FinishReason | None = None, stop_reason: int | None = None
) -> SequenceOutput:
    tokens = list(text)
    return SequenceOutput(
        request_id="r",
        index=index,
        new_token_ids=tokens,
        new_logprobs=[TokenLogprobs(token_id, -0.25, ((token_id, -0.25), (7, -2.0))) for token_id in tokens],
        finish_reason=reason,
        stop_reason=stop_reason,
    )


def push_all(text: RequestText, *steps: SequenceOutput) -> list[CompletionDelta]:
    return [delta for delta in map(text.push, steps) if delta is not None]


def joined(deltas: list[CompletionDelta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def test_a_stop_string_over_several_tokens_never_leaks_and_ends_the_sequence(tokenizer: Tokenizer) -> None:
    text = RequestText(tokenizer, SamplingParams(stop=("DEF",)), 1)
    deltas = push_all(text, step(b"C"), step(b"D"), step(b"E"), step(b"F"), step(b"G"))
    assert [delta.text for delta in deltas] == ["C", "", "", ""]
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_reason == "DEF"
    assert deltas[-1].is_final
    assert text.is_finished
    assert sum(len(delta.token_ids) for delta in deltas) == 4


def test_tokens_and_logprobs_behind_the_stop_are_dropped_when_one_step_brings_many(tokenizer: Tokenizer) -> None:
    text = RequestText(tokenizer, SamplingParams(stop=("CD",), logprobs=2), 1)
    (delta,) = push_all(text, step(b"ABCDEFG", reason=FinishReason.LENGTH))
    assert (delta.text, delta.token_ids, len(delta.logprobs)) == ("AB", list(b"ABCD"), 4)
    assert (delta.finish_reason, delta.stop_reason) == ("stop", "CD")


def test_text_that_might_have_become_a_stop_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    text = RequestText(tokenizer, SamplingParams(stop=("DEF",)), 1)
    deltas = push_all(text, step(b"CDE"), step(b"x"), step(b"DE", reason=FinishReason.LENGTH))
    assert joined(deltas) == "CDExDE"
    assert deltas[-1].finish_reason == "length"
    assert deltas[-1].stop_reason is None


def test_min_tokens_delays_stop_strings(tokenizer: Tokenizer) -> None:
    text = RequestText(tokenizer, SamplingParams(stop=("B",), min_tokens=4), 1)
    deltas = push_all(text, step(b"A"), step(b"B"), step(b"C"), step(b"B"))
    assert joined(deltas) == "ABC"
    assert deltas[-1].finish_reason == "stop"
    assert sum(len(delta.token_ids) for delta in deltas) == 4


def test_the_end_token_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    text = RequestText(tokenizer, SamplingParams(), 1)
    deltas = push_all(text, step(b"A"), step([EOS], reason=FinishReason.STOP))
    assert joined(deltas) == "A"
    assert deltas[-1].token_ids == [EOS]


def test_the_end_token_is_shown_to_who_wants_special_tokens(tokenizer: Tokenizer) -> None:
    text = RequestText(tokenizer, SamplingParams(skip_special_tokens=False), 1)
    assert joined(push_all(text, step(b"A"), step([EOS], reason=FinishReason.STOP))) == "A<eos>"


def test_a_stop_token_is_like_a_stop_string(tokenizer: Tokenizer) -> None:
    text = RequestText(tokenizer, SamplingParams(stop_token_ids=(66,), skip_special_tokens=False), 1)
    deltas = push_all(text, step(b"A"), step(b"B", reason=FinishReason.STOP, stop_reason=66))
    assert joined(deltas) == "A"
    assert deltas[-1].stop_reason == 66


def test_no_delta_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    text = RequestText(tokenizer, SamplingParams(), 1)
    deltas = push_all(text, *(step([byte]) for byte in "dáb🌶!".encode()))
    assert [delta.text for delta in deltas if delta.text] == list("dáb🌶!")


def test_half_a_character_at_the_end_becomes_a_replacement_character(tokenizer: Tokenizer) -> None:
    text = RequestText(tokenizer, SamplingParams(), 1)
    deltas = push_all(text, step("á".encode()[:1], reason=FinishReason.LENGTH))
    assert joined(deltas) == "�"


def test_only_the_last_of_n_sequences_makes_the_final_delta(tokenizer: Tokenizer) -> None:
    text = RequestText(tokenizer, SamplingParams(n=3, stop=("X",)), 5)
    deltas = push_all(
        text,
        step(b"A", 0),
        step(b"X", 1),
        step(b"C", 2, FinishReason.LENGTH),
        step(b"Y", 1, FinishReason.ABORT),  # the core's last word on what we have ended already
        step(b"B", 0, FinishReason.LENGTH),
    )
    assert [delta.is_final for delta in deltas] == [False, False, False, True]
    assert [joined(deltas, index) for index in range(3)] == ["AB", "", "C"]
    assert {delta.num_prompt_tokens for delta in deltas} == {5}


def test_ending_all_gives_each_unfinished_sequence_its_last_delta(tokenizer: Tokenizer) -> None:
    text = RequestText(tokenizer, SamplingParams(n=3, stop=("BC",)), 1)
    push_all(text, step(b"AB", 0), step(b"A", 1, FinishReason.LENGTH))
    deltas = text.end_all(FinishReason.ABORT)
    assert [(delta.index, delta.text, delta.finish_reason, delta.is_final) for delta in deltas] == [
        (0, "B", "abort", False),
        (2, "", "abort", True),
    ]
    assert text.end_all(FinishReason.ABORT) == []


def test_deltas_add_up_to_an_output(tokenizer: Tokenizer) -> None:
    params = SamplingParams(logprobs=2)
    text = RequestText(tokenizer, params, 1)
    accumulator = OutputAccumulator("r", "hello", [104], params, tokenizer)
    for delta in push_all(text, step(b"A"), step(b"B"), step([EOS], reason=FinishReason.STOP)):
        accumulator.push(delta)
    output = accumulator.output
    assert output.finished
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("AB", [65, 66, EOS], "stop")
    assert completion.cumulative_logprob == -0.75
    assert completion.logprobs is not None
    first = completion.logprobs[0]
    assert list(first) == [65, 7]
    assert (first[65].logprob, first[65].rank, first[65].decoded_token) == (-0.25, 1, "A")


def test_an_error_is_passed_on(tokenizer: Tokenizer) -> None:
    text = RequestText(tokenizer, SamplingParams(), 1)
    output = SequenceOutput(
        request_id="r", index=0, finish_reason=FinishReason.ERROR, is_final=True, error="It is broken."
    )
    (delta,) = push_all(text, output)
    assert (delta.finish_reason, delta.error, delta.is_final) == ("error", "It is broken.", True)


def test_the_stop_string_or_token_is_kept_when_asked_for(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=("DEF",), include_stop_str_in_output=True)
    deltas = push_all(RequestText(tokenizer, params, 1), step(b"C"), step(b"D"), step(b"EFG"))
    assert [delta.text for delta in deltas] == ["C", "", "DEF"]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "DEF")
    params = SamplingParams(stop_token_ids=(ord("x"),), include_stop_str_in_output=True)
    deltas = push_all(
        RequestText(tokenizer, params, 1), step(b"C"), step(b"x", reason=FinishReason.STOP, stop_reason=ord("x"))
    )
    assert joined(deltas) == "Cx"


def test_the_last_token_of_a_complete_grammar_is_text(tokenizer: Tokenizer) -> None:
    last = step(b"}", reason=FinishReason.STOP)
    last.ends_in_text = True
    assert joined(push_all(RequestText(tokenizer, SamplingParams(), 1), step(b"{"), last)) == "{}"


def test_special_tokens_that_are_to_be_shown_are_written_out(tokenizer: Tokenizer) -> None:
    text = RequestText(tokenizer, SamplingParams(), 1, shown_token_ids=(BOS,))
    assert joined(push_all(text, step([*b"a", BOS, EOS, *b"b"]))) == "a<bos>b"


def test_prompt_logprobs_come_with_the_first_delta_and_survive_joining(tokenizer: Tokenizer) -> None:
    text = RequestText(tokenizer, SamplingParams(n=2, prompt_logprobs=0), 3)
    scores = [TokenLogprobs(5, -0.5), TokenLogprobs(6, -1.5)]
    outputs = [SequenceOutput(request_id="r", index=0, new_prompt_logprobs=[score]) for score in scores]
    deltas = push_all(text, *outputs, step(b"a"), step(b"b", 1), step(b"c"))
    assert [delta.text for delta in deltas] == ["a", "b", "c"]
    assert [delta.prompt_logprobs for delta in deltas] == [[None, *scores], None, None]
