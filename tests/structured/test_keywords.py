"""Each keyword that is let through is enforced: an instance that keeps it can be written, one that breaks it cannot."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from octavo.core.interfaces import GrammarSpec
from octavo.structured.compile import validate_spec
from octavo.structured.grammar import TokenGrammarFactory, make_grammar_factory
from octavo.structured.vocabulary import vocabulary_of


class ByteTokenizer:
    """A token for every byte, and 256 for the end."""

    vocab_size = 257

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < 256 else b"</s>"

    def is_special(self, token_id: int) -> bool:
        return token_id == 256


@pytest.fixture(scope="module")
def byte_factory() -> TokenGrammarFactory:
    return make_grammar_factory(vocabulary_of(ByteTokenizer(), 257, [256]))


def can_write(factory: TokenGrammarFactory, schema: Any, text: str) -> bool:
    spec = GrammarSpec("json_schema", json.dumps(schema))
    validate_spec(spec)
    grammar = factory(spec)
    try:
        for byte in text.encode():
            grammar.accept(byte)
    except ValueError:
        return False
    return grammar.may_end


_AB = {"properties": {"a": {"type": "integer"}, "b": {"type": "null"}}}

# The schema, instances that keep it, instances that break it.
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer"}, [0, -7, 12], [1.5, "1", None, True]),
    ({"type": ["null", "boolean"]}, [None, True, False], [0, "null"]),
    ({"enum": [1, "a", None]}, [1, "a", None], [2, "b", False]),
    ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}, {"a": []}, {}]),
    ({"type": "integer", "minimum": -3}, [-3, 0, 999], [-4, -30]),
    ({"type": "integer", "maximum": 12}, [12, 0, -99], [13, 100]),
    ({"type": "integer", "exclusiveMinimum": 3}, [4, 40], [3, 2, -4]),
    ({"type": "integer", "exclusiveMaximum": 3}, [2, -4], [3, 30]),
    ({"type": "number", "minimum": 1.5}, [1.5, 2, 20.25], [1.4, 0, -2]),
    ({"type": "number", "exclusiveMaximum": 0.5}, [0.49, -1.25, 0], [0.5, 1]),
    ({"minimum": 3}, [3, "x", None], [2]),
    ({"type": "integer", "multipleOf": 6}, [0, 12, -18], [4, 13]),
    ({"type": "number", "multipleOf": 0.5}, [1.5, 2], [1.25]),
    ({"type": "string", "minLength": 2}, ["ab", "éé", "🌶🌶"], ["", "a", "🌶"]),
    ({"type": "string", "maxLength": 2}, ["", "ab", "🌶🌶"], ["abc"]),
    ({"maxLength": 2}, ["ab", 1234], ["abc"]),
    ({"type": "string", "pattern": "b+"}, ["abc", "b"], ["ac", ""]),
    ({"type": "string", "pattern": "^b+$"}, ["b", "bb"], ["ab", "bc"]),
    ({"type": "string", "format": "date"}, ["2024-02-28", "1999-12-31"], ["2024-13-01", "2024-02-30", "0000-01-01"]),
    ({"type": "string", "format": "ipv4"}, ["1.2.3.255"], ["1.2.3.256", "1.2.3"]),
    (
        {"type": "string", "format": "ipv6"},
        ["::1", "1:2:3:4:5:6:7:8", "fe80::1", "1::", "::"],
        ["1:2", "1::2::3", ":1"],
    ),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ({"type": "string", "format": "email"}, ["a.b@example.org"], ["a", "a@", "@b"]),
    ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, None]]),
    ({"type": "array", "items": False}, [[]], [[1]]),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}]},
        [[], [1], [1, None, "x"]],
        [["a"], [1, 2]],
    ),
    ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, [[], [1]], [["a"], [1, 2]]),
    ({"type": "array", "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    ({"type": "array", "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    ({"type": "object", **_AB}, [{}, {"a": 1}, {"a": 1, "b": None, "c": "x"}], [{"a": "x"}, {"b": 1}]),
    ({"type": "object", **_AB, "required": ["b"]}, [{"b": None}, {"a": 1, "b": None}], [{}, {"a": 1}]),
    ({"type": "object", **_AB, "additionalProperties": False}, [{}, {"a": 1}], [{"c": 1}, {"a": 1, "c": 1}]),
    ({"type": "object", "additionalProperties": {"type": "null"}}, [{}, {"x": None}], [{"x": 1}]),
    ({"type": "object", "patternProperties": {"^x": {"type": "null"}}}, [{"x1": None}, {"y": 1}], [{"x1": 1}]),
    ({"type": "object", "minProperties": 1}, [{"x": 1}], [{}]),
    ({"type": "object", "maxProperties": 1}, [{}, {"x": 1}], [{"x": 1, "y": 2}]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["x", True]),
    ({"oneOf": [{"type": "string"}, {"const": 3}]}, ["x", 3], [4, None]),
    ({"allOf": [{"type": "integer"}, {"minimum": 2}, {"maximum": 5}]}, [2, 5], [1, 6, "x"]),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, [None], [1]),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, [3], [2]),
    ({"type": "array", "items": {"$ref": "#"}}, [[], [[], [[]]]], [[1]]),
    ({"type": "integer", "format": "int32"}, [2**31 - 1], [2**31]),
    ({"type": "integer", "title": "t", "default": "x", "examples": ["y"], "$comment": "c"}, [1], ["x"]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=lambda value: json.dumps(value)[:50])
def test_a_keyword_is_enforced(
    byte_factory: TokenGrammarFactory, schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    is_old = isinstance(schema, dict) and isinstance(schema.get("items"), list)
    judge_class = jsonschema.Draft7Validator if is_old else jsonschema.Draft202012Validator
    judge = judge_class(schema, format_checker=judge_class.FORMAT_CHECKER)
    for instance in valid:
        assert judge.is_valid(instance), f"the test is wrong about {instance!r}"
        assert can_write(byte_factory, schema, json.dumps(instance, ensure_ascii=False)), instance
    for instance in invalid:
        assert not judge.is_valid(instance) or schema.get("format"), f"the test is wrong about {instance!r}"
        assert not can_write(byte_factory, schema, json.dumps(instance, ensure_ascii=False)), instance


@pytest.mark.parametrize("text", ['{"a":1}', '{"a": 1}', '{\n  "a": 1\n}', '{\n    "a" : 1 }'])
def test_usual_layouts_can_be_written(byte_factory: TokenGrammarFactory, text: str) -> None:
    assert can_write(byte_factory, {"type": "object", "properties": {"a": {"type": "integer"}}}, text)


@pytest.mark.parametrize("text", ['{"a":  1}', '{\n\n"a":1}', ' {"a":1}', '{"a":1}\n', '{"a":\t1}'])
def test_more_white_space_cannot(byte_factory: TokenGrammarFactory, text: str) -> None:
    assert not can_write(byte_factory, {"type": "object", "properties": {"a": {"type": "integer"}}}, text)
