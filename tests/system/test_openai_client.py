"""The official Python client against a real server with the real model."""

from __future__ import annotations

from typing import Any

import openai
import pytest


@pytest.fixture
def client(server: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_chat_answers_and_streams_the_same_text(client: Any, golden_smollm2: Any) -> None:
    case = next(case for case in golden_smollm2["cases"] if case["kind"] == "chat")
    options = {"model": "smollm2", "messages": case["input"], "temperature": 0, "max_tokens": 24}
    plain = client.chat.completions.create(**options)
    assert plain.usage.prompt_tokens == len(case["prompt_token_ids"])
    assert 0 < plain.usage.completion_tokens <= 24
    assert plain.choices[0].message.content
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [plain.choices[0].finish_reason]


def test_a_completion_matches_the_golden_text(client: Any, golden_smollm2: Any) -> None:
    case = golden_smollm2["cases"][0]
    answer = client.completions.create(model="smollm2", prompt=case["input"], temperature=0, max_tokens=4)
    assert case["text"].startswith(answer.choices[0].text.split("\n")[0])
    assert answer.usage.prompt_tokens == len(case["prompt_token_ids"])
    assert answer.usage.completion_tokens == 4


def test_n_choices_with_a_seed_come_back_the_same(client: Any) -> None:
    options = {"model": "smollm2", "prompt": "Once upon a time", "n": 3, "seed": 7, "max_tokens": 12}
    first, second = (client.completions.create(**options) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]


def test_a_stop_string_ends_a_stream_and_never_shows(client: Any) -> None:
    """H01."""
    options = {"model": "smollm2", "prompt": "Letters in order: ABC", "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**options).choices[0].text
    stop = whole[3:9]
    chunks = list(client.completions.create(**options, stop=[stop], stream=True))
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs_are_those_of_the_tokens(client: Any) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Say hello."}],
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=3,
    )
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content).startswith(answer.choices[0].message.content)
    assert all(token.top_logprobs[0].logprob == token.logprob for token in content)


def test_an_unknown_model_is_a_404_that_names_the_served_ones(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="smollm2") as refusal:
        client.completions.create(model="gpt-4", prompt="x")
    assert refusal.value.code == "model_not_found"


def test_a_prompt_over_the_window_is_a_400_with_the_numbers(client: Any, server: Any) -> None:
    window = client.models.list().data[0].model_dump()["max_model_len"]
    with pytest.raises(openai.BadRequestError, match=str(window)):
        client.completions.create(model="smollm2", prompt=[42] * (window + 1), max_tokens=1)
    with pytest.raises(openai.BadRequestError, match=str(window)):
        client.completions.create(model="smollm2", prompt=[42] * 8, max_tokens=window)
