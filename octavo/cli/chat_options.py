"""The options of `octavo serve` that are about chats: the template, and how answers are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.model_options import MaybeStr
from octavo.errors import ConfigError, UnsupportedModelError

CHAT_PANEL = "Chat"

ChatTemplateOption = Annotated[
    MaybeStr,
    typer.Option(
        help="A file with a jinja template, or the template itself, in place of the model's own.",
        metavar="FILE",
        rich_help_panel=CHAT_PANEL,
        show_default=False,
    ),
]
TrustTemplateOption = Annotated[
    bool,
    typer.Option(
        "--trust-request-chat-template/--no-trust-request-chat-template",
        help="Let requests bring a chat_template of their own. [default: off]",
        rich_help_panel=CHAT_PANEL,
        show_default=False,
    ),
]
ToolCallParserOption = Annotated[
    MaybeStr,
    typer.Option(
        help="How the model writes calls: hermes, llama3_json, pythonic, mistral or json. [default: found in the "
        "chat template]",
        metavar="NAME",
        rich_help_panel=CHAT_PANEL,
        show_default=False,
    ),
]
ReasoningParserOption = Annotated[
    MaybeStr,
    typer.Option(
        help="Which markers enclose the model's reasoning: think, mistral, or none. [default: found in the chat "
        "template]",
        metavar="NAME",
        rich_help_panel=CHAT_PANEL,
        show_default=False,
    ),
]
AutoToolChoiceOption = Annotated[
    bool,
    typer.Option(
        "--enable-auto-tool-choice",
        help="Taken because vLLM needs it. [default: always so]",
        rich_help_panel=CHAT_PANEL,
        show_default=False,
    ),
]


def read_chat_template(typed: str | None) -> str | None:
    """The template's source. Raises ConfigError for what is no file and no template, or cannot be read as one."""
    if typed is None:
        return None
    from octavo.text.chat_template import ChatTemplate

    option = "--chat-template"
    is_inline = "{%" in typed or "{{" in typed
    try:
        source = typed if is_inline else Path(typed).read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError(
            f"--chat-template is {typed!r}, which cannot be read ({reason}); give a file with a jinja template.",
            option=option,
        ) from None
    try:
        ChatTemplate(source)
    except UnsupportedModelError as error:
        raise ConfigError(f"--chat-template: {error}", option=option) from None
    return source


def check_tool_call_parser(typed: str | None) -> str | None:
    """Raises ConfigError that names those there are."""
    if typed is not None:
        from octavo.text.tool_calls.formats import get_format

        get_format(typed)
    return typed


def check_reasoning_parser(typed: str | None) -> str | None:
    """Raises ConfigError that names those there are."""
    if typed not in (None, "none"):
        from octavo.text.reasoning import get_reasoning_markers

        assert typed is not None
        get_reasoning_markers(typed)
    return typed
