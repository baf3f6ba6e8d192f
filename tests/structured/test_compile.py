"""Regexes, choices and grammars: what is generated matches, what cannot be used is a 400, and nothing hangs."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.interfaces import GrammarSpec
from octavo.errors import InvalidRequestError, RequestFailedError
from octavo.structured.compile import validate_spec
from tests.structured.conftest import Sample

SEEDS = range(5)

REGEXES = [
    r"[a-c]{3}\d+",
    r"(red|green|blue)(, (red|green|blue)){0,3}",
    r"^[a-z_]{1,9}@[0-9]{1,5}\.com$",
    r"[^\n\"]{1,10}",
    r"a/b\\c\t\"",
    "ďábelské|🌶+",
    r"(?i)yes|no",
    r"-?(0|[1-9]\d{0,4})(\.\d{1,3})?",
    r"x*?y",
]


@pytest.mark.parametrize("pattern", REGEXES)
def test_a_regex_matches_the_whole_text(sample: Sample, pattern: str) -> None:
    num_finished = 0
    for seed in SEEDS:
        sampled = sample(GrammarSpec("regex", pattern), seed, is_eager=True)
        if sampled.is_finished:
            num_finished += 1
            assert re.fullmatch(pattern, sampled.text.decode("utf-8"))
    assert num_finished > 0


def test_h34_a_bad_regex_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="unclosed character class") as refusal:
        validate_spec(GrammarSpec("regex", "[.*"), "structured_outputs.regex")
    assert refusal.value.param == "structured_outputs.regex"
    assert refusal.value.code == "invalid_grammar"


def test_h36_a_second_regex_after_the_first(sample: Sample) -> None:
    for pattern in ("^(.*)$", "^(|.*)$", "^(.*)$"):
        assert b"\n" not in sample(GrammarSpec("regex", pattern), 0, max_tokens=30).text


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "(",
        "a{2,1}",
        r"(?=a)b",
        r"(a)\1",
        r"\bword\b",
        "a^b",
        "[^\\x00-\\U0010FFFF]",
        "(" * 3000 + ")" * 3000,
        "a" * 9000,
    ],
)
def test_a_regex_that_cannot_be_used_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        validate_spec(GrammarSpec("regex", pattern))
    assert refusal.value.code == "invalid_grammar"
    assert len(refusal.value.message) < 500


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|b|c){1000}{1000}",
        "((a{1,1000}){1,1000}){1,1000}",
        "(a|aa)*b(a|b){60}",
        ".*a.{300}",
        "(.*a.{20}|.*b.{30}|.*c.{40}){1,50}",
        r"(\p{L}|\p{N}){1,5000}\w{3000}",
        "(.*a.{18}x|.*b.{19}y|.*c.{17}z|.*(d|e).{20}){1,50}",
    ],
)
def test_a_hostile_regex_is_refused_or_fails_alone(sample: Sample, pattern: str) -> None:
    """At a limit of the library the sequence ends with an error; the time of a step stays bounded."""
    message = find_refusal(lambda: sample(GrammarSpec("regex", pattern), 1, max_tokens=100))
    assert message is None or "too large or too complex" in message


def find_refusal(act: Callable[[], object]) -> str | None:
    try:
        act()
    except (InvalidRequestError, RequestFailedError) as error:
        return error.message
    return None


CHOICES = [
    ["yes", "no"],
    ["a", "ab", "abc"],
    ["ďábelské"],
    ["🌶", "🌶🌶", "x"],
    ['with "quotes"', "back\\slash", "line\nbreak", "tab\t", "</s>", "<|im_end|>", "null", "\x00\x1f"],
]


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_a_choice_is_one_of_the_list_exactly(sample: Sample, choices: list[str]) -> None:
    found = {sample(GrammarSpec("choice", json.dumps(choices)), seed).text.decode("utf-8") for seed in range(40)}
    assert found == set(choices)


def test_h04_a_character_split_over_tokens_can_be_forced(sample: Sample) -> None:
    sampled = sample(GrammarSpec("choice", '["ďábelské"]'), 0)
    assert sampled.is_finished
    assert sampled.text.decode("utf-8") == "ďábelské"


def test_h16_the_bytes_of_a_pepper_are_tokens_of_their_own(sample: Sample) -> None:
    sampled = sample(GrammarSpec("choice", json.dumps(["\U0001f336"])), 0)
    assert sampled.text == b"\xf0\x9f\x8c\xb6"
    assert len(sampled.token_ids) > 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '"a"',
        "[1]",
        '["a", ""]',
        '["\\ud800"]',
        json.dumps([str(i) for i in range(1001)]),
        '["' + "a" * 70_000 + '"]',
    ],
)
def test_choices_that_cannot_be_used_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        validate_spec(GrammarSpec("choice", text))


def test_a_lark_grammar_is_followed(sample: Sample) -> None:
    grammar = """
        %import common.INT
        // a sum, with "quotes" in a comment
        start: term ("+" term)*
        term: INT | "(" start ")"
    """
    num_finished = 0
    for seed in range(10):
        sampled = sample(GrammarSpec("lark", grammar), seed, is_eager=True)
        if sampled.is_finished:
            num_finished += 1
            assert isinstance(eval(re.sub(r"\b0+(?=\d)", "", sampled.text.decode())), int)
    assert num_finished > 0


def test_a_gbnf_grammar_is_converted(sample: Sample) -> None:
    grammar = 'root ::= "a" [0-9]{3} ("x" | tail)?\ntail ::= "z"{2,3}'
    for seed in range(10):
        sampled = sample(GrammarSpec("lark", grammar), seed)
        assert re.fullmatch(rb"a[0-9]{3}(x|zz|zzz)?", sampled.text)


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "start: nothing",
        "start: start",
        'begin: "a"',
        'start: "a',
        'start: a{10}\na: b{10}\nb: "x"\n%llguidance {"no_forcing": false}',
        "start: <|im_end|>",
        "start: <[1-10]>",
        "start: <[*]>",
        'start[temperature=3]: "a"',
        'start[max_tokens=3]: "a"',
        "start: " + "(" * 3000 + '"a"' + ")" * 3000,
        'start: %json {"not": {}}',
        "root ::= nothing",
        "root ::= (",
        "x" * 40_000,
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        validate_spec(GrammarSpec("lark", grammar))
    assert refusal.value.code == "invalid_grammar"


def test_a_fault_in_a_grammar_is_told_with_its_line() -> None:
    with pytest.raises(InvalidRequestError, match=r"at 2\(4\): unknown name"):
        validate_spec(GrammarSpec("lark", 'start: a\na: nothing\nb: "x"'))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no grammar of the kind 'xml'"):
        validate_spec(GrammarSpec("xml", "<a/>"))


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["regex", "lark", "choice", "json_schema"]),
    text=st.text(string.printable + "é🌶\x00", max_size=40),
)
def test_any_text_is_accepted_or_refused(kind: str, text: str) -> None:
    message = find_refusal(lambda: validate_spec(GrammarSpec(kind, text)))
    assert message is None or message.endswith(".")


KEYWORDS = ["type", "items", "minItems", "enum", "const", "$ref", "anyOf", "allOf", "oneOf", "pattern", "properties",
            "required", "format", "minimum", "multipleOf", "additionalProperties", "not", "$defs"]  # fmt: skip
SCRAPS = st.sampled_from(
    [None, True, False, 0, -1, 1.5, 10**20, "string", "object", "#", "#/$defs/a", "^a$", "date", "("]
)
SCHEMAS = st.recursive(
    SCRAPS, lambda inner: st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4) | st.lists(inner, max_size=3)
)


@settings(max_examples=300, deadline=None)
@given(schema=SCHEMAS)
def test_any_scrap_of_schema_is_accepted_or_refused(schema: object) -> None:
    message = find_refusal(lambda: validate_spec(GrammarSpec("json_schema", json.dumps(schema))))
    assert message is None or message.endswith(".")
