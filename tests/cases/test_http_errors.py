"""Broken bodies, keys, ids, faults within a stream: H27 to H33."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import httpx
import openai
import pytest

from octavo.engine.outputs import CompletionDelta
from octavo.errors import EngineDeadError
from octavo.server.openapi import OPERATIONS
from tests.cases.conftest import Api
from tests.server.conftest import Serving
from tests.server.fake_engine import FakeEngine

ROUTES = [(operation.method, operation.path.replace("{model}", "fake")) for operation in OPERATIONS]


@pytest.mark.parametrize(
    "body",
    [
        b'stray {"prompt": "x"}',
        b'{"prompt": "x"} stray',
        b"",
        b'{"prompt": "x',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b"[]",
        b"null",
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_h27_h28_a_broken_body_is_a_400_with_an_error_in_json(api: Api, path: str, body: bytes) -> None:
    answer = api.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("br, gzip", 415), ("identity", 200)])
def test_h28_a_compressed_body_is_told_apart_from_a_broken_one(api: Api, encoding: str, status: int) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    packed = body if encoding == "identity" else gzip.compress(body)
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = api.http.post("/v1/completions", content=packed, headers=headers)
    assert answer.status_code == status
    assert status == 200 or "Content-Encoding" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "schema": {"type": "object"}},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": None},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}},
        {"type": "xml"},
        {},
        "json",
        [],
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_h29_a_bad_response_format_is_a_400(api: Api, path: str, response_format: Any) -> None:
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    error = api.refuse(path, response_format=response_format, max_tokens=1, **prompt)
    assert error["param"].startswith("response_format")


@pytest.mark.anyio
@pytest.mark.parametrize("key", ["“smart quotes”", "ключ", "plain"])
async def test_h30_a_key_that_is_not_ascii_opens_the_door_and_a_wrong_one_does_not(serving: Serving, key: str) -> None:
    async with serving(FakeEngine(), api_keys=(key,)) as client:
        statuses = []
        for sent in (key.encode(), key.encode() + b"x", b"\xe2\x80", b"x"):
            answer = await client.get("/v1/models", headers={b"authorization": b"Bearer " + sent})
            statuses.append(answer.status_code)
    assert statuses == [200, 401, 401, 401]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "path"),
    [*ROUTES, ("GET", "/"), ("GET", "/v1"), ("POST", "/v1/embeddings"), ("OPTIONS", "/v1/models"), ("GET", "/nothing")],
)
async def test_h31_every_route_but_health_wants_the_key(serving: Serving, method: str, path: str) -> None:
    async with serving(FakeEngine(), api_keys=("secret",)) as client:
        answer = await client.request(method, path)
    assert answer.status_code == (200 if path == "/health" else 401)


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["//v1/models", "/v1/models/", "/health/../v1/models", "/V1/MODELS", "/health/x"])
async def test_h31_no_spelling_of_a_path_opens_a_door(serving: Serving, path: str) -> None:
    async with serving(FakeEngine(), api_keys=("secret",)) as client:
        answer = await client.get(str(client.base_url).rstrip("/") + path)
    assert answer.status_code == 401


def test_h32_two_requests_of_one_id_are_both_answered(api: Api) -> None:
    async def ask_both() -> list[httpx.Response]:
        body = {"model": "smollm2", "prompt": "x", "max_tokens": 40, "ignore_eos": True, "request_id": "twin"}
        async with httpx.AsyncClient(base_url=api.server.url, timeout=120) as http:
            return list(await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(2))))

    for answer in asyncio.run(ask_both()):
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 40
    api.wait_until_idle()
    assert all(value >= 0 for value in api.server.metrics().values())


@pytest.mark.anyio
async def test_h33_a_fault_within_a_stream_is_a_data_line_and_an_api_error_in_the_client(serving: Serving) -> None:
    steps = [CompletionDelta(index=0, text="a", token_ids=[1]), EngineDeadError("The engine process died.")]
    async with serving(FakeEngine(lambda params: steps)) as http:
        for path, prompt in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            answer = await http.post(path, json={**prompt, "stream": True})
            lines = [line for line in answer.text.split("\n") if line]
            assert all(line.startswith("data: ") for line in lines)
            assert '{"error":' in lines[-2] or '{"error":' in lines[-1]
        async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(model="fake", prompt="x", stream=True)
            with pytest.raises(openai.APIError, match="engine process died"):
                async for _ in stream:
                    pass
