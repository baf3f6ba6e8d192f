"""Calls and results of earlier turns: checked, and brought into the form that a model's template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from octavo.errors import InvalidRequestError
from octavo.text.tool_calls.call_id import mistral_call_id


def check_tool_history(messages: Sequence[Mapping[str, Any]], param: str = "messages") -> None:
    """Each call has an id and JSON arguments, each result belongs to a call before it.

    Arguments may be JSON text, as the API has them, or the object itself. A null or missing content is right for a
    message that has calls. Raises InvalidRequestError with a param such as `messages[2].tool_call_id`.
    """
    known: set[str] = set()
    for index, message in enumerate(messages):
        path = f"{param}[{index}]"
        role, calls = message.get("role"), message.get("tool_calls")
        if calls is not None and calls != []:
            if role != "assistant":
                _refuse(f"{path}.tool_calls", f"{path}.tool_calls belongs to an assistant message, not to {role!r}.")
            if not isinstance(calls, (list, tuple)):
                _refuse(f"{path}.tool_calls", f"{path}.tool_calls must be a list of calls.")
            for number, call in enumerate(calls):
                known.add(_check_call(call, f"{path}.tool_calls[{number}]"))
        call_id = message.get("tool_call_id")
        if role == "tool":
            if not isinstance(call_id, str) or not call_id:
                _refuse(f"{path}.tool_call_id", f"{path}.tool_call_id is missing; it tells which call this answers.")
            if call_id not in known:
                _refuse(
                    f"{path}.tool_call_id",
                    f"{path}.tool_call_id is {call_id[:80]!r}, but no assistant message before has a call of this id.",
                )
        elif call_id is not None:
            _refuse(f"{path}.tool_call_id", f"{path}.tool_call_id belongs to a tool message, not to {role!r}.")


def adapt_history(messages: Sequence[Mapping[str, Any]], format_name: str) -> list[dict[str, Any]]:
    """Mistral's templates take only ids of their own kind: others' are mapped, the same one always alike."""
    if format_name != "mistral":
        return [dict(message) for message in messages]
    adapted = []
    for message in messages:
        copy = dict(message)
        if isinstance(copy.get("tool_call_id"), str):
            copy["tool_call_id"] = mistral_call_id(copy["tool_call_id"])
        if isinstance(copy.get("tool_calls"), list):
            copy["tool_calls"] = [
                {**call, "id": mistral_call_id(str(call.get("id", "")))} for call in copy["tool_calls"]
            ]
        adapted.append(copy)
    return adapted


def _check_call(call: Any, path: str) -> str:
    if not isinstance(call, Mapping):
        _refuse(path, f"{path} must be an object with id, type and function.")
    if call.get("type", "function") != "function":
        _refuse(f"{path}.type", f"{path}.type is {call['type']!r}, but only functions can be called here.")
    call_id = call.get("id")
    if not isinstance(call_id, str) or not call_id:
        _refuse(f"{path}.id", f"{path}.id is missing; the tool's result refers to it.")
    function = call.get("function")
    if not isinstance(function, Mapping):
        _refuse(f"{path}.function", f"{path}.function must be an object with name and arguments.")
    if not isinstance(function.get("name"), str) or not function["name"]:
        _refuse(f"{path}.function.name", f"{path}.function.name must be the name of the function that was called.")
    arguments = function.get("arguments", "")
    where = f"{path}.function.arguments"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            _refuse(where, f"{where} is not JSON: {error}.")
    if not isinstance(arguments, Mapping):
        _refuse(where, f"{where} must be a JSON object, as text.")
    return call_id


def _refuse(param: str, sentence: str) -> NoReturn:
    raise InvalidRequestError(sentence, param=param, code="invalid_value")
