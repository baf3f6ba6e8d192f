"""Text to deltas: reasoning, calls and content together, with the right reason at the end."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.pipeline import ChatDelta, ChatMessage, ChatPipeline, ToolCallDelta
from octavo.text.reasoning import ReasoningSplitter
from octavo.text.stop import StopChecker
from octavo.text.tool_calls.formats import get_parser

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWER = f"<think>\nadd, then\n</think>\n\nI add.\n{CALL}\n{CALL}"


def make(is_named: bool = False) -> ChatPipeline:
    return ChatPipeline(ReasoningSplitter(), get_parser("hermes", ["add"]), is_named)


def run(pipeline: ChatPipeline, chunks: Iterable[str], reason: str = "stop") -> tuple[ChatMessage, str]:
    message = ChatMessage()
    for chunk in chunks:
        message.add(pipeline.push(chunk))
    deltas, reason = pipeline.finish(reason)
    message.add(deltas)
    for call in message.tool_calls:
        assert call.call_id.startswith("call_")
        call.call_id = "id"
    return message, reason


@given(size=st.integers(1, 40))
def test_streamed_is_not_streamed(size: int) -> None:
    whole = run(make(), [ANSWER])
    assert run(make(), [ANSWER[start : start + size] for start in range(0, len(ANSWER), size)]) == whole
    message, reason = whole
    assert reason == "tool_calls"
    assert (message.reasoning_content, message.content) == ("add, then", "I add.")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("add", '{"a": 1}')] * 2


def test_h03_what_is_held_is_content_when_a_stop_string_ends_the_answer() -> None:
    stop, pipeline, message = StopChecker(["STOP"]), make(), ChatMessage()
    for chunk in ["Fine ", "<tool", "_", "ST", "OP", " never"]:
        match = stop.push(chunk)
        message.add(pipeline.push(match.text))
        if match.stop:
            break
    deltas, reason = pipeline.finish("stop")
    message.add(deltas)
    assert deltas == [ChatDelta(content=" <tool_")]
    assert (message.content, reason) == ("Fine <tool_", "stop")


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_h05_a_cut_call_is_content_and_the_reason_stays(reason: str) -> None:
    message, told = run(make(), ['<tool_call>{"name": "ad'], reason)
    assert (message.content, message.tool_calls, told) == ('<tool_call>{"name": "ad', [], reason)


def test_a_call_that_is_cut_by_length_says_length() -> None:
    message, reason = run(make(), ['<tool_call>{"name": "add", "arguments": {"a'], "length")
    assert (message.tool_calls[0].arguments, reason) == ('{"a', "length")


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("before", ["", CALL])
def test_a_call_that_a_stop_string_cuts_says_stop(before: str, size: int) -> None:
    text = before + '<tool_call>{"name": "add", "arguments": {"a'
    message, reason = run(make(), [text[start : start + size] for start in range(0, len(text), size)])
    assert (message.tool_calls[-1].arguments, reason) == ('{"a', "stop")


@pytest.mark.parametrize("size", [1, 1000])
def test_h39_a_named_tool_ends_with_stop_plain_and_streamed(size: int) -> None:
    chunks = [CALL[start : start + size] for start in range(0, len(CALL), size)]
    assert run(make(is_named=True), chunks)[1] == "stop"
    assert run(make(), chunks)[1] == "tool_calls"


def test_without_parser_and_reasoning_text_is_content() -> None:
    pipeline = ChatPipeline()
    assert pipeline.push("a " + CALL) == [ChatDelta(content="a " + CALL)]
    assert pipeline.push("") == []
    assert pipeline.finish("stop") == ([], "stop")


def test_deltas_have_openai_s_shape() -> None:
    pipeline = ChatPipeline(parser=get_parser("hermes"))
    (first,) = pipeline.push('Hi <tool_call>{"name": "add", "arguments": {"a"')
    entry = first.tool_calls[0]
    assert first.as_dict() == {
        "content": "Hi",
        "tool_calls": [
            {"index": 0, "id": entry.call_id, "type": "function", "function": {"name": "add", "arguments": '{"a"'}}
        ],
    }
    (second,) = pipeline.push(": 1}")
    assert second == ChatDelta(tool_calls=(ToolCallDelta(0, ": 1}"),))
    assert second.as_dict() == {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}


def test_text_after_a_call_comes_in_a_delta_of_its_own() -> None:
    deltas = ChatPipeline(parser=get_parser("hermes")).push(CALL + " done")
    assert [bool(delta.tool_calls) for delta in deltas] == [True, False]
    assert deltas[1].content == "done"


def test_messages_have_openai_s_shape() -> None:
    message = run(make(), [CALL])[0].as_dict()
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "id", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]
    assert run(make(), [""])[0].as_dict() == {"role": "assistant", "content": "", "refusal": None}
    assert run(make(), ["<think>a"])[0].as_dict()["reasoning_content"] == "a"
