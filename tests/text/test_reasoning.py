"""Thinking is split off, the same streamed and not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.text.reasoning import (
    FORMATS,
    ReasoningSplitter,
    detect_reasoning,
    get_reasoning_markers,
    opens_reasoning,
)
from octavo.text.tool_calls.events import Content, Reasoning

pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "</", "nk>", "\n", " ", "a", "é", "<", "word"]), max_size=14
).map("".join)


def split(text: str, starts_inside: bool = False, size: int = 10**9) -> tuple[str, str]:
    splitter = ReasoningSplitter(starts_inside=starts_inside)
    events = []
    for start in range(0, len(text), size):
        events += splitter.push(text[start : start + size])
    events += splitter.finish()
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return reasoning, "".join(event.text for event in events if isinstance(event, Content))


@given(text=pieces, starts_inside=st.booleans(), size=st.integers(1, 5))
@settings(max_examples=300)
def test_streamed_is_not_streamed(text: str, starts_inside: bool, size: int) -> None:
    assert split(text, starts_inside, size) == split(text, starts_inside)


@pytest.mark.parametrize(
    ("text", "starts_inside", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes ", False, ("hm", "yes ")),
        ("\n<think>hm</think>yes", False, ("hm", "yes")),
        ("hm, <b>\n</think>\nyes", True, ("hm, <b>", "yes")),
        ("<think>\nhm</think>yes", True, ("hm", "yes")),
        ("<think>\n\n</think>\n\nyes", False, ("", "yes")),
        (" yes <think>no</think>", False, ("", " yes <think>no</think>")),
        ("<think>cut </thi", False, ("cut </thi", "")),
        ("<thin", False, ("", "<thin")),
        ("cut", True, ("cut", "")),
        ("<think>a</think>b</think>", False, ("a", "b</think>")),
        ("", False, ("", "")),
    ],
)
def test_transcripts(text: str, starts_inside: bool, expected: tuple[str, str]) -> None:
    assert split(text, starts_inside) == expected


def test_reasoning_streams() -> None:
    splitter = ReasoningSplitter()
    assert splitter.push("<think>so") == [Reasoning("so")]
    assert splitter.push(" it") == [Reasoning(" it")]
    assert splitter.push("</t") == []
    assert splitter.push("x") == [Reasoning("</tx")]


def test_the_template_tells() -> None:
    think = FORMATS["think"]
    assert detect_reasoning("{% if '</think>' in content %}") == think
    assert detect_reasoning("{{ '[THINK]' }}") == FORMATS["mistral"]
    assert detect_reasoning("{{ content }}") is None
    assert detect_reasoning(None) is None
    assert opens_reasoning("<|im_start|>assistant\n<think>\n", think)
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", think)


def test_an_unknown_parser_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="deepseek_r1"):
        get_reasoning_markers("deepseek")
