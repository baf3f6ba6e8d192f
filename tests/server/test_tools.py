"""Tools over HTTP: who may call what, and calls in answers, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.server import answer_types
from octavo.server.chat_format import ChatFormat
from octavo.server.chat_prompt import ChatPrompt
from octavo.server.generation import Generation
from octavo.server.protocol import decode_chat_request
from octavo.text.dialect import Dialect
from octavo.text.tool_calls.tools import check_tool_choice, check_tools
from tests.server.chats import (
    ADD,
    ARGUMENTS,
    CALL,
    HERMES,
    HI,
    NAMED,
    NOW,
    PATH,
    THINKING,
    answer_with,
    cut,
    join_chunks,
    without_ids,
)
from tests.server.conftest import Serving
from tests.server.fake_engine import TOKENIZER, FakeEngine, FakeInfo
from tests.server.sse import read_events
from tests.server.test_http import check_error
from tests.server.test_openapi import validator

pytestmark = pytest.mark.anyio

ROOM = FakeInfo(max_model_len=4096)


def calling(text: str, *sizes: int, template: Any = HERMES, finish_reason: str = "stop") -> FakeEngine:
    return FakeEngine(answer_with(cut(text, *(sizes or (3,))), finish_reason), chat_template=template, info=ROOM)


async def test_a_call_is_a_call_and_no_text(serving: Serving) -> None:
    async with serving(calling(CALL)) as client:
        answer = (await client.post(PATH, json={"messages": HI, "tools": [ADD, NOW]})).json()
    (choice,) = answer["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    assert call == {"id": call["id"], "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    assert call["id"].startswith("call_")


async def test_a_streamed_call_has_its_name_first_and_its_arguments_in_pieces(serving: Serving) -> None:
    async with serving(calling(CALL)) as client:
        answer = await client.post(PATH, json={"messages": HI, "tools": [ADD], "stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in read_events(answer)]
    assert deltas[0] == {"role": "assistant", "content": None}
    first = deltas[1]["tool_calls"][0]
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "add")
    pieces = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas[1:] if delta]
    assert "".join(pieces) == ARGUMENTS
    assert len(pieces) > 3
    assert not any("content" in delta for delta in deltas[1:])


ANSWERS = [
    CALL,
    f"Let me see.\n{CALL}\n{CALL}",
    f"{CALL} and then some",
    "Just words, <b>no</b> call.",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1',
    "<tool_call>\nno json",
    "",
    f"<think>\nadd, then\n</think>\n\nI add.\n{CALL}",
    "<think>\nonly thoughts",
]


def read_both_ways(
    text: str, sizes: list[int], finish_reason: str, *, body: dict[str, Any], template: Any, starts_inside: bool = False
) -> tuple[Any, Any]:
    """The choices of a whole answer, and what the chunks of the same deltas add up to."""
    engine = FakeEngine(answer_with(cut(text, *sizes), finish_reason), chat_template=template)
    request = decode_chat_request(json.dumps({"messages": HI, "tools": [ADD], **body}).encode())
    dialect = Dialect(TOKENIZER, template)
    prompt = ChatPrompt([1], dialect, check_tool_choice(None, check_tools(request.tools)), True, starts_inside)
    formats = []
    for _ in range(2):
        generation = Generation(engine, [[1]], request.sampling_params, request_id="r")
        formats.append(ChatFormat(engine, "r", "fake", request, prompt, generation, 0))
    whole, streamed = formats
    for delta in engine.script(request.sampling_params):
        whole.collect(delta)  # type: ignore[arg-type]
    events = b"".join(
        streamed.chunks(delta)  # type: ignore[arg-type]
        for delta in engine.script(request.sampling_params)
    )
    chunks = [json.loads(event[6:]) for event in events.decode().split("\n\n")[:-1]]
    choices = whole.response(generation.usage)["choices"]
    told = [
        (
            without_ids(json.loads(json.dumps(choice["message"]))),
            choice["finish_reason"],
            (choice["logprobs"] or {"content": []})["content"],
        )
        for choice in choices
    ]
    joined = [join_chunks(chunks, index) for index in range(request.n)]
    return told, [(without_ids(message), reason, tokens) for message, reason, tokens in joined]


@given(
    text=st.sampled_from(ANSWERS)
    | st.lists(st.sampled_from(["<tool_call>", CALL, "{", "a ", "\n", "</think>"])).map("".join),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    finish_reason=st.sampled_from(["stop", "length"]),
    has_logprobs=st.booleans(),
    template=st.sampled_from([HERMES, THINKING]),
    starts_inside=st.booleans(),
    includes_reasoning=st.booleans(),
)
def test_streamed_and_joined_is_the_whole_answer_however_it_is_cut(
    text: str,
    sizes: list[int],
    finish_reason: str,
    has_logprobs: bool,
    template: Any,
    starts_inside: bool,
    includes_reasoning: bool,
) -> None:
    body = {"n": 2, "logprobs": has_logprobs, "include_reasoning": includes_reasoning}
    whole, joined = read_both_ways(
        text, sizes, finish_reason, body=body, template=template, starts_inside=starts_inside
    )
    assert whole == joined
    at_once, _ = read_both_ways(
        text, [10_000], finish_reason, body=body, template=template, starts_inside=starts_inside
    )
    assert [choice[:2] for choice in whole] == [choice[:2] for choice in at_once]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "text", "engine_reason", "reason"),
    [
        ("auto", CALL, "stop", "tool_calls"),
        ("auto", "No need.", "stop", "stop"),
        ("required", CALL, "stop", "tool_calls"),
        (NAMED, CALL, "stop", "stop"),  # H39: OpenAI's rule, plain and streamed alike
        ("required", CALL[:46], "length", "length"),
        ("none", CALL, "stop", "stop"),
    ],
)
async def test_the_reason_for_the_end(
    serving: Serving, choice: Any, text: str, engine_reason: str, reason: str, stream: bool
) -> None:
    async with serving(calling(text, finish_reason=engine_reason)) as client:
        body = {"messages": HI, "tools": [ADD], "tool_choice": choice, "stream": stream}
        answer = await client.post(PATH, json=body)
    if stream:
        message, told, _ = join_chunks(read_events(answer))
    else:
        message, told = (answer.json()["choices"][0][name] for name in ("message", "finish_reason"))
    assert told == reason
    assert ("tool_calls" in message) == ("<tool_call>" in text and choice != "none")


async def test_arguments_that_are_cut_off_are_told_as_far_as_they_came(serving: Serving) -> None:
    async with serving(calling(CALL[:-17], finish_reason="length")) as client:
        answer = (await client.post(PATH, json={"messages": HI, "tools": [ADD]})).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1, "b":'


async def test_h05_every_choice_of_a_stream_with_tools_ends_once(serving: Serving) -> None:
    async with serving(calling(f"Well.\n{CALL}\n{CALL}", 1, 7)) as client:
        body = {"messages": HI, "tools": [ADD], "stream": True, "n": 3, "tool_choice": "auto"}
        chunks = read_events(await client.post(PATH, json=body))
    for index in range(3):
        message, reason, _ = join_chunks(chunks, index)
        assert reason == "tool_calls"
        assert message["content"] == "Well."
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == [ARGUMENTS] * 2
    ids = {call["id"] for index in range(3) for call in join_chunks(chunks, index)[0]["tool_calls"]}
    assert len(ids) == 6


async def test_h03_what_was_held_when_a_stop_string_hit_is_told(serving: Serving) -> None:
    async with serving(calling("Fine <tool_", 2)) as client:
        body = {"messages": HI, "tools": [ADD], "stop": ["STOP"], "stream": True}
        message, reason, _ = join_chunks(read_events(await client.post(PATH, json=body)))
    assert (message["content"], reason) == ("Fine <tool_", "stop")


# --- what the engine is asked ----------------------------------------------------------------------------------------


async def test_a_template_that_takes_tools_is_given_them(serving: Serving) -> None:
    engine = calling("ok")
    async with serving(engine) as client:
        await client.post(PATH, json={"messages": HI, "tools": [ADD, NOW]})
        await client.post(PATH, json={"messages": HI, "tools": [ADD, NOW], "tool_choice": "none"})
    first, second = (bytes(call.prompt_token_ids).decode() for call in engine.calls)
    assert first == "add;now;<tool_call><user>hi<bot>"
    assert second == "<user>hi<bot>"
    assert [call.grammar for call in engine.calls] == [None, None]


async def test_a_template_without_tools_gets_a_system_message(serving: Serving) -> None:
    engine = FakeEngine(answer_with(['{"name": "add", ', '"arguments": {"a": 1}}']), info=ROOM)
    async with serving(engine) as client:
        answer = (await client.post(PATH, json={"messages": HI, "tools": [ADD]})).json()
    prompt = bytes(engine.calls[0].prompt_token_ids).decode()
    assert prompt.startswith("<system>You can call these functions.")
    assert prompt.endswith("<user>hi<bot>")
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_forced_calls_are_forced_by_a_grammar(serving: Serving, choice: Any) -> None:
    engine = calling(CALL)
    async with serving(engine) as client:
        await client.post(PATH, json={"messages": HI, "tools": [ADD, NOW], "tool_choice": choice})
    (spec,) = engine.prepared[:1]
    assert engine.calls[0].grammar == spec
    assert spec.kind == "tool_calls"
    assert ("now" in spec.text) == (choice == "required")


async def test_strict_tools_are_held_to_their_schema_and_may_not_be_called_too(serving: Serving) -> None:
    engine = calling(CALL)
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}  # type: ignore[dict-item]
    async with serving(engine) as client:
        await client.post(PATH, json={"messages": HI, "tools": [strict]})
        await client.post(PATH, json={"messages": HI, "tools": [ADD], "parallel_tool_calls": False})
    assert [call.grammar.kind for call in engine.calls if call.grammar] == ["text_and_tool_calls"] * 2


async def test_a_schema_that_cannot_be_followed(serving: Serving) -> None:
    """Refused if the tool is strict; else any object may be its arguments."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
    function = {"name": "odd", "parameters": schema}
    engine = calling(CALL)
    async with serving(engine) as client:
        for strict in (True, False):
            tools = [{"type": "function", "function": {**function, "strict": strict}}]
            body = {"messages": HI, "tools": tools, "tool_choice": "required"}
            answer = await client.post(PATH, json=body)
            if strict:
                error = check_error(answer, 400)
                assert error["param"] == "tools"
                assert error["message"].startswith("The tool 'odd' cannot be strict. ")
            else:
                assert answer.status_code == 200
    assert engine.calls[0].grammar is not None
    assert "pattern" not in engine.calls[0].grammar.text


