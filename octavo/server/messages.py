"""Chat messages as they are sent, made into the plain dicts that a chat template takes.

What a template does with them is `octavo.text`'s matter; here only what was sent is checked.
"""

from __future__ import annotations

import difflib
from typing import Any, NoReturn

import msgspec

from octavo.errors import InvalidRequestError
from octavo.text.tool_calls.history import check_tool_history

# developer is OpenAI's newer word for system; `text.chat_template` knows which of them the model's template takes.
_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal"})
# Other words for the same: vLLM's newer one.
_ALIASES = {"reasoning": "reasoning_content"}
_ASSISTANT_FIELDS = ("tool_calls", "reasoning_content", "refusal")
# What an answer of an earlier turn carries and a client sends back with it; these values, like null, say nothing.
_NOTHING: dict[str, Any] = {
    "annotations": [],
    "tool_calls": [],
    "refusal": "",
    "reasoning_content": "",
    "reasoning": "",
}
_UNSUPPORTED = frozenset({"annotations", "audio", "function_call"})
# Marks for caches of other providers, which change no answer: prefixes are cached here without being asked for.
_LABELS = frozenset({"cache_control"})
_CALL_FIELDS = ("id", "type", "function", "index")
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
    checked = [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    check_tool_history(checked)
    return checked


def _check_message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        _refuse(path, f"{path} must be an object with role and content", "invalid_type")
    fields = _read_fields(message, path)
    role = _check_role(fields, path)
    for name in _ASSISTANT_FIELDS:
        if name in fields and role != "assistant":
            _refuse(f"{path}.{name}", f"{path}.{name} belongs to an assistant message, but role is {role}")
    for name in ("name", "tool_call_id", "reasoning_content", "refusal"):
        if name in fields and not isinstance(fields[name], str):
            _refuse(f"{path}.{name}", f"{path}.{name} must be a string", "invalid_type")
    checked: dict[str, Any] = {"role": role, "content": _check_content(fields, role, path)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if name in fields:
            checked[name] = fields[name]
    if "tool_calls" in fields:
        checked["tool_calls"] = _check_tool_calls(fields["tool_calls"], f"{path}.tool_calls")
    return checked


def _read_fields(message: dict[str, Any], path: str) -> dict[str, Any]:
    """Those that say something, by their first names."""
    fields: dict[str, Any] = {}
    for name, value in message.items():
        if name in _LABELS or value is None or (name in _NOTHING and value == _NOTHING[name]):
            continue
        if name in _UNSUPPORTED:
            hint = "use tool_calls" if name == "function_call" else "leave it out"
            _refuse(f"{path}.{name}", f"{path}.{name} is not supported; {hint}", "unsupported_field")
        if name in _ALIASES:
            fields.setdefault(_ALIASES[name], value)
        elif name in _FIELDS:
            fields[name] = value
        else:
            nearest = difflib.get_close_matches(name[:64], sorted(_FIELDS), n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known here: {', '.join(sorted(_FIELDS))}"
            _refuse(f"{path}.{name[:64]}", f"There is no field {path}.{name[:64]}; {hint}", "unknown_field")
    return fields


def _check_role(fields: dict[str, Any], path: str) -> str:
    if "role" not in fields:
        _refuse(f"{path}.role", f"{path}.role is missing; it is one of {', '.join(_ROLES)}", "missing_field")
    role = fields["role"]
    if not isinstance(role, str) or role not in _ROLES:
        shown = msgspec.json.encode(role).decode()[:64]
        hint = "; results of calls have the role tool" if role == "function" else ""
        _refuse(f"{path}.role", f"{path}.role is {shown}, but it must be one of {', '.join(_ROLES)}{hint}")
    return role


def _check_content(fields: dict[str, Any], role: str, path: str) -> str:
    content = fields.get("content")
    if content is None:
        # A turn that only called tools has no text; templates add strings, so it becomes an empty one. A refusal is
        # what the assistant said, too.
        if role == "assistant":
            return fields.get("refusal", "")
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
        if name not in ("type", "text") and name not in _LABELS and value is not None:
            _refuse(f"{path}.{name[:64]}", f"There is no field {path}.{name[:64]}", "unknown_field")
    return part["text"]


def _check_tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """The shape of calls of an earlier turn; `check_tool_history` looks into them."""
    if not isinstance(calls, list):
        _refuse(path, f"{path} must be a list of calls", "invalid_type")
    checked = []
    for index, call in enumerate(calls):
        here = f"{path}[{index}]"
        if not isinstance(call, dict):
            _refuse(here, f"{here} must be an object with id, type and function", "invalid_type")
        for name, value in call.items():
            if name not in _CALL_FIELDS and value:
                known = ", ".join(_CALL_FIELDS)
                _refuse(f"{here}.{name[:64]}", f"There is no field {here}.{name[:64]}; known: {known}", "unknown_field")
        checked.append({name: call[name] for name in ("id", "type", "function") if call.get(name) is not None})
    return checked


def _refuse(param: str, message: str, code: str = "invalid_value") -> NoReturn:
    end = "" if message.endswith(("?", ".")) else "."
    raise InvalidRequestError(message + end, param=param, code=code)
