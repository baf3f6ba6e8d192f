"""Log-probabilities and echo: H12 to H17, and H43."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from tests.cases.conftest import Api


@pytest.mark.parametrize("prompt", ["\n1. Carol has 20", "ďábelské 🌶", " x", "a\n\n b"])
def test_h12_echoed_tokens_join_to_the_prompt_each_at_its_place(api: Api, prompt: str) -> None:
    choice = api.complete(prompt, echo=True, logprobs=1, max_tokens=5)["choices"][0]
    assert choice["text"].startswith(prompt)
    logprobs = choice["logprobs"]
    assert len({len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
    assert logprobs["text_offset"][0] == 0
    if not any(token.startswith("bytes:") for token in logprobs["tokens"]):
        assert "".join(logprobs["tokens"]) == choice["text"]
        steps = [after - before for before, after in pairwise(logprobs["text_offset"])]
        assert steps == [len(token) for token in logprobs["tokens"][:-1]]


def test_h13_no_infinity_is_ever_written(api: Api) -> None:
    # Every answer is read by a strict reader (see conftest).
    for options in (
        {"structured_outputs": {"choice": ["yes"]}},
        {"logit_bias": {"42": -100}},
        {"allowed_token_ids": [9]},
    ):
        chat = api.chat("Yes?", max_tokens=3, logprobs=True, top_logprobs=10, **options)
        for token in chat["choices"][0]["logprobs"]["content"]:
            numbers = [token["logprob"], *(top["logprob"] for top in token["top_logprobs"])]
            assert all(math.isfinite(number) and number <= 0 for number in numbers)
        api.complete("Yes?", max_tokens=3, logprobs=5, echo=True, **options)


def test_h14_echo_scores_the_prompt(api: Api) -> None:
    num_tokens = len(api.tokenize("The capital of France is"))
    options = {"echo": True, "logprobs": 1}
    scores = api.complete("The capital of France is", max_tokens=1, **options)["choices"][0]["logprobs"]
    assert len(scores["token_logprobs"]) == num_tokens + 1
    assert scores["token_logprobs"][0] is None
    assert all(score <= 0 for score in scores["token_logprobs"][1:])


def test_h14_max_tokens_0_scores_the_prompt_only(api: Api) -> None:
    prompt = "The capital of France is"
    answer = api.complete(prompt, echo=True, logprobs=1, max_tokens=0)
    assert answer["choices"][0]["text"] == prompt
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(api.tokenize(prompt))
    assert answer["usage"]["completion_tokens"] == 0


def test_h15_logprobs_of_a_completion_are_told(api: Api) -> None:
    logprobs = api.complete("Hello", logprobs=1, max_tokens=1)["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 1
    assert logprobs["top_logprobs"] == [{logprobs["tokens"][0]: logprobs["token_logprobs"][0]}]
    assert len(api.complete("Hello", logprobs=0, max_tokens=1)["choices"][0]["logprobs"]["tokens"]) == 1


def test_h16_bytes_of_tokens_join_to_the_character(api: Api) -> None:
    chat = api.chat("Go", max_tokens=20, logprobs=True, top_logprobs=2, structured_outputs={"choice": ["\U0001f336"]})
    content = chat["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"])[:4] == b"\xf0\x9f\x8c\xb6"
    parts = [token for token in content if len(token["bytes"]) < 4 and token["bytes"][0] >= 0x80]
    assert len({token["token"] for token in parts}) == len({tuple(token["bytes"]) for token in parts})
    older = api.complete("Go", max_tokens=20, logprobs=2, structured_outputs={"choice": ["\U0001f336"]})
    tokens = older["choices"][0]["logprobs"]["tokens"]
    assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 33])
def test_h17_prompt_logprobs_of_a_cached_prompt_are_those_of_the_first_time(api: Api, num_tokens: int) -> None:
    prompt = api.tokenize("Once upon a time there was a small engine that served many people. " * 5)[:num_tokens]
    first, second = (
        api.complete(prompt, prompt_logprobs=1, max_tokens=1, cache_salt=f"h17-{num_tokens}") for _ in range(2)
    )
    assert first["choices"] == second["choices"]
    scores = first["choices"][0]["prompt_logprobs"]
    assert len(scores) == num_tokens
    assert scores[0] is None


def test_h43_echo_with_scores_is_the_same_when_the_prompt_is_cached(api: Api) -> None:
    prompt = api.tokenize("It was the best of times, it was the worst of times, it was the age of wisdom. " * 4)[:40]
    first, second, third = (
        api.complete(prompt, echo=True, logprobs=2, max_tokens=4, cache_salt="h43") for _ in range(3)
    )
    assert first["choices"] == second["choices"] == third["choices"]
    assert len(first["choices"][0]["logprobs"]["tokens"]) == 44
