"""Schemas of every feature, each with a name; all are accepted."""

from __future__ import annotations

from typing import Any

_PERSON = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.org/person",
    "title": "Person",
    "description": "someone",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20, "examples": ["Ada"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150, "default": 3},
        "email": {"type": "string", "format": "email"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _object(properties: dict[str, Any], *required: str, **others: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **others,
    }


_WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}
_TREE = _object(
    {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "value"
)
_LIST = _object({"head": {"type": "boolean"}, "tail": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "head", "tail")

ACCEPTED: dict[str, Any] = {
    "anything": {},
    "true": True,
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "string": {"type": "string"},
    "array": {"type": "array"},
    "object": {"type": "object"},
    "several types": {"type": ["integer", "null", "string"]},
    "person": _PERSON,
    "integer range": {"type": "integer", "minimum": -17, "maximum": 342},
    "integer above": {"type": "integer", "exclusiveMinimum": 41},
    "integer below": {"type": "integer", "maximum": -3},
    "integer int32": {"type": "integer", "format": "int32"},
    "integer int64 bounds": {"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807},
    "number range": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "number exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "number below": {"type": "number", "maximum": 0},
    "number huge bound": {"type": "number", "minimum": -1e300, "maximum": 1e300},
    "multiple": {"type": "integer", "multipleOf": 7},
    "multiple of a quarter": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 1000},
    "multiple in a range": {"type": "integer", "multipleOf": 15, "minimum": 100, "maximum": 200},
    "short string": {"type": "string", "maxLength": 3},
    "long string": {"type": "string", "minLength": 5, "maxLength": 9},
    "pattern": {"type": "string", "pattern": r"^\d{3}-[A-Z]{2}$"},
    "pattern anywhere": {"type": "string", "pattern": "ab", "maxLength": 10},
    "pattern of choices": {"type": "string", "pattern": "^(red|green|blue)(-(light|dark))?$"},
    "pattern with quotes": {"type": "string", "pattern": r'^"[\\/]{2}\n$'},
    "pattern and length": {"type": "string", "pattern": "^[a-z]*$", "minLength": 2, "maxLength": 4},
    "enum": {"enum": ["red", "green", "ďábelské", 'with "quotes"', "line\nbreak"]},
    "enum of everything": {"enum": [1, 2.5, None, True, "x", [1, {"a": []}], {"b": "c"}]},
    "enum and type": {"type": "string", "enum": ["a", "b"]},
    "const": {"const": "only"},
    "const object": {"const": {"a": [1, 2], "b": None}},
    "long number in an enum": {"enum": [9007199254740991, -9007199254740991]},
    "exactly two items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    "two to four items": {"type": "array", "items": _WORD, "minItems": 2, "maxItems": 4},
    "no items": {"type": "array", "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, _WORD], "items": False, "minItems": 2},
    "tuple of the old form": {
        "type": "array",
        "items": [{"type": "boolean"}],
        "additionalItems": {"type": "null"},
        "maxItems": 3,
    },
    "matrix": {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "number"}},
    },
    "nested objects": _object({"a": _object({"b": _object({"c": {"type": "integer"}}, "c")}, "b")}, "a"),
    "optional properties": _object({"a": {"type": "integer"}, "b": {"type": "null"}, "c": {"type": "boolean"}}),
    "required out of order": _object({"a": {"type": "integer"}, "b": {"type": "null"}}, "b", "a"),
    "required but not described": {"type": "object", "required": ["x"], "maxProperties": 1},
    "additional integers": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "one property at least": {
        "type": "object",
        "additionalProperties": {"type": "null"},
        "minProperties": 1,
        "maxProperties": 2,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,3}$": {"type": "integer"}, "^s_[a-z]{1,3}$": _WORD},
        "additionalProperties": False,
    },
    "property names with marks": _object(
        {"a b": {"type": "null"}, 'q"q': {"type": "null"}, "é/~": {"type": "null"}}, "a b", 'q"q', "é/~"
    ),
    "properties named like keywords": _object(
        {"type": {"type": "integer"}, "$ref": {"type": "null"}, "title": {"type": "boolean"}}, "type", "$ref", "title"
    ),
    "anyOf": {
        "anyOf": [
            {"type": "integer"},
            _object({"a": {"type": "null"}}, "a"),
            {"type": "array", "items": {"type": "null"}, "maxItems": 2},
        ]
    },
    "anyOf beside properties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "anyOf": [
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
            {"properties": {"c": {"type": "null"}}, "required": ["c"]},
        ],
        "required": ["a"],
        "maxProperties": 2,
    },
    "oneOf by a constant": {
        "oneOf": [
            _object({"kind": {"const": "a"}, "x": {"type": "integer"}}, "kind", "x"),
            _object({"kind": {"const": "b"}, "y": _WORD}, "kind", "y"),
        ],
        "discriminator": {"propertyName": "kind"},
    },
    "oneOf by type": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "allOf of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    "allOf of patterns": {"type": "string", "allOf": [{"pattern": "^[a-c]{4}$"}, {"pattern": "b"}]},
    "reference": {
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
        "maxItems": 2,
        "$defs": {"point": _object({"x": {"type": "integer"}, "y": {"type": "integer"}}, "x", "y")},
    },
    "reference of the old form": {"$ref": "#/definitions/word", "definitions": {"word": _WORD}},
    "reference with siblings": {
        "$ref": "#/$defs/count",
        "maximum": 5,
        "$defs": {"count": {"type": "integer", "minimum": 0}},
    },
    "reference to a property": _object({"a": _WORD, "b": {"$ref": "#/properties/a"}}, "a", "b"),
    "reference with an escape": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "boolean"}}},
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": _TREE}},
    "linked list": _LIST,
    "mutual recursion": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"anyOf": [{"type": "null"}, _object({"b": {"$ref": "#/$defs/b"}}, "b")]},
            "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 2},
        },
    },
    **{
        f"format {name}": {"type": "string", "format": name}
        for name in (
            "date",
            "time",
            "date-time",
            "duration",
            "email",
            "hostname",
            "ipv4",
            "ipv6",
            "uuid",
            "uri",
            "byte",
            "password",
        )
    },
    "format without a type": {"format": "date"},
    "format beside a pattern": {"type": "string", "format": "ipv4", "pattern": "^1"},
    "annotations everywhere": {
        "type": "integer",
        "title": "t",
        "description": "d",
        "default": 1,
        "examples": [2],
        "deprecated": True,
        "readOnly": False,
        "writeOnly": False,
        "$comment": "c",
        "x-order": 3,
        "nullable": False,
        "uniqueItems": False,
    },
    "default that looks like a schema": _object({"a": {"type": "null", "default": {"not": {}}}}, "a"),
}

