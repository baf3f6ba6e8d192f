"""A grammar (Lark, as llguidance reads it) that lets a model write calls of the request's tools and nothing else.

    required, named   the answer is calls, from its first character to its end
    auto              any text, until a call begins: from there on it is a call of one of the tools

Arguments follow each tool's schema. A schema that the compiler refuses is the client's fault for a strict tool; for
others there is `follows_schemas`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo.errors import InvalidRequestError
from octavo.text.reasoning import ReasoningMarkers
from octavo.text.tool_calls.formats import get_format
from octavo.text.tool_calls.tools import Tool, ToolChoice

# A weak model that must call goes on calling. Nothing real needs more in one answer.
MAX_PARALLEL_CALLS = 16

# What a GrammarSpec calls these grammars: calls and nothing else, and calls with free text besides.
TOOL_CALLS = "tool_calls"
TEXT_AND_TOOL_CALLS = "text_and_tool_calls"

# The spacing that json.dumps writes, which models were trained on; and no room for endless white space.
_SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_PLAIN_KEYS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
_ANY: Mapping[str, Any] = {"type": "object"}
_ANNOTATIONS = frozenset({"$schema", "$id", "title", "description", "default", "examples"})


def tool_grammar(
    format_name: str,
    choice: ToolChoice,
    *,
    parallel: bool = True,
    marker_ids: Mapping[str, int] | None = None,
    reasoning: ReasoningMarkers | None = None,
    starts_inside_reasoning: bool = False,
    follows_schemas: bool = True,
    has_form: bool = False,
) -> tuple[str, str] | None:
    """(kind, text) for a GrammarSpec, or None where nothing is to be constrained.

    That is so for "none", and for "auto" when no tool is strict and calls may be parallel.
    parallel:   False allows one call, and ends with it
    marker_ids: ids of the markers that are single tokens, special or added, such as {"<tool_call>": 151657}
    reasoning:  the model thinks first; starts_inside_reasoning: the prompt has opened it
    follows_schemas: False lets a tool that is not strict have any object as arguments: the way out when the compiler
                     refuses its schema
    has_form:        the answer's text has a grammar of its own, which is to be known as @text: then the answer is
                     either calls or that text; None where there is nothing but that text
    Raises InvalidRequestError for a strict tool whose schema the pythonic format cannot follow, and for has_form where
    the format has no marker.
    """
    if has_form and not choice.must_call:
        return _around_text(
            format_name, choice, parallel, marker_ids, reasoning, starts_inside_reasoning, follows_schemas
        )
    if not choice.may_call:
        return None
    if not choice.must_call and parallel and not any(tool.is_strict for tool in choice.tools):
        return None
    writer = _make_writer(format_name, choice, marker_ids, follows_schemas)
    is_single = choice.mode == "named" or not parallel
    rules = writer.forced_rules(is_single) if choice.must_call else writer.auto_rules(is_single)
    thinking = _thinking_rules(writer, reasoning, starts_inside_reasoning)
    lines = [
        f"start: {'thinking ' if thinking else ''}answer",
        *thinking,
        *rules,
        *writer.shared_rules(),
    ]
    kind = TOOL_CALLS if choice.must_call and not thinking else TEXT_AND_TOOL_CALLS
    return kind, "\n".join(lines) + "\n"


def _around_text(
    format_name: str,
    choice: ToolChoice,
    parallel: bool,
    marker_ids: Mapping[str, int] | None,
    reasoning: ReasoningMarkers | None,
    starts_inside_reasoning: bool,
    follows_schemas: bool,
) -> tuple[str, str] | None:
    if not choice.may_call and reasoning is None:
        return None
    if choice.may_call and issubclass(_WRITERS[get_format(format_name)], _BareWriter):
        raise InvalidRequestError(
            "This model writes calls as JSON without a mark around, so they cannot be told from an answer of a given "
            'form; send tool_choice "none" for an answer of that form, or "required" for calls.',
            param="tool_choice",
            code="unsupported_combination",
        )
    writer = _make_writer(format_name, choice, marker_ids, follows_schemas)
    thinking = _thinking_rules(writer, reasoning, starts_inside_reasoning)
    start = f"start: {'thinking ' if thinking else ''}{'(answer | @text)' if choice.may_call else '@text'}"
    calls = [*writer.forced_rules(not parallel), *writer.shared_rules()] if choice.may_call else []
    return TEXT_AND_TOOL_CALLS, "\n".join([start, *thinking, *calls]) + "\n"


def _make_writer(
    format_name: str, choice: ToolChoice, marker_ids: Mapping[str, int] | None, follows_schemas: bool
) -> _GrammarWriter:
    tools = [tool if tool.is_strict or follows_schemas else replace(tool, parameters=_ANY) for tool in choice.tools]
    return _WRITERS[get_format(format_name)](tools, dict(marker_ids or {}))


class _GrammarWriter:
    """The JSON formats' rules. tool_i is one tool's call without the markup around."""

    opening: Sequence[str] = ()  # literals and markers before the calls of an answer, or before each call
    closing: Sequence[str] = ()
    separator = "\\n"
    arguments_key = "arguments"
    wraps_each_call = True

    def __init__(self, tools: Sequence[Tool], marker_ids: dict[str, int]):
        self._tools = tools
        self._marker_ids = marker_ids

    def forced_rules(self, is_single: bool) -> list[str]:
        call = " ".join([*self._symbols(self.opening), "tool", *self._symbols(self.closing)])
        return [f"answer: {self._repeated('call', is_single)}", f"call: {call}"]

    def auto_rules(self, is_single: bool) -> list[str]:
        """The marker that opens a call is what text may not go on after but with a call."""
        rest = " ".join([*self._symbols(self.opening[1:]), "tool", *self._symbols(self.closing)])
        heads = [f"text_head[lazy]: TEXT {_literal(self.opening[0])}", f"begun: text_head {rest}"]
        if self.opening[0] in self._marker_ids:
            heads[-1] += f" | TEXT <[{self._marker_ids[self.opening[0]]}]> {rest}"
        answer = "answer: begun | TEXT" if is_single else f"answer: begun{{0,{MAX_PARALLEL_CALLS}}} TEXT"
        return [answer, *heads, "TEXT: /(.|\\n)*/"]

    def shared_rules(self) -> list[str]:
        lines = ["tool: " + " | ".join(f"tool_{index}" for index in range(len(self._tools)))]
        for index, tool in enumerate(self._tools):
            head = f'{{"name": {json.dumps(tool.name)}, "{self.arguments_key}": '
            lines += [f'tool_{index}: {_literal(head)} arguments_{index} "}}"', self._arguments_rule(index, tool)]
        return lines

    def symbol(self, text: str) -> str:
        """Text, or either the text or the one token that it is."""
        token_id = self._marker_ids.get(text)
        return _literal(text) if token_id is None else f"({_literal(text)} | <[{token_id}]>)"

    def _symbols(self, texts: Sequence[str]) -> list[str]:
        return [self.symbol(text) for text in texts]

    def _repeated(self, rule: str, is_single: bool) -> str:
        if is_single:
            return rule
        return f'{rule} ("{self.separator}" {rule}){{0,{MAX_PARALLEL_CALLS - 1}}}'

    def _arguments_rule(self, index: int, tool: Tool) -> str:
        return f"arguments_{index}: %json {_schema_text(tool.parameters, tool.is_strict)}"


class _HermesWriter(_GrammarWriter):
    opening = ("<tool_call>", "\n")
    closing = ("\n", "</tool_call>")


class _BareWriter(_GrammarWriter):
    """No marker: a call begins where an object names one of the tools."""

    def auto_rules(self, is_single: bool) -> list[str]:
        lines = []
        for index, tool in enumerate(self._tools):
            head = f'/\\{{[ \\n\\t]*"name"[ \\n\\t]*:[ \\n\\t]*"{tool.name}"/'
            lines += [
                f"text_head_{index}[lazy]: TEXT {head}",
                f'begun_{index}: text_head_{index} ", \\"{self.arguments_key}\\": " arguments_{index} "}}"',
            ]
        begun = "begun: " + " | ".join(f"begun_{index}" for index in range(len(self._tools)))
        answer = "answer: begun | TEXT" if is_single else f"answer: begun{{0,{MAX_PARALLEL_CALLS}}} TEXT"
        return [answer, begun, *lines, "TEXT: /(.|\\n)*/"]


class _GenericWriter(_BareWriter):
    pass


class _Llama3Writer(_BareWriter):
    arguments_key = "parameters"
    separator = "; "


class _MistralWriter(_GrammarWriter):
    """A list after the marker; a tokenizer that has [ARGS] belongs to a model that writes the newer form."""

    def __init__(self, tools: Sequence[Tool], marker_ids: dict[str, int]):
        super().__init__(tools, marker_ids)
        self._is_newer = "[ARGS]" in marker_ids

    def forced_rules(self, is_single: bool) -> list[str]:
        marker = self.symbol("[TOOL_CALLS]")
        if self._is_newer:
            return [f"answer: call{'' if is_single else f'{{1,{MAX_PARALLEL_CALLS}}}'}", f"call: {marker} tool"]
        return [f"answer: {marker} list", self._list_rule(is_single)]

    def auto_rules(self, is_single: bool) -> list[str]:
        rest = "tool" if self._is_newer else "list"
        rule = f"begun: text_head {rest}"
        if "[TOOL_CALLS]" in self._marker_ids:
            rule += f" | TEXT <[{self._marker_ids['[TOOL_CALLS]']}]> {rest}"
        more = not is_single and self._is_newer
        answer = f"answer: begun{{0,{MAX_PARALLEL_CALLS}}} TEXT" if more else "answer: begun | TEXT"
        lines = [answer, rule, 'text_head[lazy]: TEXT "[TOOL_CALLS]"', "TEXT: /(.|\\n)*/"]
        return lines if self._is_newer else [*lines, self._list_rule(is_single)]

    def shared_rules(self) -> list[str]:
        if not self._is_newer:
            return super().shared_rules()
        lines = ["tool: " + " | ".join(f"tool_{index}" for index in range(len(self._tools)))]
        for index, tool in enumerate(self._tools):
            lines.append(f"tool_{index}: {_literal(tool.name)} {self.symbol('[ARGS]')} arguments_{index}")
            lines.append(self._arguments_rule(index, tool))
        return lines

    def _list_rule(self, is_single: bool) -> str:
        return f'list: " "? "[" {self._repeated("tool", is_single)} "]"'

    separator = ", "


class _PythonicWriter(_GrammarWriter):
    separator = ", "

    def forced_rules(self, is_single: bool) -> list[str]:
        return [f'answer: "[" {self._repeated("tool", is_single)} "]"']

    def auto_rules(self, is_single: bool) -> list[str]:
        lines = []
        for index, tool in enumerate(self._tools):
            lines.append(f"text_head_{index}[lazy]: TEXT /\\[{tool.name}\\(/")
            lines.append(f"begun_{index}: text_head_{index} keywords_{index}")
        more = "" if is_single else f' (", " tool){{0,{MAX_PARALLEL_CALLS - 1}}}'
        begun = " | ".join(f"begun_{index}" for index in range(len(self._tools)))
        return [f'answer: begun{more} "]" | TEXT', f"begun: {begun}", *lines, "TEXT: /(.|\\n)*/"]

    def shared_rules(self) -> list[str]:
        lines = ["tool: " + " | ".join(f"tool_{index}" for index in range(len(self._tools)))]
        for index, tool in enumerate(self._tools):
            lines.append(f"tool_{index}: {_literal(tool.name + '(')} keywords_{index}")
            lines += self._keyword_rules(index, tool)
        return lines

    def _keyword_rules(self, index: int, tool: Tool) -> list[str]:
        """Keywords in the schema's order; first_n: none has come yet, later_n: one has, so a comma comes first."""
        schema = tool.parameters
        unknown = sorted(set(schema) - _PLAIN_KEYS - _ANNOTATIONS)
        if tool.is_strict and unknown:
            raise InvalidRequestError(
                f"The tool {tool.name!r} is strict, but this model writes calls as Python does, where {unknown[0]} at "
                "the top of a schema cannot be followed; use properties and required there, or leave strict out.",
                param="tools",
                code="unsupported_schema",
            )
        properties: Mapping[str, Any] = schema.get("properties", {})
        names = [name for name in properties if name.isidentifier()]
        required = schema.get("required", ())
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        lines = [f'keywords_{index}: first_{index}_0 ")"']
        for position, name in enumerate(names):
            item, following = f"item_{index}_{position}", f"later_{index}_{position + 1}"
            skip_first = "" if name in required else f" | first_{index}_{position + 1}"
            skip_later = "" if name in required else f" | {following}"
            part = properties[name]
            value = _schema_text({**part, **shared} if isinstance(part, Mapping) else {}, tool.is_strict)
            lines += [
                f"first_{index}_{position}: {item} {following}{skip_first}",
                f'later_{index}_{position}: ", " {item} {following}{skip_later}',
                f"{item}: {_literal(name + '=')} value_{index}_{position}",
                f"value_{index}_{position}: %json {value}",
            ]
        return [*lines, f'first_{index}_{len(names)}: ""', f'later_{index}_{len(names)}: ""']


