"""Reasoning is told apart from the answer, whole and streamed, and comes back in the history."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.text.chat_template import ChatTemplate
from tests.server.chats import ADD, HI, PATH, THINKING, answer_with, cut, join_chunks
from tests.server.conftest import Serving
from tests.server.fake_engine import FakeEngine, FakeInfo
from tests.server.sse import read_events
from tests.server.test_http import check_error

pytestmark = pytest.mark.anyio

ROOM = FakeInfo(max_model_len=4096)
SAID = "so 2 + 2\n</think>\n\nFour."


def thinking(text: str = SAID, *sizes: int, template: ChatTemplate = THINKING) -> FakeEngine:
    return FakeEngine(answer_with(cut(text, *(sizes or (4,)))), chat_template=template, info=ROOM)


async def test_reasoning_that_the_prompt_opened_is_split_off(serving: Serving) -> None:
    async with serving(thinking()) as client:
        answer = (await client.post(PATH, json={"messages": HI})).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Four.",
        "refusal": None,
        "reasoning_content": "so 2 + 2",
    }
    assert choice["finish_reason"] == "stop"
    # "so 2| + 2|\n</t|hink|>\n\nF|our.|": four pieces end inside.
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


async def test_a_stream_tells_reasoning_first(serving: Serving) -> None:
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    async with serving(thinking()) as client:
        *chunks, last = read_events(await client.post(PATH, json=body))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None}
    kinds = [name for delta in deltas[1:] for name in delta]
    assert kinds == sorted(kinds, reverse=True)  # all reasoning_content, then all content
    message, reason, _ = join_chunks(chunks)
    assert (message["reasoning_content"], message["content"], reason) == ("so 2 + 2", "Four.", "stop")
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_can_be_left_out(serving: Serving, stream: bool) -> None:
    body = {"messages": HI, "include_reasoning": False, "stream": stream}
    async with serving(thinking()) as client:
        answer = await client.post(PATH, json=body)
    message = join_chunks(read_events(answer))[0] if stream else answer.json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Four.", "refusal": None}
    if not stream:
        assert answer.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


async def test_an_answer_cut_while_thinking_is_all_reasoning(serving: Serving) -> None:
    engine = FakeEngine(answer_with(["so ", "it"], "length"), chat_template=THINKING, info=ROOM)
    async with serving(engine) as client:
        (choice,) = (await client.post(PATH, json={"messages": HI})).json()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (None, "so it")
    assert choice["finish_reason"] == "length"


async def test_thinking_can_be_turned_off_by_the_template_s_variable(serving: Serving) -> None:
    engine = thinking("Four.")
    async with serving(engine) as client:
        body = {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}
        (choice,) = (await client.post(PATH, json=body)).json()["choices"]
    assert bytes(engine.calls[0].prompt_token_ids) == b"<user>hi<bot>"
    assert choice["message"] == {"role": "assistant", "content": "Four.", "refusal": None}


async def test_the_parser_can_be_turned_off_and_named(serving: Serving) -> None:
    async with serving(thinking(), reasoning_parser="none") as client:
        (choice,) = (await client.post(PATH, json={"messages": HI})).json()["choices"]
    assert choice["message"]["content"] == SAID
    engine = FakeEngine(answer_with(["[THINK]a[/THINK]b"]))
    async with serving(engine, reasoning_parser="mistral") as client:
        (choice,) = (await client.post(PATH, json={"messages": HI})).json()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("b", "a")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_reasoning_of_earlier_turns_reaches_the_template(serving: Serving, name: str) -> None:
    engine = thinking()
    messages = [*HI, {"role": "assistant", "content": "Ho.", name: "a greeting"}, *HI]
    async with serving(engine) as client:
        await client.post(PATH, json={"messages": messages})
    prompt = bytes(engine.calls[0].prompt_token_ids).decode()
    assert prompt == "<user>hi<assistant><think>a greeting</think>Ho.<user>hi<bot><think>"


async def test_a_continued_message_may_be_in_the_midst_of_its_reasoning(serving: Serving) -> None:
    async with serving(thinking("2</think>Four.")) as client:
        begun = {"role": "assistant", "content": "<think>2 + "}
        body = {"messages": [*HI, begun], "continue_final_message": True}
        (choice,) = (await client.post(PATH, json=body)).json()["choices"]
        said = {"role": "assistant", "content": "<think>x</think>Fo"}
        body = {"messages": [*HI, said], "continue_final_message": True}
        (other,) = (await client.post(PATH, json=body)).json()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Four.", "2")
    assert other["message"]["content"] == "2</think>Four."


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_calls_come_after_the_reasoning(serving: Serving, choice: str) -> None:
    engine = thinking('I add.</think>\n{"name": "add", "arguments": {"a": 1}}')
    async with serving(engine) as client:
        body: dict[str, Any] = {"messages": HI, "tools": [ADD], "tool_choice": choice}
        message = (await client.post(PATH, json=body)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I add.", None)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    if choice == "required":
        assert engine.calls[0].grammar is not None
        assert engine.calls[0].grammar.text.startswith("start: thinking answer")


async def test_reasoning_effort_goes_to_a_template_that_has_it(serving: Serving) -> None:
    template = ChatTemplate("[{{ reasoning_effort }}]{{ messages[0].content }}")
    engine = FakeEngine(chat_template=template)
    async with serving(engine) as client:
        await client.post(PATH, json={"messages": HI, "reasoning_effort": "low"})
        wrong = await client.post(PATH, json={"messages": HI, "reasoning_effort": "much"})
    assert bytes(engine.calls[0].prompt_token_ids) == b"[low]hi"
    assert check_error(wrong, 400)["message"].startswith('reasoning_effort is "much", but it must be one of none, ')


async def test_reasoning_effort_without_a_variable_is_refused_with_the_way_out(serving: Serving) -> None:
    async with serving(thinking()) as client:
        error = check_error(await client.post(PATH, json={"messages": HI, "reasoning_effort": "low"}), 400)
    assert (error["param"], error["code"]) == ("reasoning_effort", "unsupported_field")
    assert "enable_thinking" in error["message"]


async def test_the_answer_s_form_holds_after_the_reasoning(serving: Serving) -> None:
    engine = thinking("so</think>yes")
    async with serving(engine) as client:
        body = {"messages": HI, "structured_outputs": {"choice": ["yes", "no"]}}
        message = (await client.post(PATH, json=body)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", "yes")
    grammar = engine.calls[0].grammar
    assert grammar is not None
    assert grammar.kind == "composed"
    assert "start: thinking @text" in grammar.text