# Each with the place that the message names.
REFUSED: dict[str, tuple[Any, str]] = {
    **{
        keyword: ({"type": "object", "properties": {"a": {keyword: value}}}, f"#/properties/a/{keyword}")
        for keyword, value in {
            "not": {},
            "if": {},
            "then": {},
            "else": {},
            "contains": {},
            "minContains": 1,
            "maxContains": 1,
            "uniqueItems": True,
            "propertyNames": {},
            "dependentRequired": {},
            "dependentSchemas": {},
            "dependencies": {},
            "unevaluatedProperties": False,
            "unevaluatedItems": False,
            "$dynamicRef": "#a",
            "$dynamicAnchor": "a",
            "nullable": True,
            "maxLenght": 3,
            "x-guidance": {"lenient": True},
            "exclusiveMinimum": True,
            "minLength": -1,
            "maxItems": 1.5,
            "minItems": True,
            "required": "a",
            "pattern": 5,
            "multipleOf": 0,
            "enum": [],
            "anyOf": [],
            "allOf": {},
            "format": "iri",
            "$ref": "other.json",
            "minimum": "3",
            "maximum": None,
            "maxLength": 10**9,
            "properties": [],
            "minProperties": 2,
        }.items()
    },
    "type": ({"type": "text"}, "#/type"),
    "missing reference": ({"$ref": "#/$defs/nothing"}, "#/$ref"),
    "reference into a value": ({"$ref": "#/default", "default": {"type": "null"}}, "#/$ref"),
    "property that is a number": ({"type": "object", "properties": {"a": 5}}, "#/properties/a"),
    "items that are null": ({"type": "array", "items": None}, "#/items"),
    "wide": ({"type": "object", "properties": {str(i): {} for i in range(501)}}, "#/properties"),
    "large enum": ({"enum": list(range(4001))}, "#/enum"),
    "tiny multiple": ({"type": "number", "multipleOf": 1e-300}, "#/multipleOf"),
    "multiples that meet": ({"allOf": [{"multipleOf": 4091}, {"multipleOf": 4093}]}, "#/allOf/1/multipleOf"),
    "value that overflows": ({"const": {"a": [2**53]}}, "#/const/a/0"),
    "bound that overflows": ({"type": "integer", "minimum": 10**25}, "#/minimum"),
}

# No text satisfies them.
EMPTY: dict[str, Any] = {
    "false": False,
    "crossed bounds": {"type": "integer", "minimum": 5, "maximum": 3},
    "crossed lengths": {"type": "string", "minLength": 5, "maxLength": 3},
    "pattern against length": {"type": "string", "pattern": "^[a-z]{5}$", "maxLength": 3},
    "required but forbidden": {"type": "object", "required": ["a"], "additionalProperties": False},
    "only itself": {"$ref": "#"},
    "two that name each other": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
}
