"""Routes, keys, sizes and types: what happens around a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import Serving
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake"),
    ("POST", "/v1/chat/completions"),
    ("POST", COMPLETIONS),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing/here"),
    ("POST", "/health/"),
    ("GET", "//health"),
    ("OPTIONS", "/v1/models"),
]


def check_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


async def test_models_tell_the_window_under_every_name(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        models = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/also-fake")).json()
        missing = await client.get("/v1/models/gpt-4/x")
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["fake", "also-fake"]
    assert one == models["data"][1]
    assert (one["max_model_len"], one["owned_by"], one["object"]) == (128, "octavo", "model")
    error = check_error(missing, 404)
    assert error["code"] == "model_not_found"
    assert "also-fake" in error["message"]


async def test_an_unknown_model_is_a_404_that_names_those_served(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        error = check_error(await client.post(COMPLETIONS, json={"prompt": "x", "model": "gpt-4"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "fake, also-fake" in error["message"]


async def test_health_is_the_engines(serving: Serving) -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        engine.is_dead = True
        error = check_error(await client.get("/health"), 503)
    assert "started again" in error["message"]


async def test_version_and_metrics(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        assert (await client.get("/version")).json() == {"version": "9.9.9"}
        metrics = await client.get("/metrics")
    assert metrics.text.startswith("octavo:num_requests_running 0\n")
    assert 'http_requests_total{handler="/version",method="GET",status="2xx"} 1.0' in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_a_wrong_path_or_method_is_an_error_of_the_same_shape(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        assert "did you mean /v1/completions?" in check_error(await client.post("/v1/completion"), 404)["message"]
        answer = await client.get(COMPLETIONS)
        check_error(answer, 405)
        assert answer.headers["allow"] == "POST"
        assert (await client.head("/health")).status_code == 200


@pytest.mark.parametrize("body", [b"", b"x {}", b'{"prompt": "x"', b"\xff\xfe", b"[]"], ids=repr)
async def test_a_broken_body_is_a_400(serving: Serving, body: bytes) -> None:
    """H27, H28."""
    async with serving(FakeEngine()) as client:
        answer = await client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    check_error(answer, 400)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        (None, 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
    ],
)
async def test_the_content_type_must_be_json(serving: Serving, content_type: str | None, status: int) -> None:
    headers = {"content-type": content_type} if content_type else {}
    async with serving(FakeEngine()) as client:
        answer = await client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == status
    if status != 200:
        assert "application/json" in check_error(answer, status)["message"]


async def test_a_body_over_the_limit_is_refused_while_it_arrives(serving: Serving) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield b'{"prompt": ' + b" " * 50

    headers = {"content-type": "application/json"}
    engine = FakeEngine()
    async with serving(engine, max_request_bytes=200) as client:
        exact = b'{"prompt": "x"}'.ljust(200)
        assert (await client.post(COMPLETIONS, content=exact, headers=headers)).status_code == 200
        declared = await client.post(COMPLETIONS, content=exact + b" ", headers=headers)
        chunked = await client.post(COMPLETIONS, content=chunks(), headers=headers)
        assert (await client.get("/health")).status_code == 200
    assert "--max-request-bytes" in check_error(declared, 413)["message"]
    check_error(chunked, 413)
    assert len(engine.calls) == 1


# --- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_but_health_asks_for_a_key(serving: Serving, method: str, path: str) -> None:
    """H31."""
    engine = FakeEngine()
    async with serving(engine, api_keys=("secret",)) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"api-key": "secret"}):
            answer = await client.request(method, path, headers=headers)
            assert "key" in check_error(answer, 401)["message"].lower()
            assert "secret" not in answer.text
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/health")).status_code == 200
    assert engine.calls == []


@pytest.mark.parametrize("key", ["plain", "kéy", "“smart quotes”", "with space", "🗝️"])
async def test_a_key_of_any_bytes_opens_the_door_and_others_do_not(serving: Serving, key: str) -> None:
    """H30."""
    async with serving(FakeEngine(), api_keys=(key, "other")) as client:
        right = await client.get("/v1/models", headers={b"authorization": b"Bearer " + key.encode()})
        second = await client.get("/v1/models", headers={"authorization": "bearer other"})
        wrong = await client.get("/v1/models", headers={b"authorization": b"Bearer " + key.encode() + b"x"})
        bytes_only = await client.get("/v1/models", headers={b"authorization": b"Bearer \xff\xfe"})
    assert [answer.status_code for answer in (right, second, wrong, bytes_only)] == [200, 200, 401, 401]


async def test_users_of_different_keys_share_no_cached_blocks(serving: Serving) -> None:
    engine = FakeEngine()
    async with serving(engine, api_keys=("one", "two")) as client:
        for key in ("one", "two", "one"):
            await client.post(COMPLETIONS, json={"prompt": "x"}, headers={"authorization": f"Bearer {key}"})
    first, second, third = (call.cache_salt for call in engine.calls)
    assert first
    assert first == third != second
    assert "one" not in first


async def test_one_key_keeps_one_cache(serving: Serving) -> None:
    engine = FakeEngine()
    async with serving(engine, api_keys=("one",)) as client:
        await client.post(COMPLETIONS, json={"prompt": "x"}, headers={"authorization": "Bearer one"})
    assert engine.calls[0].cache_salt == ""


# --- disconnects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_leaves_ends_its_request(serving: Serving, is_streamed: bool) -> None:
    """H54: for plain requests too."""
    from tests.server.fake_engine import say

    engine = FakeEngine(lambda params: [*say("a", "b")(params)[:1], None])
    async with serving(engine) as client:
        body = b'{"prompt": "x", "stream": %s}' % (b"true" if is_streamed else b"false")
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await asyncio.wait_for(engine.waiting.wait(), 10)
        if is_streamed:
            assert b'"text":"a"' in await reader.readuntil(b"\n\n\r\n")
        assert not engine.aborted.is_set()
        writer.close()
        await asyncio.wait_for(engine.aborted.wait(), 10)
        assert (await client.get("/health")).status_code == 200


async def test_a_client_that_leaves_within_its_body_starts_nothing(serving: Serving) -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await client.get("/health")).status_code == 200
    assert engine.calls == []


async def test_many_streams_at_once_are_all_whole(serving: Serving) -> None:
    engine = FakeEngine()

    async def one(client: httpx.AsyncClient) -> str:
        return (await client.post(COMPLETIONS, json={"prompt": "x", "stream": True})).text

    async with serving(engine) as client:
        texts = await asyncio.gather(*(one(client) for _ in range(64)))
    assert all(text.count('"finish_reason":"stop"') == 1 and text.endswith("data: [DONE]\n\n") for text in texts)


async def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()

    def encode(*args: Any, **kwargs: Any) -> list[int]:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(engine.tokenizer, "encode", encode)
    text = "x" * (engine.info.max_model_len * engine.tokenizer.longest_token_chars + 8193)
    async with serving(engine) as client:
        plain = await client.post(COMPLETIONS, json={"prompt": ["x", text]})
        chat = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]})
    assert check_error(plain, 400)["param"] == "prompt[1]"
    assert check_error(chat, 400)["code"] == "context_length_exceeded"