async def test_calls_and_results_go_into_the_prompt(serving: Serving) -> None:
    engine = calling("3")
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    async with serving(engine) as client:
        answer = await client.post(PATH, json={"messages": messages, "tools": [ADD]})
        told = await client.post("/tokenize", json={"messages": messages, "tools": [ADD]})
    assert answer.status_code == 200
    prompt = engine.calls[0].prompt_token_ids
    assert bytes(prompt).decode() == "add;<tool_call><user>hi<assistant>[add 1]<tool>3<bot>"
    assert told.json()["tokens"] == prompt


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice", ["no tools"]),
        ({"tools": "add"}, "tools", ["a list"]),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", ["'web_search'", "only functions"]),
        ({"tools": [{"type": "function", "name": "add"}]}, "tools[0].name", ["no field"]),
        ({"tools": [ADD, ADD]}, "tools[1].function.name", ["earlier tool"]),
        ({"tools": [ADD] * 129}, "tools", ["129", "128"]),
        ({"tools": [ADD], "tool_choice": "maybe"}, "tool_choice", ["'maybe'", "required"]),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice.function", ["name"]),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice.function.name",
            ["'sub'", "add"],
        ),
        ({"tool_choice": "required"}, "tool_choice", ["no tools"]),
        ({"tools": [ADD], "parallel_tool_calls": "yes"}, "parallel_tool_calls", ["true or false"]),
        ({"functions": [ADD["function"]]}, "functions", ["use tools"]),
        ({"function_call": {"name": "add"}}, "function_call", ["use tool_choice"]),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_is_wrong_about_tools_is_named(
    serving: Serving, fields: dict[str, Any], param: str, words: list[str]
) -> None:
    engine = calling("ok")
    async with serving(engine) as client:
        error = check_error(await client.post(PATH, json={"messages": HI, **fields}), 400)
    assert error["param"] == param
    assert all(word in error["message"] for word in words), error["message"]
    assert engine.calls == []


