"""The official Python client over every endpoint, with a key: chats, completions, streams, tools, schemas, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam

MODEL = "smollm2"
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of Italy?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=60) as client:
        yield client


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.text if hasattr(choice, "text") else choice.delta.content or "" for choice in choices)


# --- models ---------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_read_by_name(client: openai.OpenAI) -> None:
    listed = list(client.models.list())
    assert [model.id for model in listed] == [MODEL]
    assert client.models.retrieve(MODEL) == listed[0]
    assert listed[0].model_dump()["max_model_len"] == 2048


# --- chat -----------------------------------------------------------------------------------------------------------


def test_a_chat_has_every_field_of_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_completion_tokens=24)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    [choice] = answer.choices
    assert (choice.index, choice.message.role, choice.message.refusal) == (0, "assistant", None)
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None


def test_every_role_and_form_of_content(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Add 1 and"}, {"type": "text", "text": " 2."}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "3"},
            {"role": "assistant", "content": "3", "name": "bot"},
            {"role": "user", "content": "And 4?", "name": "me"},
        ],
        max_tokens=2,
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 2


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_chat_joins_to_the_whole_one(client: openai.OpenAI, n: int) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HI, "temperature": 1, "seed": 11, "max_tokens": 12, "n": n}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert len(whole.choices) == n
    for choice in whole.choices:
        assert text_of(chunks, choice.index) == choice.message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"


def test_the_stream_helper_makes_the_same_completion(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    with client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_stream_that_is_left_is_aborted(client: openai.OpenAI, server: Any) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="x", stream=True, max_tokens=1000, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    # The metrics want the key, so the check is that the next answer comes whole.
    assert client.completions.create(model=MODEL, prompt="x", max_tokens=2).choices[0].finish_reason == "length"


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 8}
    options |= {"logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content
    assert content is not None
    joined = bytes(byte for token in content for byte in token.bytes or [])
    assert joined.decode().startswith(whole.message.content or "?")
    for token in content:
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (t.logprob for t in token.top_logprobs), reverse=True
        )
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob
    streamed = [
        token
        for chunk in client.chat.completions.create(**options, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or []
    ]
    assert streamed == content


@pytest.mark.parametrize("stop", ["Italy", ["never said", "Italy"]])
def test_stop_ends_a_chat(client: openai.OpenAI, stop: Any) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 24}
    free = client.chat.completions.create(**options).choices[0].message.content or ""
    stopped = client.chat.completions.create(**options, stop=stop).choices[0]
    assert stopped.message.content == free.split("Italy")[0]


def test_settings_of_openai_and_of_vllm_are_taken(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        max_tokens=4,
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"42": -100},
        seed=1,
        user="me",
        metadata={"a": "b"},
        service_tier="auto",
        store=False,
        parallel_tool_calls=True,
        tools=TOOLS,
        tool_choice="none",
        extra_body={
            "top_k": 20,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [5],
            "bad_words": ["Rome"],
            "skip_special_tokens": False,
            "add_generation_prompt": True,
            "chat_template_kwargs": {},
            "priority": 0,
            "return_token_ids": True,
        },
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert len(answer.choices[0].model_dump()["token_ids"]) == 4


# --- completions ----------------------------------------------------------------------------------------------------


def test_completions_of_every_kind_of_prompt(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    text = client.completions.create(prompt="The capital of France is", **options)
    ids = client.completions.create(prompt=[504, 3575, 282, 4649, 314], **options)
    assert text.choices[0].text == ids.choices[0].text
    several = client.completions.create(prompt=["The capital of France is", "Once"], **options)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == text.choices[0].text
    chunks = list(client.completions.create(prompt=["The capital of France is", "Once"], stream=True, **options))
    for choice in several.choices:
        assert text_of(chunks, choice.index) == choice.text


def test_echo_logprobs_best_of_and_n_of_a_completion(client: openai.OpenAI) -> None:
    echoed = client.completions.create(
        model=MODEL, prompt="The sea", echo=True, logprobs=2, max_tokens=3, temperature=0
    )
    logprobs = echoed.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == echoed.choices[0].text
    assert echoed.choices[0].text.startswith("The sea")
    best = client.completions.create(model=MODEL, prompt="The sea", n=2, best_of=4, seed=1, max_tokens=4)
    assert [choice.index for choice in best.choices] == [0, 1]


# --- tools ----------------------------------------------------------------------------------------------------------

NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_has_valid_arguments_streamed_and_not(
    client: openai.OpenAI, choice: Any, temperature: float
) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": temperature,
        "seed": 4,
        "max_tokens": 200,
    }
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert whole.message.tool_calls is not None
    [call] = whole.message.tool_calls
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert set(arguments) == {"city", "unit"}
        assert arguments["unit"] in ("C", "F")
    else:
        assert arguments == {}
    with client.chat.completions.stream(**options) as stream:
        final = stream.until_done().get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason
    assert final.message.tool_calls is not None
    assert len(final.message.tool_calls) == 1
    assert final.message.tool_calls[0].function.name == call.function.name
    assert final.message.tool_calls[0].function.arguments == call.function.arguments


@pytest.mark.parametrize("seed", range(3))
def test_with_auto_the_stream_says_what_the_whole_answer_says(client: openai.OpenAI, seed: int) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HI, "tools": TOOLS, "temperature": 1, "seed": seed}
    options |= {"max_tokens": 24}
    whole = client.chat.completions.create(**options).choices[0]
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert text_of(chunks) == (whole.message.content or "")
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_a_conversation_with_a_tool(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
    first = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice=NAMED, temperature=0, max_tokens=100
    )
    message = first.choices[0].message
    assert message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "22 C, sunny"}]
    second = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=16
    )
    assert second.choices[0].message.content


# --- structured output ----------------------------------------------------------------------------------------------


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    size: Literal["small", "large"]
    population: int = pydantic.Field(ge=0, le=40_000_000)
    mayor: str | None = pydantic.Field(max_length=12)


@pytest.mark.parametrize("temperature", [0, 1])
def test_parse_gives_a_model_of_pydantic(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=HI, response_format=City, temperature=temperature, seed=2, max_tokens=120
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_a_parsed_stream_ends_with_the_model(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=HI, response_format=City, temperature=0, max_tokens=120
    ) as stream:
        final = stream.until_done().get_final_completion()
    assert isinstance(final.choices[0].message.parsed, City)


def test_parse_of_a_cut_answer_raises_the_clients_own_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=HI, response_format=City, max_tokens=3)


def test_pydantic_tools_are_parsed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=HI,
        tools=[openai.pydantic_function_tool(City)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=150,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, City)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"store": True}, "store"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0]",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 5}}}}, "response"),
    ],
)
def test_a_bad_request_names_its_field(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(**{"model": MODEL, "messages": HI, **fields})
    assert refusal.value.status_code == 400
    assert (refusal.value.param or "").startswith(param)
    assert refusal.value.code
    assert refusal.value.type == "invalid_request_error"
    assert refusal.value.request_id


def test_a_bad_request_of_a_stream_raises_before_the_first_chunk(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=HI, temperature=3, stream=True)


def test_other_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")


def test_a_client_that_waits_too_short_raises_and_its_request_ends(client: openai.OpenAI) -> None:
    impatient = client.with_options(timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(model=MODEL, prompt="x", max_tokens=2000, extra_body={"ignore_eos": True})
    assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices


# --- the rest of the client -----------------------------------------------------------------------------------------


def test_raw_responses_show_the_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HI, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.parse().choices
    assert raw.parse()._request_id == "mine-1"
    with client.chat.completions.with_streaming_response.create(model=MODEL, messages=HI, max_tokens=1) as streamed:
        assert streamed.parse().choices


def test_many_async_requests_at_once(server: Any) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:

            async def ask(number: int) -> str:
                options: dict[str, Any] = {"model": MODEL, "prompt": "Once", "seed": number // 2, "max_tokens": 6}
                if number % 2:
                    return (await client.completions.create(**options)).choices[0].text
                stream = await client.completions.create(**options, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return list(await asyncio.gather(*map(ask, range(16))))

    texts = asyncio.run(ask_all())
    assert texts[::2] == texts[1::2]
    assert len(set(texts)) > 4
