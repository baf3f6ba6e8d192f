"""How a body becomes a typed request, and a sentence for whatever is wrong on the way: what every endpoint shares."""

from __future__ import annotations

import re
from typing import Any, NoReturn, TypeVar

import msgspec

from octavo.errors import InvalidRequestError

_Request = TypeVar("_Request")


def decode_json_object(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequestError."""
    if not body.strip():
        raise InvalidRequestError("The body is empty; send a JSON object.", code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(_explain_json_fault(body, str(error)), code="invalid_json") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"The body is not valid UTF-8: {error.reason} at byte {error.start}.", code="invalid_json"
        ) from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply; no field needs that.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"The body is {_kind(value)}; send a JSON object.", code="invalid_json")
    return value


# What Python, among others, writes for numbers that JSON does not have.
_NO_NUMBER = re.compile(rb"-?(NaN|Infinity)")
_FAULT_AT = re.compile(r"\(byte (\d+)\)")


def _explain_json_fault(body: bytes, message: str) -> str:
    place = _FAULT_AT.search(message)
    if place is not None:
        at = int(place[1])
        found = _NO_NUMBER.match(body, max(at - 1, 0)) or _NO_NUMBER.match(body, at)
        if found is not None:
            return (
                f"The body is not valid JSON: it has {found[0].decode()} at byte {found.start()}, which is no number "
                "in JSON; send a finite one, or null."
            )
    return f"The body is not valid JSON: {message.partition(' - at ')[0]}."


def convert_fields(fields: dict[str, Any], request_type: type[_Request]) -> _Request:
    """The fields as the request type, strictly: no string becomes a number. Raises InvalidRequestError."""
    try:
        return msgspec.convert({name: _join_integers(value) for name, value in fields.items()}, request_type)
    except msgspec.ValidationError as error:
        _refuse_type(str(error), fields)


def _join_integers(value: Any) -> Any:
    """16.0 is the integer 16 in JSON Schema, and what languages without integers write for it."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def refuse_value(param: str, value: Any, rule: str, *, show: Any = None, code: str = "invalid_value") -> NoReturn:
    """Raises InvalidRequestError: "param is value, but rule." show: writes the value, if JSON is not the way."""
    shown = show(value) if show else shorten_json(value)
    raise InvalidRequestError(f"{param} is {shown}, but {rule}.", param=param, value=value, code=code)


# msgspec's own words, turned into a sentence with the field's name and value.
_TYPE_ERROR = re.compile(r"Expected `(?P<expected>[^`]*)`, got `(?P<found>[^`]*)`(?: - at `\$\.?(?P<path>[^`]*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_RANGE_ERROR = re.compile(r"(?P<what>.*) - at `\$\.?(?P<path>[^`]*)`")
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def _refuse_type(msgspec_message: str, fields: dict[str, Any]) -> NoReturn:
    if match := _MISSING.match(msgspec_message):
        name = match["name"]
        raise InvalidRequestError(f"{name} is missing, and required.", param=name, code="missing_field") from None
    if match := _TYPE_ERROR.match(msgspec_message):
        kinds = [_KINDS.get(kind, kind) for kind in match["expected"].split(" | ") if kind != "null"]
        path = match["path"] or ""
        rule = f"it must be {' or '.join(kinds)}"
        refuse_value(path, _value_at(fields, path), rule, code="invalid_type")
    if match := _RANGE_ERROR.match(msgspec_message):
        path = match["path"]
        raise InvalidRequestError(f"{path}: {match['what']}.", param=path, code="invalid_value") from None
    raise InvalidRequestError(f"{msgspec_message}.", code="invalid_value") from None


def _value_at(fields: dict[str, Any], path: str) -> Any:
    value: Any = fields
    for step in re.findall(r"[^.\[\]]+", path):
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value


def shorten_json(value: Any, limit: int = 80) -> str:
    """The value as JSON, for a message; long ones are cut."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= limit else f"{text[:limit]}..."


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return {int: "a number", float: "a number", str: "a string", list: "a list"}.get(type(value), "something else")
