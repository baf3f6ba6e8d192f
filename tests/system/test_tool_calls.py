"""Tools with the real model, whose template knows none, through the official client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS},
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "The time of day."}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture
def client(server: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(client: Any, **options: Any) -> Any:
    body = {"model": "smollm2", "messages": ASK, "tools": [WEATHER, NOW], "temperature": 0, "max_tokens": 120}
    return client.chat.completions.create(**{**body, **options})


def read_stream(chunks: Any, index: int = 0) -> tuple[str | None, list[tuple[str, str]], str | None]:
    """(content, (name, arguments) of each call, finish reason) as a client adds them up."""
    content, calls, reason = None, [], None
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            assert reason is None
            if choice.delta.content is not None:
                content = (content or "") + choice.delta.content
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(calls)
                    calls.append((call.function.name, ""))
                name, arguments = calls[call.index]
                calls[call.index] = name, arguments + (call.function.arguments or "")
            reason = choice.finish_reason
    return content, calls, reason


def told(choice: Any) -> tuple[str | None, list[tuple[str, str]], str]:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content, calls, choice.finish_reason


def check_calls(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        if name == "get_weather":
            jsonschema.validate(json.loads(arguments), PARAMETERS)
        else:
            assert (name, json.loads(arguments)) == ("now", {})


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_named_call_is_valid_and_streams_the_same(client: Any, temperature: float) -> None:
    options = {"tool_choice": NAMED, "temperature": temperature, "seed": 3}
    whole = told(ask(client, **options).choices[0])
    content, calls, reason = whole
    assert (content, len(calls), calls[0][0], reason) == (None, 1, "get_weather", "stop")
    check_calls(calls)
    assert read_stream(ask(client, stream=True, **options)) == whole


@pytest.mark.parametrize("temperature", [0, 1])
def test_required_calls_are_valid_and_stream_the_same(client: Any, temperature: float) -> None:
    options = {"tool_choice": "required", "temperature": temperature, "seed": 5, "n": 2}
    options |= {"parallel_tool_calls": False}
    choices = ask(client, **options).choices
    stream = list(ask(client, stream=True, **options))
    for choice in choices:
        content, calls, reason = told(choice)
        assert (content, len(calls), reason) == (None, 1, "tool_calls")
        check_calls(calls)
        assert read_stream(stream, choice.index) == (content, calls, reason)
    ids = {call.id for choice in choices for call in choice.message.tool_calls}
    assert len(ids) == 2


def test_parallel_calls_are_all_valid(client: Any) -> None:
    content, calls, reason = told(ask(client, tool_choice="required", max_tokens=400).choices[0])
    assert content is None
    assert calls
    check_calls(calls if reason == "tool_calls" else calls[:-1])


def test_what_max_tokens_cuts_is_told_as_far_as_it_came(client: Any) -> None:
    options = {"tool_choice": NAMED, "max_tokens": 16}
    whole = told(ask(client, **options).choices[0])
    content, ((name, arguments),), reason = whole
    assert (content, name, reason) == (None, "get_weather", "length")
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(arguments)
    assert read_stream(ask(client, stream=True, **options)) == whole
    usage = ask(client, **options).usage
    assert usage.completion_tokens == 16


def test_a_stop_string_ends_a_call_too(client: Any) -> None:
    options = {"tool_choice": NAMED, "stop": ['"unit"']}
    whole = told(ask(client, **options).choices[0])
    _, ((_, arguments),), reason = whole
    assert '"unit"' not in arguments
    assert arguments.startswith('{"city": ')
    assert reason == "stop"
    assert read_stream(ask(client, stream=True, **options)) == whole


def test_auto_streams_what_it_says_whole(client: Any) -> None:
    whole = told(ask(client, tool_choice="auto").choices[0])
    assert read_stream(ask(client, tool_choice="auto", stream=True)) == whole
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    content, calls, _ = told(ask(client, tools=[strict], parallel_tool_calls=False).choices[0])
    assert content or calls
    assert len(calls) <= 1
    check_calls(calls)


def test_none_is_as_if_there_were_no_tools(client: Any) -> None:
    with_tools = ask(client, tool_choice="none", max_tokens=16)
    without = client.chat.completions.create(model="smollm2", messages=ASK, temperature=0, max_tokens=16)
    assert told(with_tools.choices[0]) == told(without.choices[0])
    assert with_tools.usage.prompt_tokens == without.usage.prompt_tokens


def test_logprobs_of_a_call_are_those_of_its_tokens(client: Any) -> None:
    options = {"tool_choice": NAMED, "logprobs": True, "top_logprobs": 2}
    whole = ask(client, **options)
    entries = whole.choices[0].logprobs.content
    text = "".join(entry.token for entry in entries[:-1])
    assert text.startswith('{"name": "get_weather", "arguments": {')
    assert len(entries) == whole.usage.completion_tokens
    streamed = [
        entry
        for chunk in ask(client, stream=True, **options)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert streamed == entries


def test_a_whole_turn_of_calls(client: Any, server: Any) -> None:
    """H40: the call, its result, and the answer in words."""
    first = ask(client, tool_choice=NAMED).choices[0].message
    call = first.tool_calls[0]
    messages = [*ASK, first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}]
    answer = ask(client, messages=messages, tool_choice="none", max_tokens=24)
    assert answer.choices[0].message.content
    body = {"messages": messages, "tools": [WEATHER, NOW], "tool_choice": "none"}
    tokens = httpx.post(f"{server.url}/tokenize", json=body, timeout=30).json()
    assert tokens["count"] == answer.usage.prompt_tokens
    shown = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens["tokens"]}, timeout=30).json()["prompt"]
    assert "Result of get_weather:\n18 degrees, sunny" in shown
    wrong = [*messages[:-1], {**messages[-1], "tool_call_id": "call_0"}]
    with pytest.raises(openai.BadRequestError, match="no assistant message before has a call of this id"):
        ask(client, messages=wrong)


def test_tokenize_of_tools_is_what_the_model_gets(client: Any, server: Any) -> None:
    body = {"messages": ASK, "tools": [WEATHER], "tool_choice": "required"}
    told = httpx.post(f"{server.url}/tokenize", json=body, timeout=30).json()
    used = ask(client, tools=[WEATHER], tool_choice="required", max_tokens=1).usage.prompt_tokens
    assert told["count"] == used


def test_a_message_goes_on_where_it_stopped(client: Any) -> None:
    begun = [*ASK, {"role": "assistant", "content": "The capital of France is"}]
    answer = client.chat.completions.create(
        model="smollm2",
        messages=begun,
        temperature=0,
        max_tokens=4,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert answer.choices[0].message.content.startswith(" Paris")
