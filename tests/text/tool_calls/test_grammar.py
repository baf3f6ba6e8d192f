"""The grammar of calls: whatever is sampled under it parses into calls whose arguments follow the schema."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from octavo.core.interfaces import GrammarSpec
from octavo.errors import InvalidRequestError
from octavo.structured.compile import validate_spec
from octavo.structured.grammar import TokenGrammarFactory, make_grammar_factory
from octavo.structured.vocabulary import vocabulary_of
from octavo.text.reasoning import FORMATS as REASONING
from octavo.text.tokenizer import Tokenizer, tokenizer_from_gguf
from octavo.text.tool_calls.grammar import tool_grammar
from octavo.text.tool_calls.tools import ToolChoice, check_tool_choice, check_tools
from octavo.weights.gguf import GGUFFile
from tests.text.tool_calls.transcripts import FORMATS, parse

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 9},
        "children": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/node"}},
    },
    "required": ["value"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "tree": {"$ref": "#/$defs/node"}},
    "required": ["tree"],
    "additionalProperties": False,
    "$defs": {"node": NODE},
}
TOOLS = check_tools(
    [
        {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": WEATHER}},
        {"type": "function", "function": {"name": "get", "strict": True, "parameters": TREE}},
        {"type": "function", "function": {"name": "now"}},
    ]
)
SCHEMAS: Mapping[str, Any] = {tool.name: tool.parameters for tool in TOOLS}
NAMED = {"type": "function", "function": {"name": "get"}}
GOOD = '{"name": "get_weather", "arguments": {"city": "Rome", "unit": "C"}}'
BAD = '{"name": "get_weather", "arguments": {"city": "Rome", "unit": "K"}}'


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(smollm2_gguf).metadata)


@pytest.fixture(scope="module")
def factory(tokenizer: Tokenizer) -> TokenGrammarFactory:
    return make_grammar_factory(vocabulary_of(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids))


def make_spec(format_name: str, choice: Any, **options: Any) -> GrammarSpec:
    grammar = tool_grammar(format_name, check_tool_choice(choice, TOOLS), **options)
    assert grammar is not None
    return GrammarSpec(*grammar)


def sample(factory: TokenGrammarFactory, tokenizer: Tokenizer, spec: GrammarSpec, rng: random.Random) -> str | None:
    """Random tokens under the mask, short ones preferred so that texts end; None when it does not in time."""
    grammar = factory(spec)
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    token_ids: list[int] = []
    for _ in range(400):
        grammar.write_mask(mask)
        allowed = np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]
        if grammar.is_complete or (grammar.may_end and rng.random() < 0.3):
            return tokenizer.decode(token_ids)
        drawn = [int(allowed[rng.randrange(len(allowed))]) for _ in range(6)]
        token_id = min(drawn, key=lambda i: (i in tokenizer.eos_token_ids, len(tokenizer.token_bytes(i))))
        if token_id in tokenizer.eos_token_ids:
            return tokenizer.decode(token_ids)
        grammar.accept(token_id)
        token_ids.append(token_id)
    return None


def find_refusal(factory: TokenGrammarFactory, tokenizer: Tokenizer, spec: GrammarSpec, text: str) -> str | None:
    """None when the grammar takes the text as a whole answer, else the text from the first token that it refuses."""
    grammar = factory(spec)
    token_ids = tokenizer.encode_plain(text)
    for position, token_id in enumerate(token_ids):
        try:
            grammar.accept(token_id)
        except ValueError:
            return tokenizer.decode(token_ids[position:])
    return None if grammar.may_end else ""


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(("choice", "parallel"), [("required", True), ("required", False), (NAMED, True)])
def test_what_is_sampled_parses_into_valid_calls(
    factory: TokenGrammarFactory, tokenizer: Tokenizer, format_name: str, choice: Any, parallel: bool
) -> None:
    spec = make_spec(format_name, choice, parallel=parallel)
    validate_spec(spec, "tools")
    rng = random.Random(1)
    texts = [text for text in (sample(factory, tokenizer, spec, rng) for _ in range(12)) if text is not None]
    assert len(texts) >= 6
    for text in texts:
        parsed = parse(format_name, text, tuple(SCHEMAS))
        assert parsed.content == ""
        assert len(parsed.calls) >= 1
        if not parallel or choice is NAMED:
            assert len(parsed.calls) == 1
        for name, arguments in parsed.decoded:
            jsonschema.validate(arguments, SCHEMAS[name])
            assert choice is not NAMED or name == "get"


def in_text(format_name: str, call: str) -> str:
    return {
        "hermes": f"Hi <b>\n<tool_call>\n{call}\n</tool_call>",
        "json": f'Hi {{"name": "Bob"}}\n{call}',
        "llama3_json": "Hi " + call.replace("arguments", "parameters"),
        "mistral": f"Hi [TOOL_CALLS] [{call}]",
        "pythonic": 'Hi [1] [get_weather(city="Rome", unit="' + ("C" if call is GOOD else "K") + '")]',
    }[format_name]


@pytest.mark.parametrize("format_name", FORMATS)
def test_auto_lets_text_pass_until_a_call_begins(
    factory: TokenGrammarFactory, tokenizer: Tokenizer, format_name: str
) -> None:
    spec = make_spec(format_name, "auto")
    validate_spec(spec, "tools")
    assert find_refusal(factory, tokenizer, spec, "Plain words, {braces} [lists] <tags>.") is None
    assert find_refusal(factory, tokenizer, spec, in_text(format_name, GOOD)) is None
    refused = find_refusal(factory, tokenizer, spec, in_text(format_name, BAD))
    assert refused is not None
    assert refused.startswith("K")


@pytest.mark.parametrize("format_name", FORMATS)
def test_without_parallel_calls_the_answer_ends_with_the_call(
    factory: TokenGrammarFactory, tokenizer: Tokenizer, format_name: str
) -> None:
    spec = make_spec(format_name, "auto", parallel=False)
    call = in_text(format_name, GOOD)
    assert find_refusal(factory, tokenizer, spec, call) is None
    assert find_refusal(factory, tokenizer, spec, f"{call}\n{call}") is not None


def test_thinking_comes_before_the_call(factory: TokenGrammarFactory, tokenizer: Tokenizer) -> None:
    call = f"<tool_call>\n{GOOD}\n</tool_call>"
    think = REASONING["think"]
    spec = make_spec("hermes", "required", reasoning=think)
    assert find_refusal(factory, tokenizer, spec, f"<think>\nso {{\n</think>\n\n{call}") is None
    assert find_refusal(factory, tokenizer, spec, call) is None
    assert find_refusal(factory, tokenizer, spec, f"so</think>{call}") is not None
    inside = make_spec("hermes", "required", reasoning=think, starts_inside_reasoning=True)
    assert find_refusal(factory, tokenizer, inside, f"so</think>\n{call}") is None


def test_nothing_is_constrained_without_need() -> None:
    free = check_tools([{"type": "function", "function": {"name": "f"}}])
    assert tool_grammar("json", check_tool_choice("auto", free)) is None
    assert tool_grammar("json", check_tool_choice("none", TOOLS)) is None
    assert tool_grammar("json", check_tool_choice("auto", free), parallel=False) is not None


def make_tool(is_strict: bool, **schema: Any) -> ToolChoice:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    function = {"name": "f", "strict": is_strict, "parameters": parameters}
    return check_tool_choice("required", check_tools([{"type": "function", "function": function}]))


def test_what_cannot_be_enforced_is_refused_for_a_strict_tool_and_left_out_for_others(
    factory: TokenGrammarFactory, tokenizer: Tokenizer
) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    strict, loose = tool_grammar("json", make_tool(True, **schema)), tool_grammar("json", make_tool(False, **schema))
    assert strict is not None
    assert loose is not None
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        validate_spec(GrammarSpec(*strict), "tools")
    validate_spec(GrammarSpec(*loose), "tools")
    assert find_refusal(factory, tokenizer, GrammarSpec(*loose), '{"name": "f", "arguments": {"a": [1, 1]}}') is None
    refused = find_refusal(factory, tokenizer, GrammarSpec(*loose), '{"name": "f", "arguments": {"a": "b"}}')
    assert refused is not None
    assert refused.lstrip().startswith('"')


def test_a_schema_that_cannot_be_compiled_can_be_let_go_for_a_tool_that_is_not_strict() -> None:
    choice = make_tool(False, type="string", pattern="(?=a)")
    followed, free = tool_grammar("json", choice), tool_grammar("json", choice, follows_schemas=False)
    assert followed is not None
    assert free is not None
    with pytest.raises(InvalidRequestError, match="together cannot be used"):
        validate_spec(GrammarSpec(*followed), "tools")
    validate_spec(GrammarSpec(*free), "tools")


def test_markers_that_are_tokens_can_be_named_by_id() -> None:
    grammar = tool_grammar(
        "mistral", check_tool_choice("required", TOOLS), marker_ids={"[TOOL_CALLS]": 5, "[ARGS]": 32}
    )
    assert grammar is not None
    assert "<[5]>" in grammar[1]
    assert '"get_weather" ("[ARGS]" | <[32]>)' in grammar[1]


def test_what_looks_like_gbnf_in_a_schema_is_data() -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": ["x ::= y"]}}, "required": ["a"]}
    tools = check_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    grammar = tool_grammar("json", check_tool_choice("required", tools))
    assert grammar is not None
    validate_spec(GrammarSpec(*grammar), "tools")


def test_a_marker_s_id_is_a_token_and_no_text(factory: TokenGrammarFactory, tokenizer: Tokenizer) -> None:
    marker = tokenizer.special_tokens["<|im_start|>"]
    free = make_tool(False, type="integer")
    grammar = tool_grammar("hermes", free, marker_ids={"<tool_call>": marker})
    assert grammar is not None
    validate_spec(GrammarSpec(*grammar), "tools")
    state = factory(GrammarSpec(*grammar))
    state.accept(marker)
    for token_id in tokenizer.encode_plain('\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'):
        state.accept(token_id)
    assert state.may_end


def test_a_client_s_own_grammar_names_no_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="angle brackets"):
        validate_spec(GrammarSpec("lark", "start: <[1]>"))


def compose(grammar: tuple[str, str] | None, kind: str, text: str) -> GrammarSpec:
    assert grammar is not None
    spec = GrammarSpec("composed", json.dumps({"lark": grammar[1], "text": {"kind": kind, "text": text}}))
    validate_spec(spec, "tools")
    return spec


def test_text_of_a_form_comes_after_the_reasoning(factory: TokenGrammarFactory, tokenizer: Tokenizer) -> None:
    none = check_tool_choice(None, ())
    assert tool_grammar("json", none, has_form=True) is None
    think = REASONING["think"]
    for starts_inside, opening in ((True, ""), (False, "<think>")):
        grammar = tool_grammar("hermes", none, reasoning=think, starts_inside_reasoning=starts_inside, has_form=True)
        for kind, text, right, wrong in (
            ("regex", "a+b", "aab", "abb"),
            ("choice", '["yes", "no"]', "no", "nay"),
            ("json_object", "", '{"a": 1}', "[1]"),
            ("lark", 'start: thinking "!"\nthinking: "deep"', "deep!", "deep?"),
        ):
            spec = compose(grammar, kind, text)
            assert find_refusal(factory, tokenizer, spec, f"{opening}so {{\n</think>\n\n{right}") is None
            assert find_refusal(factory, tokenizer, spec, f"{opening}so {{\n</think>\n\n{wrong}") is not None
            assert (find_refusal(factory, tokenizer, spec, right) is None) is not starts_inside


@pytest.mark.parametrize("format_name", ["hermes", "mistral", "pythonic"])
def test_an_answer_is_calls_or_text_of_its_form(
    factory: TokenGrammarFactory, tokenizer: Tokenizer, format_name: str
) -> None:
    grammar = tool_grammar(format_name, check_tool_choice("auto", TOOLS), has_form=True)
    spec = compose(grammar, "json_schema", json.dumps(TREE))
    assert find_refusal(factory, tokenizer, spec, '{"tree": {"value": 1}}') is None
    assert find_refusal(factory, tokenizer, spec, "Hi") is not None
    call = in_text(format_name, GOOD)
    call = call[call.index({"hermes": "<tool", "mistral": "[TOOL", "pythonic": "[get"}[format_name]) :]
    assert find_refusal(factory, tokenizer, spec, call) is None


@pytest.mark.parametrize("format_name", ["json", "llama3_json"])
def test_calls_without_a_marker_do_not_go_with_a_form(format_name: str) -> None:
    with pytest.raises(InvalidRequestError, match="without a mark"):
        tool_grammar(format_name, check_tool_choice("auto", TOOLS), has_form=True)
