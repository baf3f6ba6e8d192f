"""Many clients, rude clients, and a killed engine process: every one is answered and nothing leaks.

OCTAVO_SOAK_S sets how long the soak lasts (10 seconds unless given; the release check runs 120)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from typing import Any

import httpx

from tests.system.conftest import running_server, wait_until

SOAK_S = float(os.environ.get("OCTAVO_SOAK_S", "10"))
NUM_CLIENTS = 64
PROMPTS = [
    "Tell me about the sea.",
    "Write a poem on rain: ",
    "1, 2, 3, 4, 5,",
    "Ĉu vi parolas Esperanton? 🌶",
    "a" * 600,
]


async def one_request(client: httpx.AsyncClient, dice: random.Random) -> str:
    """Ask for something, and sometimes leave in the middle. Returns what became of it."""
    body: dict[str, Any] = {
        "model": "smollm2",
        "prompt": dice.choice(PROMPTS) + str(dice.randrange(40)),
        "max_tokens": dice.choice([1, 8, 40, 120]),
        "temperature": dice.choice([0, 1.0]),
        "n": dice.choice([1, 1, 1, 3]),
        "stream": dice.random() < 0.7,
        "ignore_eos": dice.random() < 0.5,
    }
    leaves_after = dice.choice([None, None, dice.uniform(0.05, 3)])

    async def ask() -> str:
        if not body["stream"]:
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["choices"]) == body["n"]
            return "answered"
        last, reasons = "", []
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    last = line[6:]
                    if last != "[DONE]":
                        chunk = json.loads(last)
                        assert "error" not in chunk, chunk
                        reasons += [choice["finish_reason"] for choice in chunk["choices"] if choice["finish_reason"]]
        assert last == "[DONE]"
        assert len(reasons) == body["n"], reasons
        return "answered"

    try:
        return await asyncio.wait_for(ask(), leaves_after or 120)
    except asyncio.TimeoutError:
        assert leaves_after is not None, "a request hung for two minutes"
        return "left"


async def soak(url: str) -> dict[str, int]:
    counts = {"answered": 0, "left": 0}
    until = time.monotonic() + SOAK_S

    async def client_loop(number: int) -> None:
        dice = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            while time.monotonic() < until:
                counts[await one_request(client, dice)] += 1

    await asyncio.gather(*(client_loop(number) for number in range(NUM_CLIENTS)))
    return counts


def test_many_clients_with_random_disconnects_leave_nothing_behind(server: Any) -> None:
    counts = asyncio.run(soak(server.url))
    assert counts["answered"] > NUM_CLIENTS / 2, counts
    assert counts["left"] > 0, counts

    def is_idle() -> bool:
        samples = server.metrics()
        return samples["octavo:num_requests_running"] == 0 == samples["octavo:num_requests_waiting"]

    wait_until(is_idle, 10, "nothing runs or waits any more")
    samples = server.metrics()
    assert samples['octavo:num_blocks{state="used"}'] == 0
    assert samples["octavo:num_unowned_blocks"] == 0
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    print(counts)  # noqa: T201


def test_a_killed_engine_process_answers_everyone_and_comes_back(smollm2_gguf: Any, tmp_path: Any) -> None:
    with running_server(smollm2_gguf, tmp_path / "serve.log", "--served-model-name", "smollm2") as server:

        async def kill_under_load() -> list[Any]:
            body = {"model": "smollm2", "prompt": "x", "max_tokens": 1500, "ignore_eos": True}
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                plain = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(8)]

                async def stream() -> list[str]:
                    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                        return [line async for line in answer.aiter_lines() if line]

                streams = [asyncio.create_task(stream()) for _ in range(8)]
                while server.metrics()["octavo:num_requests_running"] < 16:
                    await asyncio.sleep(0.02)
                first_pid = server.engine_pid()
                os.kill(first_pid, signal.SIGKILL)
                answers = await asyncio.gather(*plain, *streams)
                return [first_pid, answers]

        first_pid, answers = asyncio.run(kill_under_load())
        killed_at = time.monotonic()
        for answer in answers[:8]:
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["message"]
        for lines in answers[8:]:
            errors = [json.loads(line[6:]) for line in lines if line.startswith('data: {"error"')]
            assert len(errors) == 1, lines[-3:]

        def answers_again() -> bool:
            answer = httpx.post(
                f"{server.url}/v1/completions", json={"model": "smollm2", "prompt": "Hi", "max_tokens": 2}, timeout=30
            )
            return answer.status_code == 200

        wait_until(answers_again, 30, "the service is back")
        print(f"back after {time.monotonic() - killed_at:.2f} s")  # noqa: T201
        assert server.engine_pid() != first_pid
        assert server.metrics()["octavo:engine_restarts_total"] == 1


def test_sigterm_lets_a_running_stream_end_and_leaves_no_process(smollm2_gguf: Any, tmp_path: Any) -> None:
    """H57."""
    with running_server(smollm2_gguf, tmp_path / "serve.log", "--served-model-name", "smollm2") as server:
        engine_pid = server.engine_pid()
        body = {"model": "smollm2", "prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
        num_chunks, last = 0, ""
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line:
                    last = line
                    num_chunks += 1
                    if num_chunks == 3:
                        server.process.send_signal(signal.SIGTERM)
        assert last == "data: [DONE]"
        assert server.process.wait(30) == 0
        wait_until(lambda: not os.path.exists(f"/proc/{engine_pid}"), 10, "the engine process is gone")
