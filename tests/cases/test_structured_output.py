"""Grammars and schemas: H34 to H38."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cases.conftest import Api, texts_of

CHAT = {"messages": [{"role": "user", "content": "Say something."}]}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "[.*"},
        {"regex": "(" * 5000},
        {"regex": "(?=x)"},
        {"grammar": "root ::= ["},
        {"grammar": "start: missing"},
        {"choice": []},
        {"choice": [1]},
        {"json": "{not json"},
    ],
)
def test_h34_a_bad_regex_grammar_or_choice_is_a_400(api: Api, constraint: Any) -> None:
    error = api.refuse("/v1/chat/completions", structured_outputs=constraint, max_tokens=5, **CHAT)
    assert error["param"].startswith("structured_outputs")
    [(kind, value)] = constraint.items()
    assert api.refuse("/v1/completions", prompt="x", max_tokens=5, **{f"guided_{kind}": value})["param"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": 5}},
        {"type": "object", "properties": 5},
        {"type": "nothing"},
        {"$ref": "#/$defs/missing"},
        {"minimum": "a", "type": "integer"},
        {"type": "integer", "minimum": 5, "maximum": 3},
        [],
        "a",
    ],
)
def test_h35_a_bad_schema_is_a_400_that_names_the_place(api: Api, schema: Any) -> None:
    error = api.refuse("/v1/chat/completions", response_format=schema_format(schema), max_tokens=5, **CHAT)
    assert error["param"].startswith("response_format")


def test_h36_one_grammar_after_another(api: Api) -> None:
    for regex in ("^(.*)$", "^(|.*)$", "[0-9]+", "^$|a", "a{1,100000}{1,100000}", "((a+)+)+$"):
        answer = api.post("/v1/completions", prompt="x", max_tokens=5, structured_outputs={"regex": regex})
        assert answer.status_code in (200, 400), answer.text
        api.assert_alive()


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("low", "high"), [(2, 2), (1, 3), (0, 0)])
def test_h37_the_bounds_of_an_array_hold(api: Api, temperature: float, low: int, high: int) -> None:
    schema = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 9},
        "minItems": low,
        "maxItems": high,
    }
    for seed in range(3):
        options = {"response_format": schema_format(schema), "temperature": temperature, "seed": seed}
        choice = api.chat("Numbers!", max_tokens=60, **options)["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert low <= len(json.loads(choice["message"]["content"])) <= high


def test_h37_a_keyword_that_is_not_followed_is_refused_by_name(api: Api) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    error = api.refuse("/v1/chat/completions", response_format=schema_format(schema), **CHAT)
    assert "uniqueItems" in error["message"]


@pytest.mark.parametrize(
    ("schema", "seed"),
    [({}, 0), ({}, 1), (True, 2), ({"type": "number"}, 3), ({"type": "array"}, 4), ({"type": "object"}, 5)],
)
def test_h38_a_schema_of_anything_ends_or_is_cut_as_the_start_of_json(api: Api, schema: Any, seed: int) -> None:
    choice = api.chat("Give me JSON.", response_format=schema_format(schema), max_tokens=200, temperature=1, seed=seed)[
        "choices"
    ][0]
    text = choice["message"]["content"]
    if choice["finish_reason"] == "stop":
        json.loads(text)
    else:
        assert choice["finish_reason"] == "length"
    longest_digits = max(map(len, "".join(c if c.isdigit() else " " for c in text).split()), default=0)
    assert longest_digits < 60, "a number that never ends"
    assert "    " * 10 not in text, "whitespace that never ends"


def test_h38_json_object_streams_an_object(api: Api) -> None:
    options = {"response_format": {"type": "json_object"}, "max_tokens": 80}
    plain = api.chat("Give me JSON.", **options)["choices"][0]
    streamed = "".join(texts_of(api.stream_chat("Give me JSON.", **options)))
    assert streamed == plain["message"]["content"]
    assert streamed.startswith("{")
    if plain["finish_reason"] == "stop":
        assert isinstance(json.loads(streamed), dict)
