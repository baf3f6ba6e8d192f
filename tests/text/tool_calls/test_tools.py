"""tools, tool_choice and earlier calls: what is wrong is named by its path."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import InvalidRequestError
from octavo.text.tool_calls.history import adapt_history, check_tool_history
from octavo.text.tool_calls.tools import check_tool_choice, check_tools


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def schema(**keywords: Any) -> dict[str, Any]:
    return tool(parameters={"type": "object", **keywords})


DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ([tool(f"f{index}") for index in range(129)], "tools"),
        (["f"], "tools[0]"),
        ([tool(), {"type": "web_search"}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{**tool(), "name": "f"}], "tools[0].name"),
        ([tool(), tool("")], "tools[1].function.name"),
        ([tool(), tool("a b")], "tools[1].function.name"),
        ([tool("é")], "tools[0].function.name"),
        ([tool("f\n")], "tools[0].function.name"),
        ([tool("x" * 65)], "tools[0].function.name"),
        ([tool(None)], "tools[0].function.name"),
        ([tool(), tool()], "tools[1].function.name"),
        ([tool(description=1)], "tools[0].function.description"),
        ([tool(strict="yes")], "tools[0].function.strict"),
        ([tool(arguments={})], "tools[0].function.arguments"),
        ([tool(parameters="{}")], "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], "tools[0].function.parameters.type"),
        ([schema(properties=[])], "tools[0].function.parameters.properties"),
        ([schema(properties={"a": 1})], "tools[0].function.parameters.properties.a"),
        ([schema(properties={"a": {"type": "text"}})], "tools[0].function.parameters.properties.a.type"),
        ([schema(required="a")], "tools[0].function.parameters.required"),
        ([schema(anyOf=[])], "tools[0].function.parameters.anyOf"),
        ([schema(anyOf=[{}, 3])], "tools[0].function.parameters.anyOf[1]"),
        ([schema(enum=1)], "tools[0].function.parameters.enum"),
    ],
)
def test_a_bad_tool_is_named(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_tools(tools)
    assert caught.value.param == param
    assert str(caught.value).endswith(".")


def test_a_schema_without_end_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="64 levels"):
        check_tools([tool(parameters={"type": "object", **DEEP})])


def test_good_tools_are_taken() -> None:
    assert check_tools(None) == ()
    first, second = check_tools(
        [tool("get-it_2", description="d", strict=True), tool("g", parameters={"properties": {"a": True}}, strict=None)]
    )
    assert (first.name, first.is_strict) == ("get-it_2", True)
    assert first.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert second.as_dict() == tool("g", parameters={"type": "object", "properties": {"a": True}})


TOOLS = check_tools([tool("f"), tool("g")])


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, "auto", ["f", "g"]),
        ("auto", "auto", ["f", "g"]),
        ("none", "none", []),
        ("required", "required", ["f", "g"]),
        (tool("g"), "named", ["g"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("g")]}}, "required", ["g"]),
    ],
)
def test_choices(choice: Any, mode: str, names: list[str]) -> None:
    found = check_tool_choice(choice, TOOLS)
    assert (found.mode, found.tool_names) == (mode, names)
    assert check_tool_choice(None, ()).mode == "none"


@pytest.mark.parametrize(
    ("choice", "tools", "param"),
    [
        ("any", TOOLS, "tool_choice"),
        ("required", (), "tool_choice"),
        (3, TOOLS, "tool_choice"),
        ({"type": "tool"}, TOOLS, "tool_choice.type"),
        ({"type": "function"}, TOOLS, "tool_choice.function"),
        (tool("h"), TOOLS, "tool_choice.function.name"),
        (tool("f"), (), "tool_choice.function.name"),
        ({"type": "allowed_tools", "allowed_tools": {}}, TOOLS, "tool_choice.allowed_tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("h")]}},
            TOOLS,
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
    ],
)
def test_a_bad_choice_is_named(choice: Any, tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_tool_choice(choice, tools)
    assert caught.value.param == param


def call(call_id: Any = "c1", name: Any = "f", arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def turn(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def result(call_id: Any = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "2"}


def test_h40_a_turn_of_calls_without_content_is_right() -> None:
    user = {"role": "user", "content": "hi"}
    check_tool_history([user, turn(call(), call("c2", arguments='{"a": 1}')), result("c2"), result(), user])
    check_tool_history(
        [turn(call(arguments="")), turn(call(arguments={"a": 1})), {"role": "assistant", "tool_calls": []}]
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([turn(call()), {"role": "tool", "content": "2"}], "messages[1].tool_call_id"),
        ([turn(call()), result("c2")], "messages[1].tool_call_id"),
        ([result()], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "a", "tool_call_id": "c1"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "a", "tool_calls": [call()]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": call()}], "messages[0].tool_calls"),
        ([turn("f")], "messages[0].tool_calls[0]"),
        ([turn(call(), call(None))], "messages[0].tool_calls[1].id"),
        ([turn(call(type="custom"))], "messages[0].tool_calls[0].type"),
        ([turn({"id": "c1"})], "messages[0].tool_calls[0].function"),
        ([turn(call(name=""))], "messages[0].tool_calls[0].function.name"),
        ([turn(call(arguments="{a"))], "messages[0].tool_calls[0].function.arguments"),
        ([turn(call(arguments="[1]"))], "messages[0].tool_calls[0].function.arguments"),
        ([turn(call(arguments="[" * 100_000))], "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_a_bad_history_is_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_tool_history(messages)
    assert caught.value.param == param


def test_mistral_gets_ids_of_its_own_kind() -> None:
    adapted = adapt_history([turn(call("call_123")), result("call_123")], "mistral")
    new_id = adapted[1]["tool_call_id"]
    assert adapted[0]["tool_calls"][0]["id"] == new_id
    assert len(new_id) == 9
    assert new_id.isalnum()
    assert adapt_history([result("abcdef123")], "mistral")[0]["tool_call_id"] == "abcdef123"
    assert adapt_history([result("call_123")], "hermes")[0]["tool_call_id"] == "call_123"
