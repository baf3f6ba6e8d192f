"""Conversations, with a session that echoes."""

from __future__ import annotations

import io
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from octavo.cli.chat import converse
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequestError

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class EchoSession:
    """Answers with what it was sent, counted; a message "long" is over the window."""

    model = "echo"

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []

    async def answer(self, messages: Sequence[dict[str, Any]], params: SamplingParams) -> AsyncGenerator[str, None]:
        if messages[-1]["content"] == "long":
            raise InvalidRequestError("The messages have 9000 tokens.", param="messages")
        self.asked.append(list(messages))
        for piece in ("answer ", str(len(self.asked))):
            yield piece


async def talk(monkeypatch: pytest.MonkeyPatch, text: str, system: str | None = None) -> tuple[EchoSession, int]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    session = EchoSession()
    status = await converse(session, SamplingParams(), system, is_interactive=False)
    return session, status


async def test_turns_add_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    session, status = await talk(monkeypatch, "one\n\ntwo\n", system="Be kind.")
    assert status == 0
    assert capsys.readouterr().out == "answer 1\nanswer 2\n"
    assert session.asked[-1] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "answer 1"},
        {"role": "user", "content": "two"},
    ]


async def test_reset_keeps_the_system_message_only(monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = await talk(monkeypatch, "one\n/reset\ntwo\n/exit\nthree\n", system="Be kind.")
    assert [message["content"] for message in session.asked[-1]] == ["Be kind.", "two"]
    assert len(session.asked) == 2


async def test_a_refused_turn_is_told_and_taken_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session, status = await talk(monkeypatch, "one\nlong\ntwo")
    assert status == 1
    assert "9000 tokens" in capsys.readouterr().err
    assert [message["content"] for message in session.asked[-1]] == ["one", "answer 1", "two"]


async def test_what_we_say_breaks_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.setattr("builtins.input", lambda prompt: "/exit")
    await converse(EchoSession(), SamplingParams(), None, is_interactive=True)
    assert capsys.readouterr().out.splitlines() == [
        "echo: /reset forgets the",
        "conversation, /exit",
        "leaves, Ctrl-C stops an",
        "answer.",
    ]
