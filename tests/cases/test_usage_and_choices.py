"""Usage, choices, n: H08 to H11."""

from __future__ import annotations

import pytest

from tests.cases.conftest import Api

USAGE = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize("n", [1, 2])
def test_h08_usage_is_the_same_streamed_and_not(api: Api, n: int) -> None:
    for ask, stream in ((api.complete, api.stream_completion), (api.chat, api.stream_chat)):
        plain = ask("Count to ten.", max_tokens=7, n=n, seed=3)["usage"]
        events = stream("Count to ten.", max_tokens=7, n=n, seed=3, **USAGE)
        assert events[-1]["choices"] == []
        streamed = events[-1]["usage"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert streamed[name] == plain[name]
        assert plain["total_tokens"] == plain["prompt_tokens"] + plain["completion_tokens"]


def test_h08_a_stop_string_does_not_change_how_usage_is_counted(api: Api) -> None:
    options = {"max_tokens": 24, "stop": ["HIJ"]}
    plain = api.complete("Letters in order: ABC", **options)["usage"]
    streamed = api.stream_completion("Letters in order: ABC", **options, **USAGE)[-1]["usage"]
    assert plain["completion_tokens"] == streamed["completion_tokens"]


def test_h09_every_chunk_carries_the_index_of_its_choice(api: Api) -> None:
    options = {"max_tokens": 8, "n": 2, "seed": 5, "temperature": 1}
    plain = api.chat("Tell me a story.", **options)["choices"]
    joined = {0: "", 1: ""}
    for event in api.stream_chat("Tell me a story.", **options):
        for choice in event["choices"]:
            joined[choice["index"]] += choice["delta"].get("content") or ""
    assert joined == {choice["index"]: choice["message"]["content"] for choice in plain}


def test_h10_prompts_times_n_are_in_the_order_of_the_prompts(api: Api) -> None:
    prompts = ["The sea", "A mountain"]
    answer = api.complete(prompts, n=2, echo=True, max_tokens=3, temperature=1, seed=1)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice in answer["choices"]:
        assert choice["text"].startswith(prompts[choice["index"] // 2])
    indices = {
        choice["index"]
        for event in api.stream_completion(prompts, n=2, max_tokens=3, temperature=1)
        for choice in event["choices"]
    }
    assert indices == {0, 1, 2, 3}


def test_h10_prompts_of_token_ids_are_counted_like_texts(api: Api) -> None:
    texts = ["The sea", "A mountain"]
    ids = [api.tokenize(text) for text in texts]
    from_texts, from_ids = (api.complete(prompt, max_tokens=3) for prompt in (texts, ids))
    assert [choice["text"] for choice in from_ids["choices"]] == [choice["text"] for choice in from_texts["choices"]]


def test_h11_include_usage_means_the_same_in_both_endpoints(api: Api) -> None:
    for stream in (api.stream_completion, api.stream_chat):
        with_usage = stream("Hi", max_tokens=2, **USAGE)
        assert [event["usage"] for event in with_usage[:-1]] == [None] * (len(with_usage) - 1)
        assert with_usage[-1]["usage"]["completion_tokens"] == 2
        assert all("usage" not in event for event in stream("Hi", max_tokens=2))
