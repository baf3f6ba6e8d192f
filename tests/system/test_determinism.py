"""The same request with a seed gives the same bytes, whatever else runs at the same time."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}
CHAT = {"messages": [{"role": "user", "content": "Tell me something about the sea."}]}
SEEDED = {"model": "smollm2", "seed": 1234, "temperature": 1, "max_tokens": 16}

# name -> (path, body)
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "two of a prompt": ("/v1/completions", {"prompt": "Once upon a time", "n": 2, "logprobs": 1}),
    "two prompts": ("/v1/completions", {"prompt": ["Once upon a time", "The sea"], "top_p": 0.9, "top_k": 40}),
    "penalties": ("/v1/completions", {"prompt": "a a a a", "repetition_penalty": 1.2, "presence_penalty": 1}),
    "schema": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ),
    "forced call": ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": "required"}),
    "offered tools": ("/v1/chat/completions", {**CHAT, "tools": TOOLS}),
    "echo": ("/v1/completions", {"prompt": "It was a dark night.", "echo": True, "logprobs": 1}),
}


async def ask(client: httpx.AsyncClient, name: str, **changes: Any) -> str:
    """All that was answered but ids and times, as one text."""
    path, body = REQUESTS[name]
    answer = await client.post(path, json={**SEEDED, **body, **changes})
    assert answer.status_code == 200, answer.text
    return json.dumps(without_ids(answer.json()["choices"]))


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_ids(entry) for key, entry in value.items() if key != "id"}
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value


async def ask_streamed(client: httpx.AsyncClient, name: str) -> dict[int, tuple[str, str, str]]:
    """Each choice's text, arguments and reason, joined of its chunks."""
    path, body = REQUESTS[name]
    answer = await client.post(path, json={**SEEDED, **body, "stream": True})
    joined: dict[int, tuple[str, str, str]] = {}
    for event in answer.text.split("\n\n")[:-2]:
        for choice in json.loads(event[6:])["choices"]:
            text, arguments, reason = joined.get(choice["index"], ("", "", ""))
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            for call in choice.get("delta", {}).get("tool_calls") or []:
                arguments += call["function"].get("arguments") or ""
            joined[choice["index"]] = (text, arguments, choice["finish_reason"] or reason)
    return joined


def joined_of(whole: str) -> dict[int, tuple[str, str, str]]:
    joined = {}
    for choice in json.loads(whole):
        message = choice.get("message", {})
        arguments = "".join(call["function"]["arguments"] for call in message.get("tool_calls") or [])
        text = choice["text"] if "text" in choice else message["content"] or ""
        joined[choice["index"]] = (text, arguments, choice["finish_reason"])
    return joined


async def be_noisy(client: httpx.AsyncClient, number: int, is_over: asyncio.Event) -> None:
    """Requests of all kinds, some of which are left in the middle."""
    dice = random.Random(number)
    while not is_over.is_set():
        path, body = REQUESTS[dice.choice(list(REQUESTS))]
        body = {**SEEDED, **body, "seed": None, "max_tokens": dice.choice([1, 5, 12]), "stream": dice.random() < 0.5}
        if dice.random() < 0.3:
            body = {"prompt": "noise " * dice.randrange(1, 40), "max_tokens": 8, "ignore_eos": True}
            path = "/v1/completions"
        try:
            answer = await client.post(path, json=body, timeout=dice.choice([0.2, 60, 60, 60]))
        except httpx.TimeoutException:
            continue
        assert answer.status_code == 200, answer.text


def test_a_seeded_request_gives_the_same_bytes_whatever_else_runs(server: Any) -> None:
    async def check() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            alone = {name: await ask(client, name) for name in REQUESTS}
            for name in ("chat", "schema", "echo"):
                assert await ask(client, name, cache_salt="not cached") == alone[name]
            is_over = asyncio.Event()
            neighbours = [asyncio.create_task(be_noisy(client, number, is_over)) for number in range(16)]
            together = await asyncio.gather(*(ask(client, name) for name in REQUESTS))
            assert dict(zip(REQUESTS, together, strict=True)) == alone
            streams = await asyncio.gather(*(ask_streamed(client, name) for name in REQUESTS))
            for name, joined in zip(REQUESTS, streams, strict=True):
                assert joined == joined_of(alone[name]), name
            is_over.set()
            await asyncio.gather(*neighbours)
            assert await ask(client, "chat", seed=1235) != alone["chat"]

    asyncio.run(check())
