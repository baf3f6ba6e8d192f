"""Turns a `GrammarSpec` into the grammar text of llguidance, and checks it at the door.

Everything a stranger can send ends here in a grammar or in an InvalidRequestError, in bounded time: sizes are checked
before the library sees them, and the library runs under limits of its own.
"""

from __future__ import annotations

import functools
import json
import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from octavo.core.interfaces import GrammarSpec
from octavo.errors import InvalidRequestError
from octavo.structured.json_text import read_json
from octavo.structured.large_stack import run_on_large_stack
from octavo.structured.schema import normalize_schema

MAX_TEXT_BYTES = 256 * 1024
MAX_REGEX_LENGTH = 8192
MAX_LARK_LENGTH = 32 * 1024
MAX_CHOICES = 1000
MAX_CHOICES_LENGTH = 64 * 1024

# Between two parts of a JSON text: nothing, one space, or one line break with an indent. No more, so that a model
# cannot fill its answer with white space.
WHITESPACE = r"( |\n {0,16})"

# Every token that continues the text is allowed, not only the longest: then the tokenizer is not needed. It stands
# last, so that line numbers in messages are those of the user's grammar.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'

_JSON_OPTIONS = {"whitespace_pattern": WHITESPACE}

LIMITS = LLParserLimits(
    max_items_in_row=3000,
    initial_lexer_fuel=400_000,
    step_lexer_fuel=100_000,
    step_max_items=30_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)

# Grammars that only our own code writes, of the tools; no field of a request leads here. The first one's text is
# calls from its beginning to its end, the second's has free text besides. They may name tokens by id, and the schemas
# in them are read like any other.
TOOL_CALLS = "tool_calls"
TEXT_AND_TOOL_CALLS = "text_and_tool_calls"
# And one of theirs around another constraint, which it names @text: {"lark": "...", "text": {"kind": ..., "text": ...}}
COMPOSED = "composed"

_CACHE_SIZE = 256
_NUM_TRIED_BYTES = 32
_PRINTABLE = sum(1 << byte for byte in range(0x21, 0x100))
_MAX_MESSAGE_LENGTH = 300
_NOISE = re.compile(r"<non-verbose/>|failed to compile JSON schema: |^at \d+\(\d+\): (?=failed|invalid regex)")
_IGNORED_ATTRIBUTE = re.compile(r"\[[^\]\"\n]*\b(temperature|max_tokens|capture)\b[^\]\"\n]*\]")
_DIRECTIVE = re.compile(r"^\s*%llguidance\b", re.MULTILINE)
_STRING_OR_REGEX = re.compile(r'"(\\.|[^"\\\n])*"i?|/(\\.|[^/\\\n])+/[a-z]*|//[^\n]*')


def validate_spec(spec: GrammarSpec, param: str = "response_format") -> None:
    """Compile the spec and look at what may come first. Takes up to some 100 ms, so it belongs in a worker thread.

    param: the API's field that an error names
    Raises InvalidRequestError(code="invalid_grammar").
    """
    message = _find_fault(spec, param)
    if message is not None:
        raise InvalidRequestError(message, param=param, code="invalid_grammar")


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _find_fault(spec: GrammarSpec, param: str) -> str | None:
    try:
        text = grammar_text(spec, param)
    except InvalidRequestError as error:
        return error.message
    if spec.kind in _OWN_KINDS:
        text = _replace_token_ids(text)
    matcher = compile_grammar(text, _byte_tokenizer())
    # A warning tells of something that is not enforced.
    message = matcher.get_error() or next(iter(matcher.get_grammar_warnings()), None) or _try_out(matcher)
    return None if message is None else explain(spec, message)


def _try_out(matcher: LLMatcher) -> str | None:
    """Go a few bytes into the text: some faults show only where a mask is computed."""
    for _ in range(_NUM_TRIED_BYTES):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & _PRINTABLE
        if matcher.is_error():
            return matcher.get_error()
        if not allowed or not matcher.consume_token((allowed & -allowed).bit_length() - 1):
            break
    return matcher.get_error() or None


