"""What is typed about chats becomes settings, or a sentence that names the option, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.config import EngineArgs
from octavo.errors import ConfigError
from octavo.server.settings import ServerSettings

Parse = Callable[..., tuple[EngineArgs, ServerSettings]]


def test_the_model_s_own_ways_are_found_unless_told(parse: Parse) -> None:
    settings = parse("m")[1]
    assert (settings.chat_template, settings.tool_call_parser, settings.reasoning_parser) == (None, None, None)
    assert not settings.trust_request_chat_template
    typed = ("--tool-call-parser", "qwen3", "--reasoning-parser", "none", "--trust-request-chat-template")
    settings = parse("m", *typed, "--enable-auto-tool-choice")[1]
    assert (settings.tool_call_parser, settings.reasoning_parser) == ("qwen3", "none")
    assert settings.trust_request_chat_template


def test_a_template_comes_from_a_file_or_stands_there(parse: Parse, tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    path = tmp_path / "chat.jinja"
    path.write_text(source)
    assert parse("m", "--chat-template", str(path))[1].chat_template == source
    assert parse("m", "--chat-template", source)[1].chat_template == source


@pytest.mark.parametrize(
    ("option", "typed", "words"),
    [
        ("--tool-call-parser", "x", ["'x'", "hermes", "mistral"]),
        ("--reasoning-parser", "x", ["'x'", "deepseek_r1", "none"]),
        ("--chat-template", "/nowhere/x.jinja", ["/nowhere/x.jinja", "No such file"]),
        ("--chat-template", "{% if %}", ["line 1"]),
    ],
)
def test_what_cannot_be_used_is_told(parse: Parse, option: str, typed: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("m", option, typed)
    assert caught.value.option == option
    assert all(word in str(caught.value) for word in words), str(caught.value)
