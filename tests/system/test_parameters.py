"""The parameters beyond plain sampling, over HTTP with the real model: each does what it says, streamed as whole."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import openai
import pytest

PROMPT = "The capital of France is"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["city", "tags"],
    "additionalProperties": False,
}


@pytest.fixture
def client(server: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def complete(client: Any) -> Any:
    """One greedy completion as plain JSON; what OpenAI's client does not know goes into its extra_body."""

    def create(prompt: Any = PROMPT, max_tokens: int = 6, **extra: Any) -> Any:
        fields = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return client.completions.create(**fields, extra_body=extra).model_dump()

    return create


def read_stream(server: Any, path: str, body: dict[str, Any]) -> list[Any]:
    with httpx.stream("POST", f"{server.url}{path}", json={**body, "stream": True}, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_an_echoed_prompt_is_scored_without_generating(complete: Any) -> None:
    """What evaluation harnesses send."""
    prompts = [PROMPT, "Grüße 🦜 ok", "<|im_start|>user\nhi<|im_end|>\n"]
    answer = complete(prompts, max_tokens=0, echo=True, logprobs=1)
    assert answer["usage"]["completion_tokens"] == 0
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert choice["text"] == prompt
        assert logprobs["token_logprobs"][0] is None
        assert all(value < 0 for value in logprobs["token_logprobs"][1:])
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert token.startswith("bytes:") or prompt.startswith(token, offset)
        for token, value, top in list(
            zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        )[1:]:
            assert top[token] == value <= max(top.values())


def test_a_prompt_is_scored_as_the_answer_was(complete: Any) -> None:
    """The likelihoods of generated tokens are those that the same text has as a prompt."""
    generated = complete(max_tokens=5, logprobs=0, return_token_ids=True)["choices"][0]
    token_ids = [*generated["prompt_token_ids"], *generated["token_ids"]]
    scored = complete(token_ids, max_tokens=0, echo=True, logprobs=0)["choices"][0]
    assert scored["logprobs"]["token_logprobs"][-5:] == pytest.approx(generated["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize(
    "extra",
    [
        {"echo": True, "logprobs": 2, "n": 2, "temperature": 1, "seed": 1},
        {"prompt_logprobs": 1, "return_token_ids": True},
        {"logprobs": 1, "return_tokens_as_token_ids": True, "stop": ["."], "include_stop_str_in_output": True},
        {"use_beam_search": True, "n": 3},
        {"guided_choice": ["Paris", "London"], "logprobs": 0},
        {"skip_special_tokens": False, "ignore_eos": True, "logprobs": 0, "bad_words": ["Paris"]},
        {"n": 2, "temperature": 1, "seed": 3, "stop": ["\n"], "min_tokens": 4, "logprobs": 0},
    ],
    ids=lambda extra: ",".join(extra),
)
def test_a_stream_adds_up_to_the_whole_answer(server: Any, extra: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **extra}
    whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    for choice in whole:
        parts = [
            event["choices"][0]
            for event in read_stream(server, "/v1/completions", body)
            if event["choices"][0]["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1].get("stop_reason") == choice.get("stop_reason")
        if choice["logprobs"] is not None:
            for name in ("tokens", "token_logprobs", "text_offset"):
                joined = [entry for part in parts if part["logprobs"] for entry in part["logprobs"][name]]
                assert joined == (
                    pytest.approx(choice["logprobs"][name], abs=1e-4, nan_ok=True)
                    if name == "token_logprobs" and None not in joined
                    else choice["logprobs"][name]
                )
        if "token_ids" in choice:
            assert [token_id for part in parts for token_id in part["token_ids"]] == choice["token_ids"]
        if "prompt_logprobs" in choice:
            assert parts[0]["prompt_logprobs"] == choice["prompt_logprobs"]


def test_tokens_can_be_pushed_forbidden_and_singled_out(complete: Any) -> None:
    first = complete(return_token_ids=True)["choices"][0]["token_ids"][0]
    assert first not in complete(logit_bias={str(first): -100}, return_token_ids=True)["choices"][0]["token_ids"]
    assert set(complete(logit_bias={"30": 100}, return_token_ids=True)["choices"][0]["token_ids"]) == {30}
    assert set(complete(allowed_token_ids=[30, first], return_token_ids=True)["choices"][0]["token_ids"]) <= {30, first}
    assert "Paris" not in complete(bad_words=["Paris"])["choices"][0]["text"]


def test_the_best_of_many_is_among_them_and_likeliest(complete: Any) -> None:
    sampling = {"temperature": 1, "seed": 11, "logprobs": 0}
    every = complete(n=4, **sampling)["choices"]
    best = complete(best_of=4, **sampling)["choices"]

    def mean(choice: Any) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    assert len(best) == 1
    assert best[0]["text"] == max(every, key=mean)["text"]


def test_beam_search_finds_nothing_less_likely_than_greedy(complete: Any) -> None:
    greedy = complete(logprobs=0)["choices"][0]
    beams = complete(use_beam_search=True, n=3, logprobs=0)["choices"]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in beams]
    assert len({choice["text"] for choice in beams}) == 3
    assert sums[0] >= sum(greedy["logprobs"]["token_logprobs"]) - 1e-4
    assert sums == sorted(sums, reverse=True)


def test_a_prompt_too_long_is_cut_from_its_beginning(complete: Any) -> None:
    answer = complete(" and so on" * 50 + PROMPT, truncate_prompt_tokens=5, echo=True)
    assert answer["choices"][0]["text"].startswith(PROMPT)
    assert answer["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_chat_answers_in_the_schema(client: Any, temperature: float) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    options = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Where is the Louvre? Answer in JSON."}],
        "response_format": response_format,
        "temperature": temperature,
        "max_tokens": 100,
        "n": 3,
        "seed": 5,
    }
    whole = client.chat.completions.create(**options)
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert any(choice.finish_reason == "stop" for choice in whole.choices)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, "[0-9]{4}"),
        ({"structured_outputs": {"choice": ["Lyon", "Nice"]}}, "Lyon|Nice"),
        ({"guided_grammar": 'start: "yes" | "no"'}, "yes|no"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json_schema": {"type": "boolean"}}, r"\s*(true|false)"),
    ],
    ids=str,
)
def test_a_text_has_the_form_that_was_asked_for(complete: Any, extra: dict[str, Any], expected: str) -> None:
    [choice] = complete(max_tokens=12, **extra)["choices"]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(expected, choice["text"])


def test_what_max_tokens_cuts_says_length(complete: Any) -> None:
    [choice] = complete(max_tokens=3, structured_outputs={"regex": "[0-9]{40}"})["choices"]
    assert choice["finish_reason"] == "length"


def test_a_schema_that_cannot_be_used_is_a_400_that_names_it(client: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "strang"}}}
    with pytest.raises(openai.BadRequestError, match="strang") as refusal:
        client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            stream=True,
        )
    assert refusal.value.param == "response_format.json_schema.schema"
    assert refusal.value.code == "invalid_grammar"


def test_too_many_tokens_are_told_in_the_words_of_the_request(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=r"max_completion_tokens is .*, but the messages have") as refusal:
        client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "x"}], max_completion_tokens=10**6
        )
    assert (refusal.value.param, refusal.value.code) == ("max_completion_tokens", "context_length_exceeded")
