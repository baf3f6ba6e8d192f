"""The official client against the application with a fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from octavo.engine.outputs import CompletionDelta
from octavo.errors import EngineDeadError
from tests.server.conftest import Serving
from tests.server.fake_engine import FakeEngine, say

pytestmark = pytest.mark.anyio

HI: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def connected(serving: Serving, engine: FakeEngine, **settings: object) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(engine, **settings) as http,
        openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="key", max_retries=0) as client,
    ):
        yield client


async def test_a_chat_whole_and_streamed(serving: Serving) -> None:
    async with connected(serving, FakeEngine(say("Hel", "lo"))) as client:
        whole = await client.chat.completions.create(
            model="fake", messages=HI, logprobs=True, top_logprobs=2, extra_body={"top_k": 5, "min_p": 0.1}
        )
        stream = await client.chat.completions.create(
            model="fake", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == "Hello"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    assert whole.choices[0].logprobs.content[0].token == "H"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello"
    assert chunks[-1].usage == whole.usage


async def test_a_completion_whole_and_streamed(serving: Serving) -> None:
    async with connected(serving, FakeEngine(say("Hel", "lo"))) as client:
        whole = await client.completions.create(model="fake", prompt="x", logprobs=2)
        stream = await client.completions.create(model="fake", prompt="x", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.choices[0].text == text == "Hello"
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.tokens == ["H", "l"]


async def test_errors_are_the_clients_own_classes(serving: Serving) -> None:
    async with connected(serving, FakeEngine(), api_keys=("key",)) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="fake", messages=HI, temperature=3)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-4")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
    assert bad.value.param == "temperature"
    assert "temperature is 3" in bad.value.message


async def test_a_fault_within_a_stream_raises_in_the_client(serving: Serving) -> None:
    """H33."""
    deltas = [CompletionDelta(index=0, text="a", token_ids=[1]), EngineDeadError("The engine process died.")]
    async with connected(serving, FakeEngine(lambda params: deltas)) as client:
        stream = await client.chat.completions.create(model="fake", messages=HI, stream=True)
        texts = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
        with pytest.raises(openai.APIError, match="The engine process died"):
            await anext(stream)
    assert texts == ["", "a"]
