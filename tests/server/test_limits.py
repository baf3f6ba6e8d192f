"""What takes too long, comes too late, or would wait too long."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from octavo.server.body import read_json_body
from octavo.server.deadline import Deadline
from tests.server.conftest import Serving
from tests.server.fake_engine import FakeEngine, say
from tests.server.sse import read_events
from tests.server.test_http import check_error

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"


def endless_after(*texts: str) -> FakeEngine:
    return FakeEngine(lambda params: [*say(*texts, "never")(params)[: len(texts)], None])


# --- --request-timeout ----------------------------------------------------------------------------------------------


async def test_a_request_that_takes_too_long_is_a_504_and_aborted(serving: Serving) -> None:
    engine = endless_after("a")
    async with serving(engine, request_timeout_s=0.05) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "x"})
        assert engine.aborted.is_set()
        assert (await client.get("/health")).status_code == 200
    error = check_error(answer, 504)
    assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
    assert "0.05 seconds (--request-timeout)" in error["message"]
    assert answer.headers["x-should-retry"] == "false"


async def test_the_official_client_does_not_send_it_again(serving: Serving) -> None:
    engine = endless_after("a")
    async with (
        serving(engine, request_timeout_s=0.05) as http,
        openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="key", max_retries=5) as client,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="fake", prompt="x")
    assert caught.value.status_code == 504
    assert len(engine.calls) == 1


async def test_a_stream_that_takes_too_long_ends_with_an_error_event(serving: Serving) -> None:
    engine = endless_after("a", "b")
    async with serving(engine, request_timeout_s=0.05) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": ["x", "y"], "stream": True})
    assert answer.status_code == 200
    *chunks, last = read_events(answer)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) in ("abab", "aabb")
    assert last["error"]["code"] == "request_timeout"
    assert all(call.is_aborted for call in engine.calls)


async def test_a_request_in_time_is_not_disturbed(serving: Serving) -> None:
    async with serving(FakeEngine(), request_timeout_s=60) as client:
        plain = await client.post(COMPLETIONS, json={"prompt": "x"})
        streamed = await client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
    assert plain.json()["choices"][0]["text"] == "Hello"
    assert "error" not in read_events(streamed)[-1]


async def test_a_deadline_leaves_other_cancellations_alone() -> None:
    async def wait() -> None:
        async with Deadline(60):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with Deadline(None):
        pass


# --- --max-num-queued-requests --------------------------------------------------------------------------------------


async def test_a_full_queue_is_a_429_that_says_when_to_come_back(serving: Serving) -> None:
    engine = FakeEngine(num_queued=2)
    async with serving(engine, max_num_queued_requests=2) as client:
        assert (await client.post(COMPLETIONS, json={"prompt": "x"})).status_code == 200
        for body in ({"prompt": "x", "n": 2}, {"prompt": ["x", "y"], "stream": True}):
            refused = await client.post(COMPLETIONS, json=body)
            error = check_error(refused, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert "3 generations would wait" in error["message"]
            assert refused.headers["retry-after"] == "1"
        engine.num_queued = 9
        check_error(await client.post(COMPLETIONS, content=b"not even read"), 429)
        assert (await client.get("/v1/models")).status_code == 200
    assert len(engine.calls) == 1


async def test_without_a_limit_everybody_waits(serving: Serving) -> None:
    async with serving(FakeEngine(num_queued=10_000)) as client:
        assert (await client.post(COMPLETIONS, json={"prompt": "x"})).status_code == 200


# --- bodies that do not come ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_body_that_does_not_come_is_a_408(serving: Serving, path: str) -> None:
    async with serving(FakeEngine(), body_timeout_s=0.05) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{" % path.encode())
        head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 408 ")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "body_timeout")
    assert "1 bytes came" in error["message"]


async def test_a_large_body_gets_more_time_as_it_comes() -> None:
    pieces = [b"x" * 2**20] * 10

    async def receive() -> dict[str, object]:
        await asyncio.sleep(0.1)
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    # Twice the limit in all, but the first piece has bought a minute.
    body = await read_json_body({"headers": []}, receive, 2**24, timeout_s=0.5)
    assert len(body) == 10 * 2**20
