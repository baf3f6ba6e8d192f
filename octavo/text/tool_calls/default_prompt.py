"""Tools for models whose template knows none: a system message lists them, and calls are plain JSON.

The format is "json": one object a line with a name and arguments. Earlier calls are written the way they were asked
for, and results come as user messages, because such templates know the roles system, user and assistant only.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.text.tool_calls.tools import ToolChoice

INTRODUCTION = "You can call these functions. Each line describes one as JSON:"
HOW_TO_CALL = (
    "To call a function, answer with nothing but a JSON object on a line of its own:\n"
    '{"name": "the function\'s name", "arguments": {"parameter": "value"}}'
)
SEVERAL = "To call several, write one such line for each."
ONE = "Call at most one function."
WHEN = "When no function is needed, answer in plain words."
MUST = "You must call a function now."
RESULT = "Result of {name}:\n{content}"


def tools_message(choice: ToolChoice, parallel: bool = True) -> str:
    """The text that tells a model of its tools."""
    lines = [INTRODUCTION, *(json.dumps(tool.as_dict()["function"], ensure_ascii=False) for tool in choice.tools), ""]
    lines += [HOW_TO_CALL, SEVERAL if parallel and choice.mode != "named" else ONE]
    lines.append(MUST if choice.must_call else WHEN)
    return "\n".join(lines)


def write_tools_into(
    messages: Sequence[Mapping[str, Any]], choice: ToolChoice, parallel: bool = True, takes_system: bool = True
) -> list[dict[str, Any]]:
    """Messages with the roles system, user and assistant only, the tools in the first one, which is the system's.

    takes_system: False puts them before the first user message's text, for templates that refuse or lose the system's
    Contents must be texts or lists of text parts. Results that follow each other become one user message.
    """
    names: dict[str, str] = {}
    plain: list[dict[str, Any]] = []
    is_result = False
    for message in messages:
        copy = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        was_result, is_result = is_result, message.get("role") == "tool"
        if is_result:
            name = names.get(str(message.get("tool_call_id")), "the function")
            text = RESULT.format(name=name, content=_text(message.get("content")))
            if was_result:
                plain[-1]["content"] += "\n\n" + text
                continue
            copy = {"role": "user", "content": text}
        elif message.get("tool_calls"):
            lines = [_text(message.get("content"))] if message.get("content") else []
            for call in message["tool_calls"]:
                names[str(call.get("id"))] = call["function"]["name"]
                lines.append(_write_call(call["function"]))
            copy["content"] = "\n".join(lines)
        plain.append(copy)
    if not choice.may_call:
        return plain
    told = tools_message(choice, parallel)
    if plain and plain[0].get("role") in ("system", "developer"):
        plain[0]["content"] = _text(plain[0].get("content")) + "\n\n" + told
    elif takes_system:
        plain.insert(0, {"role": "system", "content": told})
    elif plain and plain[0].get("role") == "user":
        plain[0]["content"] = told + "\n\n" + _text(plain[0].get("content"))
    else:
        plain.insert(0, {"role": "user", "content": told})
    return plain


def _write_call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


def _text(content: Any) -> str:
    if isinstance(content, (list, tuple)):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content or ""
