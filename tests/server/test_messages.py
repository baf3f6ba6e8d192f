from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import InvalidRequestError
from octavo.server.messages import check_messages


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", ["empty"]),
        ("hi", "messages", ["a list"]),
        ({"role": "user"}, "messages", ["a list"]),
        (["hi"], "messages[0]", ["an object"]),
        ([{"content": "x"}], "messages[0].role", ["missing", "user"]),
        ([{"role": "robot", "content": "x"}], "messages[0].role", ['"robot"', "assistant"]),
        ([{"role": 5, "content": "x"}], "messages[0].role", ["5"]),
        ([{"role": [], "content": "x"}], "messages[0].role", ["[]"]),
        ([{"role": "user"}], "messages[0].content", ["missing"]),
        ([{"role": "user", "content": None}], "messages[0].content", ["missing"]),
        ([{"role": "user", "content": 5}], "messages[0].content", ["a text"]),
        ([{"role": "user", "content": []}], "messages[0].content", ["empty"]),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", ["an object"]),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", ["a string"]),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type", ["null"]),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
            ["image_url", "no images"],
        ),
        ([{"role": "user", "content": "x", "nmae": "y"}], "messages[0].nmae", ["did you mean name?"]),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name", ["a string"]),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls", ["assistant"]),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].id", ["missing"]),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls[0]", ["an object"]),
        ([{"role": "assistant", "tool_calls": {"id": "1"}}], "messages[0].tool_calls", ["a list"]),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
            ["not JSON"],
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
            ["a JSON object"],
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "function": {"name": "f"}}]}],
            "messages[0].tool_calls[0].type",
            ["'custom'", "only functions"],
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "fn": {"name": "f"}}]}],
            "messages[0].tool_calls[0].fn",
            ["known: id, type, function"],
        ),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id", ["missing"]),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id", ["'1'", "no assistant"]),
        ([{"role": "user", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id", ["tool message"]),
        ([{"role": "function", "content": "x", "name": "f"}], "messages[0].role", ["the role tool"]),
        (
            [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}],
            "messages[0].function_call",
            ["use tool_calls"],
        ),
        ([{"role": "user", "content": "x", "reasoning_content": "y"}], "messages[0].reasoning_content", ["assistant"]),
        ([{"role": "assistant", "reasoning": 5}], "messages[0].reasoning_content", ["a string"]),
        ([{"role": "user", "content": "x"}] * 4097, "messages", ["4097", "4096"]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_message_is_refused_by_its_place(messages: Any, param: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_messages(messages)
    assert caught.value.param == param
    assert all(word in caught.value.message for word in words), caught.value.message


def test_text_parts_are_joined_and_roles_stay() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "developer", "content": parts, "name": "n"}]) == [
        {"role": "developer", "content": "ab", "name": "n"}
    ]


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": [], "annotations": []}
    assert check_messages([answer]) == [{"role": "assistant", "content": "x"}]
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    assert check_messages([refused]) == [{"role": "assistant", "content": "No."}]
    for name in ("reasoning", "reasoning_content"):
        thought = {"role": "assistant", "content": "4", name: "2 + 2"}
        assert check_messages([thought]) == [{"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}]


def test_h40_calls_and_their_results_go_through() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "index": 0}], "function_call": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "7"}], "name": "f"},
    ]
    assert check_messages(messages)[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "name": "f", "tool_call_id": "call_1"},
    ]