_WRITERS: Mapping[str, type[_GrammarWriter]] = {
    "hermes": _HermesWriter,
    "llama3_json": _Llama3Writer,
    "pythonic": _PythonicWriter,
    "mistral": _MistralWriter,
    "json": _GenericWriter,
}


def _thinking_rules(writer: _GrammarWriter, reasoning: ReasoningMarkers | None, starts_inside: bool) -> list[str]:
    if reasoning is None:
        return []
    ends = [f"thought[lazy]: THOUGHT {_literal(reasoning.end)}"]
    rule = "thought"
    if reasoning.end in writer._marker_ids:
        rule = f"(thought | THOUGHT <[{writer._marker_ids[reasoning.end]}]>)"
    opened = f"{rule} /[ \\n]{{0,4}}/"
    if starts_inside:
        return [f"thinking: {opened}", *ends, "THOUGHT: /(.|\\n)*/"]
    start = writer.symbol(reasoning.start)
    return [f"thinking: ({start} {opened})?", *ends, "THOUGHT: /(.|\\n)*/"]


def _schema_text(schema: Mapping[str, Any], is_strict: bool) -> str:
    """On one line. The compiler reads it again: `lenient` tells it to leave out what cannot be enforced."""
    return json.dumps({**schema, "x-guidance": {**_SPACING, "lenient": not is_strict}})


def _literal(text: str) -> str:
    return json.dumps(text)
