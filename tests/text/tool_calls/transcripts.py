"""Outputs in the public formats, written for these tests, and what they are made of."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from octavo.text.tool_calls.events import ArgumentsDelta, CallEnded, CallStarted, Content, Event
from octavo.text.tool_calls.formats import get_parser
from octavo.text.tool_calls.parser import ToolCallParser

TOOL_NAMES = ("get_weather", "add", "f-2")
FORMATS = ("hermes", "llama3_json", "pythonic", "mistral", "json")

# What a stranger's text may be full of.
HOSTILE = [
    "<tool_call>",
    "</tool_call>",
    "<tool_",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "```json\n",
    "```",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    '{"name": "add", "arguments": {',
    '{"name": "add", "parameters": {}}',
    "[add(a=1)",
    "add(",
    ";",
    ",",
    "\n",
    " ",
    "é",
    "😀",
    "null",
    "'",
]


@dataclass
class Parsed:
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def decoded(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def join(events: list[Event]) -> Parsed:
    """Checks the order of events on the way: started, deltas, ended, one call after the other."""
    parsed = Parsed()
    is_open = False
    for event in events:
        if isinstance(event, Content):
            assert not is_open
            parsed.content += event.text
        elif isinstance(event, CallStarted):
            assert not is_open
            assert event.index == len(parsed.calls)
            assert event.call_id
            parsed.calls.append((event.name, ""))
            is_open = True
        elif isinstance(event, ArgumentsDelta):
            assert is_open
            assert event.index == len(parsed.calls) - 1
            name, arguments = parsed.calls[-1]
            parsed.calls[-1] = (name, arguments + event.text)
        elif isinstance(event, CallEnded):
            assert is_open
            assert event.index == len(parsed.calls) - 1
            is_open = False
    assert not is_open
    return parsed


def parse(format_name: str, text: str, names: tuple[str, ...] | None = TOOL_NAMES) -> Parsed:
    return parse_chunks(get_parser(format_name, names), [text])


def parse_chunks(parser: ToolCallParser, chunks: list[str]) -> Parsed:
    events: list[Event] = []
    for chunk in chunks:
        events += parser.push(chunk)
    return join(events + parser.finish())


def write(format_name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The calls as a model of the format writes them."""
    if format_name == "pythonic":
        return f"[{', '.join(_python_call(name, arguments) for name, arguments in calls)}]"
    key = "parameters" if format_name == "llama3_json" else "arguments"
    objects = [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]
    if format_name == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    if format_name == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    return ("; " if format_name == "llama3_json" else "\n").join(objects)


def _python_call(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