@pytest.mark.parametrize("fields", [{"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True}])
async def test_without_tools_these_ask_for_nothing(serving: Serving, fields: dict[str, Any]) -> None:
    engine = calling(CALL)
    async with serving(engine) as client:
        answer = await client.post(PATH, json={"messages": HI, **fields})
    assert answer.json()["choices"][0]["message"]["content"] == CALL


async def test_a_form_for_the_text_says_nothing_where_calls_are_forced(serving: Serving) -> None:
    engine = calling(CALL)
    body = {"messages": HI, "tools": [ADD], "response_format": {"type": "json_object"}}
    async with serving(engine) as client:
        for choice in ("required", "none", "auto"):
            assert (await client.post(PATH, json={**body, "tool_choice": choice})).status_code == 200
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "frog"}}}
        error = check_error(await client.post(PATH, json={**body, "response_format": bad}), 400)
    assert [call.grammar.kind for call in engine.calls if call.grammar] == ["tool_calls", "json_object", "composed"]
    assert error["param"].startswith("response_format")


async def test_the_parser_can_be_named(serving: Serving) -> None:
    engine = calling('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]')
    async with serving(engine, tool_call_parser="mistral") as client:
        answer = (await client.post(PATH, json={"messages": HI, "tools": [ADD]})).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["arguments"], len(call["id"])) == ('{"a": 1}', 9)


@pytest.mark.parametrize("template", [HERMES, THINKING])
async def test_answers_have_the_described_shape(serving: Serving, template: Any) -> None:
    text = f"I add.</think>{CALL}" if template is THINKING else f"I add.{CALL}"
    body = {"messages": HI, "tools": [ADD], "logprobs": True}
    async with serving(calling(text, template=template), tool_call_parser="hermes") as client:
        whole = await client.post(PATH, json=body)
        streamed = await client.post(PATH, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    validator("ChatCompletion").validate(whole.json())
    msgspec.convert(whole.json(), answer_types.ChatCompletion)
    for event in read_events(streamed):
        validator("ChatCompletionChunk").validate(event)
        msgspec.convert(event, answer_types.ChatCompletionChunk)