@functools.lru_cache(maxsize=_CACHE_SIZE)
def grammar_text(spec: GrammarSpec, param: str = "response_format") -> str:
    """What `LLMatcher` takes. Raises InvalidRequestError for what is refused before it is compiled."""
    if spec.kind != COMPOSED:
        return LLMatcher.grammar_from_lark(_lark(spec, param))
    parts = json.loads(spec.text)
    outer = GrammarSpec(TEXT_AND_TOOL_CALLS, parts["lark"])
    named = {"answer": _lark(outer, param), "text": _lark(GrammarSpec(**parts["text"]), param)}
    return json.dumps({"grammars": [{"name": name, "lark_grammar": lark} for name, lark in named.items()]})


def _lark(spec: GrammarSpec, param: str) -> str:
    _check_length(spec.text.encode("utf-8", "surrogatepass"), MAX_TEXT_BYTES, "bytes", spec, param)
    if spec.kind == "json_object":
        lark = _json_lark({"type": "object"})
    elif spec.kind == "json_schema":
        lark = _json_lark(normalize_schema(read_json(spec.text, "The JSON schema", param), param))
    elif spec.kind == "regex":
        _check_length(spec.text, MAX_REGEX_LENGTH, "characters", spec, param)
        if not spec.text:
            raise _invalid("The regex is empty.", param)
        # The library knows how to write any pattern between slashes.
        lark = json.loads(LLMatcher.grammar_from_regex(spec.text))["grammars"][0]["lark_grammar"]
    elif spec.kind == "choice":
        lark = _choice_lark(spec, param)
    elif spec.kind == "lark":
        _check_length(spec.text, MAX_LARK_LENGTH, "characters", spec, param)
        lark = _user_lark(spec.text, param)
    elif spec.kind in _TOOL_KINDS:
        lark = _tools_lark(spec.text, param)
    else:
        raise _invalid(f"There is no grammar of the kind {spec.kind!r}.", param)
    return lark + _NO_FORCING


