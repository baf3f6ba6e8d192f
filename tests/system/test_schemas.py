"""JSON schemas of every feature over HTTP, 16 at a time: the finished are valid by `jsonschema`, the rest say `length`.

By default a sample; `make test-schemas` sets OCTAVO_ALL_SCHEMAS and asks for all of them.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx
import jsonschema

from tests.structured.schemas import ACCEPTED
from tests.structured.test_schemas import assert_is_beginning, modern

NUM_AT_ONCE = 16
IS_WHOLE = bool(os.environ.get("OCTAVO_ALL_SCHEMAS"))
NAMES = list(ACCEPTED) if IS_WHOLE else list(ACCEPTED)[::5]
SEEDS = range(3) if IS_WHOLE else range(1)
MAX_TOKENS = 200 if IS_WHOLE else 60


async def ask(
    client: httpx.AsyncClient, name: str, temperature: float, seed: int, is_streamed: bool
) -> tuple[str, str]:
    """(text, finish_reason)"""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": f"Answer with {name}, as short JSON."}],
        "temperature": temperature,
        "seed": seed,
        "max_tokens": MAX_TOKENS,
        "stream": is_streamed,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": ACCEPTED[name]}},
    }
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, (name, answer.text)
    if not is_streamed:
        choice = answer.json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]


def judge(name: str, text: str) -> None:
    schema = modern(ACCEPTED[name])
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))


def test_what_is_finished_under_a_schema_is_valid(server: Any) -> None:
    async def ask_all() -> tuple[list[tuple[str, float, int]], list[tuple[str, str]]]:
        wanted = [(name, temperature, seed) for name in NAMES for temperature in (0, 1) for seed in SEEDS]
        seats = asyncio.Semaphore(NUM_AT_ONCE)
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:

            async def ask_one(number: int, name: str, temperature: float, seed: int) -> tuple[str, str]:
                async with seats:
                    return await ask(client, name, temperature, seed, is_streamed=number % 2 == 1)

            answers = await asyncio.gather(*(ask_one(number, *what) for number, what in enumerate(wanted)))
        return wanted, list(answers)

    wanted, answers = asyncio.run(ask_all())
    counts = {"stop": 0, "length": 0}
    finished = set()
    for (name, temperature, seed), (text, reason) in zip(wanted, answers, strict=True):
        counts[reason] += 1
        try:
            if reason == "stop":
                finished.add(name)
                judge(name, text)
            else:
                assert_is_beginning(text.encode())
        except (ValueError, AssertionError, jsonschema.ValidationError) as error:
            raise AssertionError(f"{name}, temperature {temperature}, seed {seed}: {text!r}") from error
    print(f"{len(NAMES)} schemas, {len(finished)} of them finished at least once: {counts}")  # noqa: T201
    assert counts["stop"] > len(wanted) / 2
