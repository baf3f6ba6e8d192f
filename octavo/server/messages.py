"""Chat messages as they are sent, made into the plain dicts that a chat template takes.

What a template does with them is `octavo.text`'s matter; here only the shape is checked.
"""

from __future__ import annotations

import difflib
from typing import Any, NoReturn

import msgspec

from octavo.errors import InvalidRequestError

# OpenAI's newer word for system; templates know the older one.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
# What an answer of an earlier turn carries and a client sends back with it; empty values say nothing.
_EMPTY_FIELDS = frozenset({"refusal", "annotations", "audio", "function_call", "reasoning_content", "reasoning"})
# Which kinds of parts a text model cannot take, in the words of the message.
_OTHER_PARTS = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "files",
}
MAX_MESSAGES = 4096


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with content as one text. Raises InvalidRequestError that names the message and the field."""
    if not isinstance(messages, list):
        _refuse("messages", "messages must be a list of messages", "invalid_type")
    if not messages:
        _refuse("messages", "messages is empty; send at least one message")
    if len(messages) > MAX_MESSAGES:
        _refuse("messages", f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are taken")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        _refuse(path, f"{path} must be an object with role and content", "invalid_type")
    fields = {name: value for name, value in message.items() if value is not None}
    for name in list(fields):
        if name in _EMPTY_FIELDS and not fields[name]:
            del fields[name]
        elif name in _EMPTY_FIELDS:
            _refuse(f"{path}.{name}", f"{path}.{name} is not supported yet; leave it out", "unsupported_field")
        elif name not in _FIELDS:
            nearest = difflib.get_close_matches(name[:64], sorted(_FIELDS), n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known here: {', '.join(sorted(_FIELDS))}"
            _refuse(f"{path}.{name[:64]}", f"There is no field {path}.{name[:64]}; {hint}", "unknown_field")
    role = _check_role(fields, path)
    checked: dict[str, Any] = {"role": role, "content": _check_content(fields, role, path)}
    for name in ("name", "tool_call_id"):
        if name in fields:
            if not isinstance(fields[name], str):
                _refuse(f"{path}.{name}", f"{path}.{name} must be a string", "invalid_type")
            checked[name] = fields[name]
    if fields.get("tool_calls"):
        if role != "assistant":
            _refuse(f"{path}.tool_calls", f"{path}.tool_calls belongs to an assistant message, but role is {role}")
        checked["tool_calls"] = _check_tool_calls(fields["tool_calls"], f"{path}.tool_calls")
    return checked


def _check_role(fields: dict[str, Any], path: str) -> str:
    if "role" not in fields:
        _refuse(f"{path}.role", f"{path}.role is missing; it is one of {', '.join(_ROLES)}", "missing_field")
    role = fields["role"]
    if not isinstance(role, str) or role not in _ROLES:
        shown = msgspec.json.encode(role).decode()[:64]
        _refuse(f"{path}.role", f"{path}.role is {shown}, but it must be one of {', '.join(_ROLES)}")
    return _ROLES[role]


def _check_content(fields: dict[str, Any], role: str, path: str) -> str:
    content = fields.get("content")
    if content is None:
        # A turn that only called tools has no text; templates add strings, so it becomes an empty one.
        if role == "assistant":
            return ""
        _refuse(f"{path}.content", f"{path}.content is missing; a {role} message needs a text", "missing_field")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(f"{path}.content", f"{path}.content must be a text or a list of text parts", "invalid_type")
    if not content:
        _refuse(f"{path}.content", f"{path}.content is an empty list; send a text or a list of text parts")
    return "".join(_check_part(part, f"{path}.content[{index}]") for index, part in enumerate(content))


def _check_part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        _refuse(path, f'{path} must be an object such as {{"type": "text", "text": "..."}}', "invalid_type")
    kind = part.get("type")
    if kind != "text":
        if isinstance(kind, str) and kind in _OTHER_PARTS:
            _refuse(
                f"{path}.type",
                f"{path} is of type {kind}, but this model takes no {_OTHER_PARTS[kind]}; send text parts only",
                "unsupported_content",
            )
        shown = msgspec.json.encode(kind).decode()[:64]
        _refuse(f"{path}.type", f"{path}.type is {shown}, but only text parts are taken")
    if not isinstance(part.get("text"), str):
        _refuse(f"{path}.text", f"{path}.text must be a string", "invalid_type")
    for name, value in part.items():
        if name not in ("type", "text") and value is not None:
            _refuse(f"{path}.{name[:64]}", f"There is no field {path}.{name[:64]}", "unknown_field")
    return part["text"]


def _check_tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Calls of an earlier turn. Templates want the arguments as an object, the API sends them as JSON text."""
    if not isinstance(calls, list):
        _refuse(path, f"{path} must be a list", "invalid_type")
    checked = []
    for index, call in enumerate(calls):
        here = f"{path}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _refuse(here, f"{here} must be an object with function.name and function.arguments", "invalid_type")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _decode_arguments(arguments, f"{here}.function.arguments")
        if not isinstance(arguments, dict):
            where = f"{here}.function.arguments"
            _refuse(where, f"{where} must be a JSON object", "invalid_type")
        checked.append({**call, "function": {"name": function["name"], "arguments": arguments}})
    return checked


def _decode_arguments(text: str, path: str) -> Any:
    try:
        return msgspec.json.decode(text) if text else {}
    except (msgspec.MsgspecError, RecursionError):
        _refuse(path, f"{path} is not valid JSON")


def _refuse(param: str, message: str, code: str = "invalid_value") -> NoReturn:
    end = "" if message.endswith(("?", ".")) else "."
    raise InvalidRequestError(message + end, param=param, code=code)