def compile_grammar(text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Never raises: a matcher tells its error itself. text: of `grammar_text`"""
    return run_on_large_stack(lambda: LLMatcher(tokenizer, text, log_level=0, limits=LIMITS))


def explain(spec: GrammarSpec, message: str) -> str:
    """The library's message as a sentence."""
    message = " ".join(_NOISE.sub("", message.split("\n   1 | ")[0]).split()).rstrip(".")
    if len(message) > _MAX_MESSAGE_LENGTH:
        message = message[:_MAX_MESSAGE_LENGTH] + "..."
    if "oneOf constraints are not supported" in message:
        message = "it cannot be shown that the branches of a oneOf exclude each other; use anyOf"
    elif "NoExtension" in message:
        message = "no text satisfies it"
    elif is_limit(message):
        message = f"it is too large or too complex ({message})"
    verb = "cannot" if spec.kind not in _OWN_KINDS else "together cannot"
    return f"{_NAMES.get(spec.kind, 'The grammar')} {verb} be used: {message}."


def is_limit(message: str) -> bool:
    """The library gave up at one of its limits."""
    return _LIMIT.search(message) is not None


_LIMIT = re.compile(r"fuel|too (big|large|many)|Too many|too complex|limit|max is")
_NAMES = {
    "json_schema": "The JSON schema",
    "json_object": "The JSON object",
    "regex": "The regex",
    "choice": "The list of choices",
    "lark": "The grammar",
    TOOL_CALLS: "The tools' schemas",
    TEXT_AND_TOOL_CALLS: "The tools' schemas",
    COMPOSED: "The tools' schemas and the answer's form",
}
_TOOL_KINDS = (TOOL_CALLS, TEXT_AND_TOOL_CALLS)
_OWN_KINDS = (*_TOOL_KINDS, COMPOSED)
_TOKEN_ID_OR_STRING = re.compile(r'<\[\d+\]>|"(\\.|[^"\\\n])*"')
_SCHEMA_LINE = re.compile(r"^(\w+: %json )(.*)$", re.MULTILINE)


def _json_lark(schema: dict[str, object]) -> str:
    return "start: %json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS})


def _choice_lark(spec: GrammarSpec, param: str) -> str:
    choices = read_json(spec.text, "The list of choices", param)
    if not isinstance(choices, list) or not choices:
        raise _invalid("The choices must be a list of strings that is not empty.", param)
    if len(choices) > MAX_CHOICES:
        raise _invalid(f"There are {len(choices)} choices; the limit is {MAX_CHOICES}.", param)
    _check_length(spec.text, MAX_CHOICES_LENGTH, "characters", spec, param)
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise _invalid(f"Choice {index} is {choice!r}; it must be a string that is not empty.", param)
        if any(0xD800 <= ord(character) < 0xE000 for character in choice):
            raise _invalid(f"Choice {index} is {choice!r}, which is not Unicode text.", param)
    # One terminal: the alternatives share their beginnings.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in dict.fromkeys(choices))


def _user_lark(text: str, param: str) -> str:
    if "::=" in text:
        try:
            text = any_to_lark(text)
        except Exception as error:  # the converter raises bare Exception
            raise _invalid(f"The grammar cannot be read as GBNF: {error}.", param) from error
        text = _DIRECTIVE.sub("//", text)
    bare = _STRING_OR_REGEX.sub('""', text)
    if _DIRECTIVE.search(bare):
        raise _invalid("The grammar sets options with %llguidance, which is not supported.", param)
    if "<" in bare:
        # The API process has no vocabulary to look them up in, and generated text holds no control tokens.
        raise _invalid("The grammar names tokens in angle brackets, which is not supported.", param)
    attribute = _IGNORED_ATTRIBUTE.search(bare)
    if attribute is not None:
        raise _invalid(f"The grammar uses {attribute[1]!r} in {attribute[0]}, which is not supported.", param)
    return text


def _tools_lark(text: str, param: str) -> str:
    """Every schema with enforced keywords only. What a lenient one asks for in vain is left out of it."""

    def read(match: re.Match[str]) -> str:
        schema = json.loads(match[2])
        options = schema.pop("x-guidance")
        is_lenient = options.pop("lenient")
        try:
            found = normalize_schema(schema, param, is_lenient=is_lenient)
        except InvalidRequestError:
            if not is_lenient:
                raise
            found = {"type": "object"} if schema.get("type") == "object" else {}
        rule = json.dumps({**found, "x-guidance": options})
        return match[1] + rule.replace("::=", "\\u003a:=")  # which would look like a grammar in GBNF

    return _SCHEMA_LINE.sub(read, text)


def _replace_token_ids(text: str) -> str:
    """For the tokenizer of bytes, which has no other ids. text: of `grammar_text`"""
    if text.startswith('{"grammars"'):
        parts = json.loads(text)
        parts["grammars"][0]["lark_grammar"] = _replace_token_ids(parts["grammars"][0]["lark_grammar"])
        return json.dumps(parts)
    return _TOKEN_ID_OR_STRING.sub(lambda match: match[0] if match[0][0] == '"' else "<[255]>", text)


def _check_length(text: str | bytes, limit: int, unit: str, spec: GrammarSpec, param: str) -> None:
    if len(text) > limit:
        raise _invalid(f"{_NAMES.get(spec.kind, 'The grammar')} has {len(text)} {unit}; the limit is {limit}.", param)


def _invalid(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="invalid_grammar")


@functools.lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    """256 tokens of one byte each: enough to find faults that show only when a mask is computed."""
    return LLTokenizer("byte")
