"""Pages of other origins: closed by default, opened by name."""

from __future__ import annotations

import httpx
import pytest

from octavo.server.settings import CorsSettings
from tests.server.conftest import Serving
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example"


async def preflight(client: httpx.AsyncClient, origin: str = PAGE, method: str = "POST") -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type",
    }
    return await client.options(CHAT, headers=headers)


def cors_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control")}


async def test_closed_unless_asked(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        asked = await preflight(client)
        answer = await client.get("/health", headers={"origin": PAGE})
    assert asked.status_code == 405
    assert cors_headers(asked) == cors_headers(answer) == {}


async def test_a_preflight_needs_no_key_but_the_request_does(serving: Serving) -> None:
    cors = CorsSettings(allowed_origins=(PAGE,))
    async with serving(FakeEngine(), cors=cors, api_keys=("key",)) as client:
        asked = await preflight(client)
        refused = await client.get("/v1/models", headers={"origin": PAGE})
        answer = await client.get("/v1/models", headers={"origin": PAGE, "authorization": "Bearer key"})
    assert asked.status_code == 204
    assert cors_headers(asked) == {
        "access-control-allow-origin": PAGE,
        "access-control-allow-methods": "POST",
        "access-control-allow-headers": "authorization,content-type",
        "access-control-max-age": "600",
    }
    # The page must be able to read why it was refused.
    assert refused.status_code == 401
    for other in (refused, answer):
        assert other.headers["access-control-allow-origin"] == PAGE
        assert other.headers["access-control-expose-headers"] == "x-request-id, retry-after, x-octavo-ignored-fields"
        assert other.headers["vary"] == "Origin"
    assert asked.headers["x-request-id"]


async def test_another_origin_gets_no_headers(serving: Serving) -> None:
    async with serving(FakeEngine(), cors=CorsSettings(allowed_origins=(PAGE,))) as client:
        for origin in ("https://evil.example", PAGE + ".evil.example", "http://chat.example", "null"):
            asked = await preflight(client, origin)
            assert asked.status_code == 403
            assert asked.json()["error"]["type"] == "permission_error"
            answer = await client.get("/health", headers={"origin": origin})
            assert answer.status_code == 200
            assert cors_headers(asked) == cors_headers(answer) == {}


async def test_any_origin_is_a_star(serving: Serving) -> None:
    async with serving(FakeEngine(), cors=CorsSettings(allowed_origins=("*",))) as client:
        answer = await client.get("/health", headers={"origin": PAGE})
        plain = await client.get("/health")
    assert answer.headers["access-control-allow-origin"] == "*"
    assert cors_headers(plain) == {}


async def test_methods_and_headers_by_name(serving: Serving) -> None:
    cors = CorsSettings(
        allowed_origins=(PAGE,),
        allowed_methods=("GET", "POST"),
        allowed_headers=("Authorization", "X-Mine"),
        allow_credentials=True,
    )
    async with serving(FakeEngine(), cors=cors) as client:
        asked = await preflight(client)
        refused = await preflight(client, method="DELETE")
    assert asked.headers["access-control-allow-methods"] == "GET, POST"
    assert asked.headers["access-control-allow-headers"] == "Authorization, X-Mine"
    assert asked.headers["access-control-allow-credentials"] == "true"
    assert refused.status_code == 403
    assert "--allowed-methods" in refused.json()["error"]["message"]


async def test_a_stream_can_be_read_too(serving: Serving) -> None:
    async with serving(FakeEngine(), cors=CorsSettings(allowed_origins=(PAGE,))) as client:
        answer = await client.post("/v1/completions", headers={"origin": PAGE}, json={"prompt": "x", "stream": True})
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.text.endswith("data: [DONE]\n\n")
