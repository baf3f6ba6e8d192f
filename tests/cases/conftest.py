"""A real server with the real SmolLM2 for the whole folder, asked over HTTP as any client would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.server.conftest import _fixed_time, anyio_backend, serving  # noqa: F401  # fixtures of the fake engine
from tests.system.conftest import Server, running_server, wait_until

Json = dict[str, Any]


@dataclass
class Api:
    """Each method asserts that the answer is of the kind asked for."""

    server: Server
    http: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        # json.dumps would write what JSON has no word for; a test that wants such a body writes it itself
        return self.http.post(path, json={"model": "smollm2", **body})

    def complete(self, prompt: Any, **body: Any) -> Json:
        return self._read(self.post("/v1/completions", prompt=prompt, **{"temperature": 0, **body}))

    def chat(self, messages: Any, **body: Any) -> Json:
        return self._read(
            self.post("/v1/chat/completions", messages=as_messages(messages), **{"temperature": 0, **body})
        )

    def stream_completion(self, prompt: Any, **body: Any) -> list[Json]:
        body = {"prompt": prompt, "temperature": 0, "stream": True, **body}
        return read_events(self.post("/v1/completions", **body))

    def stream_chat(self, messages: Any, **body: Any) -> list[Json]:
        body = {"messages": as_messages(messages), "temperature": 0, "stream": True, **body}
        return read_events(self.post("/v1/chat/completions", **body))

    def refuse(self, path: str, **body: Any) -> Json:
        """A 400 in the shape that OpenAI's clients read, after which the server still answers."""
        answer = self.post(path, **body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        self.assert_alive()
        return error

    def tokenize(self, text: str) -> list[int]:
        return self._read(self.post("/tokenize", prompt=text, add_special_tokens=False))["tokens"]

    def assert_alive(self) -> None:
        assert self.complete("Hi", max_tokens=1)["usage"]["completion_tokens"] == 1

    def wait_until_idle(self) -> None:
        def is_idle() -> bool:
            samples = self.server.metrics()
            return samples["octavo:num_requests_running"] == 0 == samples["octavo:num_requests_waiting"]

        wait_until(is_idle, 10, "nothing runs or waits any more")

    def _read(self, answer: httpx.Response) -> Json:
        assert answer.status_code == 200, answer.text
        return strict_json(answer.text)


def as_messages(messages: Any) -> list[Json]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def strict_json(text: str) -> Any:
    """As RFC 8259 has it: no NaN, no Infinity."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def read_events(answer: httpx.Response) -> list[Json]:
    """Only data lines, each with JSON of its own, and [DONE] at the end."""
    assert answer.status_code == 200, answer.text
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [strict_json(event.removeprefix("data: ")) for event in events]


def texts_of(events: list[Json]) -> list[str]:
    """What each chunk says, for one choice."""
    choices = [choice for event in events for choice in event["choices"]]
    return [choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices]


def reasons_of(events: list[Json], index: int = 0) -> list[Any]:
    choices = [choice for event in events for choice in event["choices"]]
    return [choice["finish_reason"] for choice in choices if choice["index"] == index]


@pytest.fixture(scope="package")
def api(smollm2_gguf: Any, tmp_path_factory: Any) -> Iterator[Api]:
    log = tmp_path_factory.mktemp("cases") / "serve.log"
    options = ("--served-model-name", "smollm2", "--max-num-seqs", "64", "--max-model-len", "512")
    with running_server(smollm2_gguf, log, *options) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        yield Api(server, http)
