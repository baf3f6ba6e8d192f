"""The API's fields as specs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.core.interfaces import GrammarSpec
from octavo.errors import InvalidRequestError
from octavo.structured.request import find_spec, spec_from_response_format, spec_from_structured_outputs

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


def wrapped(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, **fields}}


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, GrammarSpec("json_object")),
        (wrapped(), GrammarSpec("json_schema", json.dumps(SCHEMA))),
        (wrapped(strict=True, description="what"), GrammarSpec("json_schema", json.dumps(SCHEMA))),
        (wrapped(strict=None, schema=True), GrammarSpec("json_schema", "true")),
    ],
)
def test_response_format(value: Any, spec: GrammarSpec | None) -> None:
    assert spec_from_response_format(value) == spec


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("json", "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": ["text"]}, "response_format.type"),
        ({"type": "structural_tag", "structures": []}, "response_format.type"),
        ({"type": "json_object", "schema": {}}, "response_format.schema"),
        ({"type": "json_schema", "schema": SCHEMA}, "response_format.json_schema"),  # H29
        ({"type": "json_schema", "json_schema": None}, "response_format.json_schema"),
        ({**wrapped(), "strict": True}, "response_format.strict"),
        (wrapped(name=""), "response_format.json_schema.name"),
        (wrapped(name="two words"), "response_format.json_schema.name"),
        (wrapped(strict="yes"), "response_format.json_schema.strict"),
        (wrapped(description=3), "response_format.json_schema.description"),
        (wrapped(schema="{}"), "response_format.json_schema.schema"),
        (wrapped(schema=None), "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
        (wrapped(scheme={}), "response_format.json_schema.scheme"),
    ],
)
def test_a_wrong_response_format_is_refused_at_its_field(value: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        spec_from_response_format(value)
    assert refusal.value.param == param


def test_h29_the_message_shows_the_right_form() -> None:
    with pytest.raises(InvalidRequestError, match=r'"json_schema": \{"name": "answer"'):
        spec_from_response_format({"type": "json_schema", "schema": {}})


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (None, None),
        ({"json": SCHEMA}, GrammarSpec("json_schema", json.dumps(SCHEMA))),
        ({"json": json.dumps(SCHEMA)}, GrammarSpec("json_schema", json.dumps(SCHEMA))),
        ({"regex": "a+", "json": None, "disable_fallback": True}, GrammarSpec("regex", "a+")),
        ({"choice": ["é", "b"]}, GrammarSpec("choice", '["é", "b"]')),
        ({"grammar": 'start: "a"'}, GrammarSpec("lark", 'start: "a"')),
        ({"json_object": True, "disable_any_whitespace": False}, GrammarSpec("json_object")),
    ],
)
def test_structured_outputs(value: Any, spec: GrammarSpec | None) -> None:
    assert spec_from_structured_outputs(value) == spec


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ([], "structured_outputs"),
        ({}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"regexp": "a"}, "structured_outputs.regexp"),
        ({"regex": 3}, "structured_outputs.regex"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": [1]}, "structured_outputs.choice"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": 3}, "structured_outputs.json"),
        ({"structural_tag": "x"}, "structured_outputs.structural_tag"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
    ],
)
def test_wrong_structured_outputs_are_refused_at_their_field(value: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        spec_from_structured_outputs(value)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("guided", "spec"),
    [
        ({"guided_json": SCHEMA}, GrammarSpec("json_schema", json.dumps(SCHEMA))),
        ({"guided_regex": "a", "guided_choice": None}, GrammarSpec("regex", "a")),
        ({"guided_choice": ["a"]}, GrammarSpec("choice", '["a"]')),
        ({"guided_grammar": "x"}, GrammarSpec("lark", "x")),
        ({"guided_json_object": True}, GrammarSpec("json_object")),
        ({"guided_json_object": False}, None),
        ({}, None),
    ],
)
def test_the_older_names_mean_the_same(guided: dict[str, Any], spec: GrammarSpec | None) -> None:
    assert find_spec(guided=guided) == spec


def test_two_constraints_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="response_format and guided_regex"):
        find_spec(response_format={"type": "json_object"}, guided={"guided_regex": "a"})
    assert find_spec(response_format={"type": "text"}, structured_outputs={"regex": "a"}) == GrammarSpec("regex", "a")
