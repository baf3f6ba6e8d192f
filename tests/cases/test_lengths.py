"""Lengths and empty things: H25, H26."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.conftest import Api

WINDOW = 512  # as the server of this folder was started


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_h25_max_tokens_beyond_the_window_names_the_window_and_the_way_out(api: Api, name: str) -> None:
    prompt = api.tokenize("one two three four five six seven eight")
    messages = [{"role": "user", "content": "hi"}]
    error = api.refuse("/v1/chat/completions", messages=messages, **{name: WINDOW})
    assert str(WINDOW) in error["message"]
    assert error["param"] == name
    if name == "max_tokens":
        error = api.refuse("/v1/completions", prompt=prompt, max_tokens=WINDOW)
        for number in (len(prompt), WINDOW, WINDOW - len(prompt)):
            assert str(number) in error["message"]


def test_h25_what_the_message_offers_is_accepted(api: Api) -> None:
    prompt = [504] * (WINDOW - 2)
    error = api.refuse("/v1/completions", prompt=prompt, max_tokens=3)
    assert "2" in error["message"].split()[-1]
    answer = api.complete(prompt, max_tokens=2, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("num_tokens", [WINDOW, WINDOW + 1, 3 * WINDOW])
def test_h25_a_prompt_beyond_the_window_is_a_400_with_the_numbers(api: Api, num_tokens: int) -> None:
    error = api.refuse("/v1/completions", prompt=[504] * num_tokens, max_tokens=1)
    assert error["code"] == "context_length_exceeded"
    assert str(num_tokens) in error["message"]
    assert str(WINDOW) in error["message"]


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[1], []]])
def test_h26_an_empty_prompt_is_a_400(api: Api, prompt: Any) -> None:
    assert api.refuse("/v1/completions", prompt=prompt)["param"].startswith("prompt")


@pytest.mark.parametrize("messages", [[], None, [{"role": "user"}], [{"role": "user", "content": []}]])
def test_h26_no_messages_are_a_400(api: Api, messages: Any) -> None:
    assert api.refuse("/v1/chat/completions", messages=messages)["param"].startswith("messages")


def test_h26_an_empty_message_is_a_message(api: Api) -> None:
    assert api.chat("", max_tokens=1)["usage"]["completion_tokens"] == 1
