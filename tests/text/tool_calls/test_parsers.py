"""What a model wrote is content and calls: the same streamed and not, and nothing is lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.text.tool_calls.events import ArgumentsDelta, CallStarted, Content
from octavo.text.tool_calls.formats import get_parser
from tests.text.tool_calls.transcripts import FORMATS, HOSTILE, TOOL_NAMES, parse, parse_chunks, write

TWO = [("get_weather", {"city": "Rome", "days": 2}), ("add", {"a": 1, "b": [2.5, None, True, {"c": "}"}]})]

texts = st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=5)), max_size=6).map("".join)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.floats(-1e6, 1e6), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
arguments = st.dictionaries(st.sampled_from(["a", "b", "city_name"]), values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(["get_weather", "add"]), arguments), min_size=1, max_size=3)


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@pytest.mark.parametrize("format_name", FORMATS)
@given(calls=calls, before=st.sampled_from(["", "Let me see.", "é 😀\n"]), after=st.sampled_from(["", "Done."]))
@settings(max_examples=60, deadline=None)
def test_well_formed_calls_come_out_as_they_went_in(format_name: str, calls: Any, before: str, after: str) -> None:
    parsed = parse(format_name, before + write(format_name, calls) + after)
    assert parsed.decoded == [(name, json.loads(json.dumps(arguments))) for name, arguments in calls]
    assert parsed.content == before.rstrip() + after


@pytest.mark.parametrize("format_name", FORMATS)
@given(
    calls=calls, before=texts, after=texts, end=st.integers(0, 400), places=st.lists(st.integers(0, 400), max_size=8)
)
@settings(max_examples=150, deadline=None)
def test_streamed_is_not_streamed(
    format_name: str, calls: Any, before: str, after: str, end: int, places: list[int]
) -> None:
    """Also for output that is cut off anywhere, and surrounded by what nearly is a call."""
    text = (before + write(format_name, calls) + after)[: end if end < 300 else None]
    whole = parse(format_name, text)
    assert parse_chunks(get_parser(format_name, TOOL_NAMES), list(text)) == whole
    assert parse_chunks(get_parser(format_name, TOOL_NAMES), cut(text, places)) == whole


@pytest.mark.parametrize("format_name", FORMATS)
@given(text=st.lists(st.sampled_from(HOSTILE), max_size=12).map("".join))
@settings(max_examples=200, deadline=None)
def test_malformed_output_is_the_same_streamed_and_loses_nothing(format_name: str, text: str) -> None:
    whole = parse(format_name, text)
    assert parse_chunks(get_parser(format_name, TOOL_NAMES), list(text)) == whole
    if not whole.calls:
        assert whole.content == text


@pytest.mark.parametrize("format_name", FORMATS)
@given(text=st.text(alphabet=" \n\tabc.é😀", max_size=30))
def test_text_without_calls_is_content_to_the_character(format_name: str, text: str) -> None:
    assert parse(format_name, text).content == text


@pytest.mark.parametrize("format_name", FORMATS)
def test_arguments_stream(format_name: str) -> None:
    """A long text argument comes in pieces, each at once."""
    text = write(format_name, [("get_weather", {"city": "a long long name"})])
    parser = get_parser(format_name, TOOL_NAMES)
    start = text.index("long")
    events = parser.push(text[:start])
    assert isinstance(events[0], CallStarted)
    assert parser.push("lo") == [ArgumentsDelta(0, "lo")]
    assert parser.push("n") == [ArgumentsDelta(0, "n")]


@pytest.mark.parametrize(
    ("format_name", "text", "sent"),
    [
        ("hermes", "a < b", "a < b"),
        ("hermes", "a <tool", "a"),
        ("hermes", "a <tools>", "a <tools>"),
        ("json", "{'a'", "{'a'"),
        ("json", 'see {"na', "see"),
        ("json", 'see {"title":', 'see {"title":'),
        ("json", 'see {"name": "Bob",', 'see {"name": "Bob",'),
        ("llama3_json", "x <|py", "x"),
        ("mistral", "x [1", "x [1"),
        ("mistral", "x [TOOL", "x"),
        ("pythonic", "x [1", "x [1"),
        ("pythonic", "x [add", "x"),
        ("pythonic", "x [addition(", "x [addition("),
    ],
)
def test_text_is_held_only_while_it_may_become_a_call(format_name: str, text: str, sent: str) -> None:
    parser = get_parser(format_name, TOOL_NAMES)
    assert "".join(event.text for event in parser.push(text) if isinstance(event, Content)).rstrip() == sent.rstrip()


@pytest.mark.parametrize(
    ("format_name", "text", "content", "expected"),
    [
        pytest.param(
            "hermes",
            '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
            "",
            [("add", '{"a": 1}')],
            id="arguments first",
        ),
        pytest.param("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")], id="no arguments"),
        pytest.param("hermes", '<tool_call>{"name": "add", "arguments": null}', "", [("add", "{}")], id="null"),
        pytest.param(
            "hermes",
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>!',
            "!",
            [("add", '{"a": 1}')],
            id="text",
        ),
        pytest.param(
            "hermes", "<tool_call>no</tool_call>", "<tool_call>no</tool_call>", [], id="marker without a call"
        ),
        pytest.param(
            "hermes",
            '<tool_call>\n{"name": "add", "arguments": {"a": "</tool_call>"}}\n</tool_call>',
            "",
            [("add", '{"a": "</tool_call>"}')],
            id="marker in a string",
        ),
        pytest.param(
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call> ok',
            "ok",
            [("add", '{"a": 1,}}')],
            id="broken",
        ),
        pytest.param(
            "hermes", '<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu', [], id="cut early"
        ),
        pytest.param(
            "hermes", '<tool_call>{"name": "add", "arguments": {"a": "x', "", [("add", '{"a": "x')], id="cut late"
        ),
        pytest.param(
            "hermes",
            '<tool_call>{"name": "add", "arguments": {}}</tool_call',
            "",
            [("add", "{}")],
            id="cut in the closing marker",
        ),
        pytest.param(
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": "l\n"}}</tool_call>',
            "",
            [("add", '{"a": "l\\n"}')],
            id="newline",
        ),
        pytest.param(
            "llama3_json",
            '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}',
            "",
            [("add", '{"a": 1}')],
            id="python tag",
        ),
        pytest.param(
            "mistral",
            '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]f-2[CALL_ID]abcdef123[ARGS]{}',
            "",
            [("add", '{"a": 1}'), ("f-2", "{}")],
            id="newer mistral",
        ),
        pytest.param(
            "json",
            'Sure:\n```json\n{"name": "add", "arguments": {}}\n```\nDone',
            "Sure:Done",
            [("add", "{}")],
            id="fence",
        ),
        pytest.param(
            "json", '<tool_call>[{"name": "add", "arguments": {}}]</tool_call>', "", [("add", "{}")], id="tags"
        ),
        pytest.param(
            "json", '{"name": "Bob", "arguments": {}}', '{"name": "Bob", "arguments": {}}', [], id="unknown name"
        ),
        pytest.param("json", "```python\nprint({})\n```", "```python\nprint({})\n```", [], id="other code"),
        pytest.param(
            "pythonic",
            "<|python_start|>[add(a='it\\'s \"', b=(1, -2.5), c={'k': None}), add()]<|python_end|>",
            "",
            [("add", '{"a": "it\'s \\"", "b": [1, -2.5], "c": {"k": null}}'), ("add", "{}")],
            id="python literals",
        ),
        pytest.param("pythonic", "[add(1, 2)]", "[add(1, 2)]", [], id="positional"),
        pytest.param("pythonic", "[add](url) [1, 2]", "[add](url) [1, 2]", [], id="a link"),
        pytest.param("pythonic", "[add(a=x + 1)]", "", [("add", '{"a": x + 1)]')], id="no literal"),
        pytest.param(
            "pythonic", "[add(a=007, b=+1, c=1_000)]", "", [("add", '{"a": 7, "b": 1, "c": 1000}')], id="numbers"
        ),
    ],
)
def test_transcripts(format_name: str, text: str, content: str, expected: list[tuple[str, str]]) -> None:
    parsed = parse(format_name, text)
    assert (parsed.content, parsed.calls) == (content, expected)


def test_a_marked_call_of_an_unknown_tool_is_a_call() -> None:
    assert parse("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>').calls == [("other", "{}")]


def test_deep_nesting_does_not_break_the_parser() -> None:
    deep = "[" * 5000
    assert parse("json", '{"name": "add", "arguments": {"a": ' + deep).calls == [("add", '{"a": ' + deep)]
    assert parse("pythonic", "[add(a=" + deep).calls[0][1].count("[") == 5000


def test_ids_fit_the_format() -> None:
    ids = {}
    for format_name in FORMATS:
        started = get_parser(format_name).push(write(format_name, TWO))
        ids[format_name] = [event.call_id for event in started if isinstance(event, CallStarted)]
        assert len(set(ids[format_name])) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids["mistral"])
    assert all(call_id.startswith("call_") for call_id in ids["hermes"])


def test_an_unknown_parser_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="hermes") as caught:
        get_parser("hermse")
    assert caught.value.option == "--tool-call-parser"
