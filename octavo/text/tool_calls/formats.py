"""Which format a model writes its calls in, by name or by its chat template; and the parser for it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from octavo.errors import ConfigError
from octavo.text.tool_calls.json_formats import GenericJsonParser, HermesParser, Llama3JsonParser, MistralParser
from octavo.text.tool_calls.parser import ToolCallParser
from octavo.text.tool_calls.pythonic import PythonicParser

PARSERS: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "pythonic": PythonicParser,
    "mistral": MistralParser,
    "json": GenericJsonParser,
}
# Other names that users of vLLM know.
ALIASES: Mapping[str, str] = {
    "qwen": "hermes",
    "qwen2": "hermes",
    "qwen3": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "generic": "json",
}
# Markers that may be single tokens. Special tokens among them must reach the parser.
MARKERS: Mapping[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "json": ("<tool_call>", "</tool_call>"),
}

# A call in a template's own words to the model: [func_name1(params_name1=...
_PYTHONIC = re.compile(r"\[\s*\w+\(\s*\w+\s*=")


def get_format(name: str) -> str:
    """The format's own name. Raises ConfigError for one we do not have."""
    found = ALIASES.get(name, name)
    if found not in PARSERS:
        known = ", ".join(sorted({*PARSERS, *ALIASES}))
        raise ConfigError(f"There is no tool call parser {name!r}; there are {known}.", option="--tool-call-parser")
    return found


def get_parser(name: str, tool_names: Collection[str] | None = None) -> ToolCallParser:
    """A fresh parser for one answer. Raises ConfigError for a name we do not have."""
    return PARSERS[get_format(name)](tool_names)


def detect_tool_format(chat_template_source: str | None, special_tokens: Collection[str] = ()) -> str:
    """By the markers that the template writes calls with; "json" when it knows none, or there is no template.

    special_tokens decide only for a template that is silent about calls but does take tools.
    """
    source = chat_template_source or ""
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<tool_call>" in source:
        return "hermes"
    if "<|python_start|>" in source or _PYTHONIC.search(source):
        return "pythonic"
    if "<|python_tag|>" in source or ('"parameters"' in source and "<|eot_id|>" in source):
        return "llama3_json"
    if "tools" in source:
        for marker, name in (("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3_json")):
            if marker in special_tokens:
                return name
    return "json"


def find_marker_ids(name: str, special_tokens: Mapping[str, int]) -> frozenset[int]:
    """Special tokens that are markers of the format: the detokenizer must write them out for the parser to see."""
    return frozenset(special_tokens[text] for text in MARKERS[get_format(name)] if text in special_tokens)
