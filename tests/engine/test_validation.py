"""The border: what gets in, and what the refusals say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.engine.validation import RequestLimits, SeedSource, check_prompt, make_request, resolve_params
from octavo.errors import InvalidRequestError

LIMITS = RequestLimits(max_model_len=100, vocab_size=50, bos_token_id=1, eos_token_ids=(2,))
WITHOUT_BOS = RequestLimits(max_model_len=100, vocab_size=50, bos_token_id=None, eos_token_ids=(2,))


def refusal(token_ids: object, params: SamplingParams | None = None, limits: RequestLimits = LIMITS) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        make_request("r", token_ids, params or SamplingParams(), limits, SeedSource())  # type: ignore[arg-type]
    return caught.value.message


def test_max_tokens_none_fills_the_window() -> None:
    assert resolve_params(30, SamplingParams(max_tokens=None), LIMITS).max_tokens == 70


def test_the_largest_max_tokens_that_fits_is_accepted() -> None:
    assert resolve_params(30, SamplingParams(max_tokens=70), LIMITS).max_tokens == 70


def test_too_many_max_tokens_are_refused_with_the_window_and_the_largest_value_that_fits() -> None:
    message = refusal([3] * 30, SamplingParams(max_tokens=71))
    assert message == "max_tokens is 71, but the prompt has 30 tokens and max_model_len is 100; use at most 70."


def test_a_prompt_that_leaves_no_room_is_refused_with_exact_numbers() -> None:
    assert len(check_prompt([3] * 99, LIMITS)) == 99
    message = refusal([3] * 103)
    assert "has 103 tokens" in message
    assert "max_model_len is 100" in message
    assert "by 4 tokens, to at most 99" in message


def test_min_tokens_beyond_the_window_is_refused() -> None:
    assert "min_tokens is 71" in refusal([3] * 30, SamplingParams(max_tokens=None, min_tokens=71))


@pytest.mark.parametrize("token_id", [50, -1, 999_999])
def test_a_token_id_out_of_the_vocabulary_is_named(token_id: int) -> None:
    message = refusal([3, token_id])
    assert f"the token id {token_id} at position 1" in message
    assert "0 to 49" in message


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None, [1]])
def test_token_ids_are_integers(wrong: object) -> None:
    assert "token ids are integers" in refusal([3, wrong])


def test_numpy_integers_become_plain_ones() -> None:
    checked = check_prompt(np.array([3, 4]), LIMITS)
    assert checked == (3, 4)
    assert set(map(type, checked)) == {int}


def test_an_empty_prompt_starts_from_bos() -> None:
    assert check_prompt([], LIMITS) == (1,)


def test_an_empty_prompt_without_bos_is_refused() -> None:
    assert "is empty" in refusal([], limits=WITHOUT_BOS)


def test_stop_tokens_are_in_the_vocabulary() -> None:
    assert "stop_token_ids has the token id 50" in refusal([3], SamplingParams(stop_token_ids=(49, 50)))


def test_a_seed_of_the_request_is_kept_and_others_are_drawn() -> None:
    seeds = SeedSource()
    assert make_request("a", [3], SamplingParams(seed=-7), LIMITS, seeds).seed == -7
    drawn = {make_request("a", [3], SamplingParams(), LIMITS, seeds).seed for _ in range(10)}
    assert len(drawn) == 10


def test_the_engines_seed_makes_drawn_seeds_repeatable() -> None:
    first, second = SeedSource(5), SeedSource(5)
    assert [first.draw() for _ in range(5)] == [second.draw() for _ in range(5)]
    assert SeedSource(6).draw() != SeedSource(5).draw()


def test_biased_and_allowed_tokens_are_in_the_vocabulary() -> None:
    # H23: an id beyond the logits must not get to the engine loop
    params = SamplingParams(logit_bias={49: 5, 50: 5})  # type: ignore[arg-type]
    message = "logit_bias has the token id 50, but this model's vocabulary has the ids 0 to 49."
    assert refusal([3], params) == message
    assert "allowed_token_ids has the token id 50" in refusal([3], SamplingParams(allowed_token_ids=(1, 50)))


def test_bad_words_become_tokens_with_and_without_a_space() -> None:
    def encode_plain(text: str, is_continuation: bool) -> list[int]:
        assert is_continuation
        return [ord(character) - 90 if character != " " else 0 for character in text]

    limits = dataclasses.replace(LIMITS, encode_plain=encode_plain)
    params = resolve_params(3, SamplingParams(bad_words=("ab", " b")), limits)
    assert params.bad_words_token_ids == ((7, 8), (0, 7, 8), (0, 8))
    assert "'\xff'" in repr("'\xff'")
    assert "cannot write" in refusal([3], SamplingParams(bad_words=("\u0400",)), limits)


@pytest.mark.parametrize(
    ("param", "beginning"),
    [("prompt", "The prompt has 20"), ("messages", "The messages have 20"), ("prompt[1]", "prompt[1] has 20")],
)
def test_a_prompt_is_spoken_of_by_its_field(param: str, beginning: str) -> None:
    limits = RequestLimits(max_model_len=8, vocab_size=9, bos_token_id=None, eos_token_ids=())
    with pytest.raises(InvalidRequestError) as too_long:
        check_prompt([1] * 20, limits, param)
    with pytest.raises(InvalidRequestError) as no_room:
        resolve_params(20, SamplingParams(max_tokens=1), limits, param)
    assert too_long.value.message.startswith(beginning)
    assert f"but {beginning[0].lower()}{beginning[1:]}" in no_room.value.message
