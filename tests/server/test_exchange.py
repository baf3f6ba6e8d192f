"""A request's id and its line in the access log, and the paths behind a proxy."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import httpx
import pytest

from octavo.errors import EngineDeadError
from octavo.server.request_ids import RequestIdFilter, choose_request_id, current_request_id
from tests.server.conftest import Serving
from tests.server.fake_engine import FakeEngine, say
from tests.server.sse import read_events

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    lines = [record.getMessage() for record in caplog.records if record.name == "octavo.access"]
    return [parse_line(line) for line in lines]


def parse_line(line: str) -> dict[str, str]:
    pairs = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line)
    assert " ".join(f"{name}={value}" for name, value in pairs) == line
    return {name: json.loads(value) if value.startswith('"') else value for name, value in pairs}


# --- ids ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"a", b"req_1.2:3@x/y+z=-", b"x" * 128])
def test_a_sane_id_is_kept(sent: bytes) -> None:
    assert choose_request_id(sent) == sent.decode()


@pytest.mark.parametrize("sent", [None, b"", b"x" * 129, b"a b", b"a\nb", b"a\n", b'"', "ü".encode(), b"%41"])
def test_any_other_is_replaced_by_a_new_one(sent: bytes | None) -> None:
    first, second = choose_request_id(sent), choose_request_id(sent)
    assert first != second
    assert re.fullmatch("[0-9a-f]{32}", first)


async def test_every_answer_has_the_id(serving: Serving) -> None:
    headers = {"x-request-id": "mine-7"}
    async with serving(FakeEngine(), api_keys=("key",)) as client:
        refused = await client.get("/v1/models", headers=headers)
        headers["authorization"] = "Bearer key"
        answers = [
            refused,
            await client.get("/health", headers=headers),
            await client.get("/nothing", headers=headers),
            await client.put(COMPLETIONS, headers=headers),
            await client.post(COMPLETIONS, headers=headers, content=b"{"),
            await client.post(COMPLETIONS, headers=headers, json={"prompt": "x"}),
            await client.post(COMPLETIONS, headers=headers, json={"prompt": "x", "stream": True}),
            await client.post("/tokenize", headers=headers, json={"prompt": "x"}),
        ]
    assert [answer.status_code for answer in answers] == [401, 200, 404, 405, 400, 200, 200, 200]
    assert [answer.headers.get_list("x-request-id") for answer in answers] == [["mine-7"]] * len(answers)
    assert answers[5].json()["id"] == "cmpl-mine-7"
    assert read_events(answers[6])[0]["id"] == "cmpl-mine-7"


async def test_an_insane_id_does_not_come_back(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        answer = await client.get("/health", headers={"x-request-id": "a b" * 100})
        other = await client.get("/health")
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    assert answer.headers["x-request-id"] != other.headers["x-request-id"]


async def test_the_same_id_twice_at_once_is_answered_twice(serving: Serving) -> None:
    """H32."""
    engine = FakeEngine()
    async with serving(engine) as client:
        asking = [client.post(COMPLETIONS, headers={"x-request-id": "twin"}, json={"prompt": "x"}) for _ in range(2)]
        answers = await asyncio.gather(*asking)
    assert [answer.status_code for answer in answers] == [200, 200]


def test_a_log_line_names_the_running_request_once() -> None:
    record = logging.LogRecord("octavo", logging.INFO, "", 0, "something about %s", ("a",), None)
    tag = RequestIdFilter().filter
    assert tag(record)
    assert record.request == ""
    token = current_request_id.set("mine-7")
    try:
        tag(record)
        assert record.request == " [mine-7]"
        tag(named := logging.LogRecord("octavo", logging.INFO, "", 0, "request mine-7 failed", (), None))
        assert named.request == ""
    finally:
        current_request_id.reset(token)


async def test_a_failure_is_logged_under_its_id(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(lambda params: [ValueError("a bug")])
    async with serving(engine) as client:
        answer = await client.post(COMPLETIONS, headers={"x-request-id": "mine-7"}, json={"prompt": "x"})
    assert answer.status_code == 500
    assert [record.getMessage() for record in caplog.records] == ["request mine-7 failed"]


# --- the access log -------------------------------------------------------------------------------------------------


async def test_a_generation_is_told_with_its_tokens_and_times(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(FakeEngine(say("a", "b", num_cached=1)), access_log=True, api_keys=("k1", "k2")) as client:
        client.headers["authorization"] = "Bearer k2"
        body = {"messages": HI, "n": 2, "stream": True, "model": "also-fake"}
        await client.post(CHAT, headers={"x-request-id": "mine-7"}, json=body)
    [line] = access_lines(caplog)
    assert float(line.pop("total_s")) >= float(line.pop("first_token_s")) >= 0
    assert line == {
        "id": "mine-7",
        "client": "127.0.0.1",
        "method": "POST",
        "path": CHAT,
        "status": "200",
        "key": "key-2",
        "model": "also-fake",
        "stream": "true",
        "prompt_tokens": "13",
        "cached_tokens": "1",
        "completion_tokens": "4",
        "finish_reasons": "stop,stop",
    }


async def test_refusals_and_faults_say_why(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    broken = FakeEngine(lambda params: [*say("a", "b")(params)[:1], EngineDeadError("It died.", code="engine_dead")])
    async with serving(broken, access_log=True, api_keys=("secret",)) as client:
        await client.get("/v1/models", headers={"authorization": "Bearer wrong-secret"})
        client.headers["authorization"] = "Bearer secret"
        await client.post(COMPLETIONS, json={"prompt": "x", "tempurature": 1})
        await client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
    lines = access_lines(caplog)
    assert [(line["status"], line.get("error"), line.get("key")) for line in lines] == [
        ("401", None, None),
        ("400", "unknown_field", "key-1"),
        ("200", "engine_dead", "key-1"),
    ]
    assert "secret" not in caplog.text


async def test_a_client_that_left_is_told(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = FakeEngine(lambda params: [None])
    async with serving(engine, access_log=True) as client:
        body = b'{"prompt": "x"}'
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await asyncio.wait_for(engine.waiting.wait(), 10)
        writer.close()
        await asyncio.wait_for(engine.aborted.wait(), 10)
        while not access_lines(caplog):
            await asyncio.sleep(0.001)
    [line] = access_lines(caplog)
    assert (line["status"], line["client_left"], line["completion_tokens"]) == ("499", "true", "0")


async def test_a_client_cannot_write_lines_of_its_own(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(FakeEngine(), access_log=True) as client:
        await client.get("/a%0aid=9%20status=200%22" + "x" * 1000)
    [line] = access_lines(caplog)
    assert line["path"].startswith('/a\nid=9 status=200"xxx')
    assert len(line["path"]) == 200
    assert line["status"] == "404"


async def test_without_the_option_nothing_is_written(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(FakeEngine()) as client:
        await client.get("/health")
    assert access_lines(caplog) == []


async def test_requests_are_counted_by_route(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        await client.get("/v1/models/fake")
        await client.get("/v1/models/also-fake")
        await client.get("/v1/models/other")
        await client.request("BREW", "/nothing")
        text = (await client.get("/metrics")).text
    assert 'http_requests_total{handler="/v1/models/{model}",method="GET",status="2xx"} 2.0' in text
    assert 'http_requests_total{handler="/v1/models/{model}",method="GET",status="4xx"} 1.0' in text
    assert "nothing" not in text


# --- behind a proxy -------------------------------------------------------------------------------------------------


async def test_the_root_path_may_be_there_or_not(serving: Serving) -> None:
    async with serving(FakeEngine(), root_path="/llm", api_keys=("key",)) as client:
        statuses = [
            (await client.get(path)).status_code
            for path in ("/health", "/llm/health", "/llm/v1/models", "/llmhealth", "/llm/llm/health")
        ]
        client.headers["authorization"] = "Bearer key"
        models: httpx.Response = await client.get("/llm/v1/models/fake")
        document = (await client.get("/llm/openapi.json")).json()
    assert statuses == [200, 200, 401, 401, 401]
    assert models.json()["id"] == "fake"
    assert document["servers"] == [{"url": "/llm"}]
