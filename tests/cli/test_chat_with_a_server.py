"""`octavo chat --url` against a server that gives the answers a test wants, and against refusals of all kinds."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from typing import Any

import pytest

from octavo.cli.chat import converse
from octavo.cli.remote_session import RemoteSession, make_base_url, make_body
from octavo.core.sampling_params import SamplingParams
from octavo.errors import ConfigError
from tests.bench.fake_server import Connection, fake_server
from tests.cli.test_command import ROOT


def chat(*arguments: str, turns: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", "chat", *arguments],
        input=turns,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "no_proxy": "*", **environment},
        timeout=60,
    )


def delta(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]}


def count_turns(connection: Connection, body: dict[str, Any]) -> None:
    connection.start_stream()
    connection.send_event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]})
    for piece in ("turn ", "語 ", str(len(body["messages"]))):
        connection.send_event(delta(piece))
    connection.send_event(delta("", "stop"))
    connection.send_event({"choices": [], "usage": {"prompt_tokens": 1}})
    connection.end_stream()


def test_a_conversation_with_a_server() -> None:
    with fake_server(count_turns) as server:
        result = chat("--url", server.url, "--api-key", "k", "--system", "Be kind.", "--seed", "3", turns="one\ntwo\n")
    assert (result.returncode, result.stdout) == (0, "turn 語 2\nturn 語 4\n"), result.stderr
    assert server.bodies[-1]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "turn 語 2"},
        {"role": "user", "content": "two"},
    ]
    assert server.bodies[-1]["seed"] == 3
    assert any("Bearer k" in headers for headers in server.headers)


def test_the_model_and_the_key_may_be_given() -> None:
    with fake_server(count_turns, models={"data": []}) as server:
        result = chat("some-model", "--url", server.url, turns="one\n", OCTAVO_API_KEY="from-outside")
    assert result.returncode == 0, result.stderr
    assert server.bodies[-1]["model"] == "some-model"
    assert any("Bearer from-outside" in headers for headers in server.headers)


def send_whole(connection: Connection, body: dict[str, Any]) -> None:
    connection.send_json(200, {"choices": [{"message": {"role": "assistant", "content": "in one piece"}}]})


def test_a_server_that_does_not_stream_is_understood() -> None:
    with fake_server(send_whole) as server:
        assert chat("--url", server.url, turns="one\n").stdout == "in one piece\n"


def think(connection: Connection, body: dict[str, Any]) -> None:
    connection.start_stream()
    for piece in ({"reasoning_content": "Let me "}, {"reasoning": "see."}, {"content": "Four"}, {"content": "."}):
        connection.send_event({"choices": [{"index": 0, "delta": piece, "finish_reason": None}]})
    connection.send_event(delta("", "stop"))
    connection.end_stream()


def think_whole(connection: Connection, body: dict[str, Any]) -> None:
    message = {"role": "assistant", "reasoning_content": "Let me see.", "content": "Four."}
    connection.send_json(200, {"choices": [{"message": message}]})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "thought"),
    [
        (think, "\x1b[2mLet me \x1b[0m\x1b[2msee.\x1b[0m"),
        (think_whole, "\x1b[2mLet me see.\x1b[0m"),
    ],
)
def test_reasoning_is_dimmed_and_no_part_of_the_conversation(
    monkeypatch: pytest.MonkeyPatch, answer: Any, thought: str
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stdin", io.StringIO("2 + 2?\nSure?\n"))
    with fake_server(answer) as server:
        partner = RemoteSession(f"{server.url}/v1", "m", None)
        status = asyncio.run(converse(partner, SamplingParams(), None, is_interactive=False))
    assert (status, screen.getvalue()) == (0, f"{thought}\n\nFour.\n" * 2)
    assert server.bodies[-1]["messages"][1] == {"role": "assistant", "content": "Four."}


@pytest.mark.parametrize("answer", [think, think_whole])
def test_a_pipe_gets_the_answer_without_its_reasoning(answer: Any) -> None:
    with fake_server(answer) as server:
        assert chat("--url", server.url, turns="2 + 2?\n").stdout == "Four.\n"


def send_error_in_stream(connection: Connection, body: dict[str, Any]) -> None:
    connection.start_stream()
    connection.send_event(delta("so far"))
    connection.send_event({"error": {"message": "the engine died"}})
    connection.end_stream()


def cut_off(connection: Connection, body: dict[str, Any]) -> None:
    connection.start_stream()
    connection.send_event(delta("so far"))
    connection.send(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda connection, _: connection.send_json(400, {"error": {"message": "too long"}}), "HTTP 400: too long"),
        (lambda connection, _: connection.send_json(404, {"detail": "no such route"}), "HTTP 404: no such route"),
        (
            lambda connection, _: connection.send_json(401, {"error": "who?"}),
            "HTTP 401: who? (give a key with --api-key",
        ),
        (lambda connection, _: connection.send_json(503, []), "HTTP 503: Something"),
        (lambda connection, _: connection.send_json(200, {"a": 1}), "no chat completion"),
        (send_error_in_stream, "the engine died"),
        (cut_off, "in the middle of its answer"),
    ],
    ids=["400", "404", "401", "503", "not ours", "error in a stream", "cut off"],
)
def test_a_failed_turn_is_told(answer: Any, words: str) -> None:
    with fake_server(answer) as server:
        result = chat("--url", server.url, turns="one\n")
    assert result.returncode == 1
    assert words in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "ftp://x"], "--url is 'ftp://x'"),
        (["--url", "http://127.0.0.1:1"], "No answer from http://127.0.0.1:1/v1/models: connection refused"),
        (["--url", "http://127.0.0.1:1", "--threads", "2"], "--threads is for a model in this process"),
        (["--url", "http://127.0.0.1:1", "--max-model-len", "2k"], "--max-model-len is for a model in this process"),
        (["--api-key", "k"], "--api-key needs --url"),
        (["A", "--model", "B"], "The model is 'A' and --model is 'B'"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str) -> None:
    result = chat(*arguments)
    assert result.returncode in (1, 2)
    assert words in result.stderr.splitlines()[-1]


def test_a_server_without_models_is_told() -> None:
    with fake_server(models={"data": []}) as server:
        result = chat("--url", server.url)
    assert result.returncode == 1
    assert "lists no model; name one with --model." in result.stderr


@pytest.mark.parametrize(
    ("url", "base_url"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("h:8000/", "http://h:8000/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("https://h/api/v3", "https://h/api/v3"),
        ("http://h/llm", "http://h/llm/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_urls_are_completed(url: str, base_url: str) -> None:
    assert make_base_url(url) == base_url


@pytest.mark.parametrize("url", ["", "http://", "http://h:x", "http://h:99999", "ftp://h"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url is"):
        make_base_url(url)


def test_only_what_was_asked_for_is_sent_beyond_openai() -> None:
    assert set(make_body("m", [], SamplingParams(max_tokens=None))) == {
        "model", "messages", "stream", "temperature", "top_p",
    }  # fmt: skip
    body = make_body("m", [], SamplingParams(max_tokens=5, top_k=3, min_p=0.1, seed=1))
    assert {"max_tokens": 5, "top_k": 3, "min_p": 0.1, "seed": 1}.items() <= body.items()
