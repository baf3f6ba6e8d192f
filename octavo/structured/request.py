"""The API's fields that constrain the text, as a `GrammarSpec`. Pure: reads and checks their form, compiles nothing.

`response_format` is OpenAI's, `structured_outputs` and the older `guided_*` are vLLM's. Every function raises
InvalidRequestError with the field as `param`, in the API's spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from octavo.core.interfaces import GrammarSpec
from octavo.errors import InvalidRequestError
from octavo.structured.json_text import read_json, write_json

# The older fields, each with the kind that it names in structured_outputs.
GUIDED_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}

_FORMAT_TYPES = ("text", "json_object", "json_schema")
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
# vLLM's switches; the values that ask for what we do anyway.
_SWITCHES: dict[str, tuple[Any, ...]] = {
    "disable_fallback": (None, True, False),  # there is one backend
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
    "whitespace_pattern": (None,),
    "structural_tag": (None,),
}
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def find_spec(
    *, response_format: Any = None, structured_outputs: Any = None, guided: Mapping[str, Any] | None = None
) -> GrammarSpec | None:
    """The one constraint that a request asks for, or None. guided: its guided_* fields"""
    found = {
        "response_format": spec_from_response_format(response_format),
        "structured_outputs": spec_from_structured_outputs(structured_outputs),
        **{name: spec_from_guided(name, value) for name, value in (guided or {}).items()},
    }
    named = [name for name, spec in found.items() if spec is not None]
    if len(named) > 1:
        _refuse(f"{' and '.join(named)} each constrain the answer; send one of them.", named[1])
    return found[named[0]] if named else None


def spec_from_response_format(value: Any) -> GrammarSpec | None:
    """{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name", "schema", ...}}.

    `strict` changes nothing: a schema is always enforced.
    """
    param = "response_format"
    if value is None:
        return None
    fields = _read_object(value, param)
    kind = fields.get("type")
    if kind == "structural_tag":
        _refuse("response_format.type 'structural_tag' is not supported; use 'json_schema'.", f"{param}.type")
    if kind not in _FORMAT_TYPES:
        _refuse(f"response_format.type is {_show(kind)}; it must be one of {_join(_FORMAT_TYPES)}.", f"{param}.type")
    if kind != "json_schema":
        _check_fields(fields, ("type",), param)
        return GrammarSpec("json_object") if kind == "json_object" else None
    if "json_schema" not in fields:
        _refuse(
            "response_format.json_schema is missing; send "
            '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {...}}}.',
            f"{param}.json_schema",
        )
    _check_fields(fields, ("type", "json_schema"), param)

    param = "response_format.json_schema"
    fields = _read_object(fields["json_schema"], param)
    _check_fields(fields, ("name", "schema", "strict", "description"), param)
    name = fields.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse(f"{param}.name is {_show(name)}; it must be 1 to 64 letters, digits, '_' or '-'.", f"{param}.name")
    if not isinstance(fields.get("strict"), (bool, type(None))):
        _refuse(f"{param}.strict is {fields['strict']!r}; it must be true or false.", f"{param}.strict")
    if not isinstance(fields.get("description"), (str, type(None))):
        _refuse(f"{param}.description must be a string.", f"{param}.description")
    if "schema" not in fields:
        _refuse(f"{param}.schema is missing; send the JSON schema there.", f"{param}.schema")
    return spec_from_schema(fields["schema"], f"{param}.schema")


def spec_from_structured_outputs(value: Any) -> GrammarSpec | None:
    """vLLM's {"json": ...}, {"regex": ...}, {"choice": [...]}, {"grammar": ...} or {"json_object": true}."""
    param = "structured_outputs"
    if value is None:
        return None
    fields = _read_object(value, param)
    _check_fields(fields, (*_KINDS, *_SWITCHES), param)
    for name, allowed in _SWITCHES.items():
        if not any(fields.get(name) is entry for entry in allowed):
            _refuse(f"{param}.{name} is not supported.", f"{param}.{name}")
    named = [kind for kind in _KINDS if fields.get(kind) not in (None, False)]
    if len(named) != 1:
        what = f"it has {' and '.join(named)}" if named else "it has none"
        _refuse(f"{param} must have exactly one of {_join(_KINDS)}; {what}.", param)
    return _read_kind(named[0], fields[named[0]], f"{param}.{named[0]}")


def spec_from_guided(name: str, value: Any) -> GrammarSpec | None:
    """One of GUIDED_FIELDS."""
    if value is None or (name == "guided_json_object" and value is False):
        return None
    return _read_kind(GUIDED_FIELDS[name], value, name)


def spec_from_schema(schema: Any, param: str) -> GrammarSpec:
    """schema: an object or a boolean; also for the arguments of a tool"""
    if not isinstance(schema, (dict, bool)):
        _refuse(f"{param} must be a JSON schema, which is an object or a boolean.", param)
    return GrammarSpec("json_schema", write_json(schema, param, param))


def _read_kind(kind: str, value: Any, param: str) -> GrammarSpec:
    if kind == "json":
        return spec_from_schema(read_json(value, param, param) if isinstance(value, str) else value, param)
    if kind == "json_object":
        if value is not True:
            _refuse(f"{param} is {value!r}; it must be true or false.", param)
        return GrammarSpec("json_object")
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(entry, str) for entry in value):
            _refuse(f"{param} must be a list of strings that is not empty.", param)
        return GrammarSpec("choice", write_json(value, param, param))
    if not isinstance(value, str) or not value:
        _refuse(f"{param} must be a string that is not empty.", param)
    return GrammarSpec("lark" if kind == "grammar" else kind, value)


def _read_object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(f"{param} must be an object, not {type(value).__name__}.", param)
    return value


def _check_fields(fields: Mapping[str, Any], known: Iterable[str], param: str) -> None:
    for name in fields:
        if name not in known:
            _refuse(f"{param} has no field {name!r}; its fields are {_join(known)}.", f"{param}.{name}")


def _show(value: Any) -> str:
    return "missing" if value is None else repr(value)


def _join(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _refuse(message: str, param: str) -> NoReturn:
    raise InvalidRequestError(message, param=param, code="invalid_grammar")
