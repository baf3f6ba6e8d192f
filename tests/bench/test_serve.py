"""A whole measurement against fake servers: what is counted, what is named, in which order they are asked."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest

from octavo.bench.http_client import parse_url
from octavo.bench.outcome import Outcome
from octavo.bench.result import BenchResult
from octavo.bench.serve import (
    LoadOptions,
    Server,
    find_model,
    measure_serving,
    parse_extra_body,
    run_closed_loop,
    summarize,
)
from octavo.bench.workload import PlannedRequest, make_workload
from octavo.errors import ConfigError
from tests.bench.fake_server import Answer, Connection, answer_in_full, fake_server, text_event, usage_event

FIXED = LoadOptions(workload=make_workload("fixed", 5, 3), concurrencies=(2,), num_requests=4, num_warmup=0)


def ignore_progress(what: str, num_done: int, num_total: int) -> None:
    pass


def server_at(url: str, **fields: Any) -> Server:
    return Server(endpoint=parse_url("--url", url), model="fake-model", **fields)


def measure(answer: Answer, options: LoadOptions = FIXED, **fields: Any) -> BenchResult:
    with fake_server(answer) as fake:
        return measure_serving([server_at(fake.url, **fields)], options, ignore_progress)


def test_all_is_well() -> None:
    result = measure(answer_in_full, dataclasses.replace(FIXED, concurrencies=(1, 2)))
    assert [(row.name, row.x, row.marks, row.failures) for row in result.rows] == [
        ("1 user", 1, ("exact",), {}),
        ("2 users", 2, ("exact",), {}),
    ]
    metrics = result.rows[1].metrics
    assert (metrics["num_requests"], metrics["output_tokens"], metrics["prompt_tokens"]) == (4, 12, 20)
    assert metrics["output_tokens_per_s"] == pytest.approx(12 / metrics["duration_s"])  # type: ignore[operator]
    assert metrics["total_tokens_per_s"] == pytest.approx(32 / metrics["duration_s"])  # type: ignore[operator]
    assert result.num_failures == 0


def test_chat_is_asked_as_chat() -> None:
    with fake_server() as fake:
        result = measure_serving([server_at(fake.url, is_chat=True)], FIXED, ignore_progress)
        assert result.rows[0].marks == ("exact",)
        assert all(body["messages"][0]["role"] == "user" and "prompt" not in body for body in fake.bodies)


def test_what_is_asked_can_be_changed() -> None:
    with fake_server() as fake:
        extra = parse_extra_body('{"ignore_eos": null, "top_k": 1}')
        measure_serving([server_at(fake.url, extra_body=extra)], FIXED, ignore_progress)
    assert {"ignore_eos", "top_k"} & set(fake.bodies[0]) == {"top_k"}
    assert fake.bodies[0]["stream_options"] == {"include_usage": True}
    with pytest.raises(ConfigError, match="--extra-body"):
        parse_extra_body("[1]")


def test_warm_up_requests_are_sent_and_not_counted() -> None:
    with fake_server() as fake:
        options = dataclasses.replace(FIXED, num_warmup=3)
        result = measure_serving([server_at(fake.url)], options, ignore_progress)
        assert len(fake.bodies) == 7
        assert result.rows[0].metrics["num_requests"] == 4


def test_missing_usage_is_told() -> None:
    def answer(connection: Connection, body: dict[str, Any]) -> None:
        connection.start_stream()
        for _ in range(body["max_tokens"]):
            connection.send_event(text_event("a"))
        connection.end_stream()

    result = measure(answer)
    assert (result.rows[0].marks, result.rows[0].metrics["output_tokens"]) == ((), 12)
    assert any("have no usage" in note for note in result.notes)


def test_fewer_tokens_than_asked_are_not_exact() -> None:
    def answer(connection: Connection, body: dict[str, Any]) -> None:
        answer_in_full(connection, {**body, "max_tokens": 2})

    assert measure(answer).rows[0].marks == ()


def test_failures_are_named_and_their_tokens_not_counted() -> None:
    lock, num_seen = threading.Lock(), 0

    def answer(connection: Connection, body: dict[str, Any]) -> None:
        nonlocal num_seen
        with lock:
            number, num_seen = num_seen, num_seen + 1
        if number == 0:
            connection.send_json(503, {"error": {"message": "no room"}})
        elif number == 1:
            connection.start_stream()
            connection.send_event(text_event("a"))  # and the connection ends here
        elif number == 2:
            connection.start_stream()
            connection.send_event({"error": {"message": "the engine died"}})
            connection.end_stream()
        else:
            answer_in_full(connection, body)

    result = measure(answer)
    assert result.rows[0].failures == {"HTTP 503: no room": 1, "closed early": 1, "error event: the engine died": 1}
    assert result.rows[0].marks == ()
    metrics = result.rows[0].metrics
    assert (metrics["num_requests"], metrics["num_failed"], metrics["output_tokens"]) == (4, 3, 3)


def test_a_server_that_never_ends_times_out() -> None:
    release = threading.Event()

    def answer(connection: Connection, body: dict[str, Any]) -> None:
        connection.start_stream()
        connection.send_event(text_event("a"))
        release.wait(30)

    with fake_server(answer) as fake:
        options = dataclasses.replace(FIXED, timeout_s=0.2, num_requests=1)
        result = measure_serving([server_at(fake.url)], options, ignore_progress)
        release.set()
    assert result.rows[0].failures == {"timeout after 0.2 s": 1}


def test_nobody_there() -> None:
    with fake_server() as fake:
        gone = fake.url
    result = measure_serving([server_at(gone)], FIXED, ignore_progress)
    assert result.rows[0].failures == {"connection refused": 4}
    assert result.rows[0].metrics["ttft_p50_ms"] is None
    with pytest.raises(ConfigError, match="No model list"):
        find_model(parse_url("--url", gone))


def test_the_model_is_the_first_that_is_offered() -> None:
    with fake_server() as fake:
        assert find_model(parse_url("--url", fake.url, "key")) == "fake-model"
        assert "Authorization: Bearer key" in fake.headers[0]
    with fake_server(models={"data": []}) as fake, pytest.raises(ConfigError, match="No model list"):
        find_model(parse_url("--url", fake.url))


def test_two_servers_get_the_same_prompts_in_turn() -> None:
    order: list[str] = []

    def noting(name: str) -> Answer:
        def answer(connection: Connection, body: dict[str, Any]) -> None:
            order.append(name)
            answer_in_full(connection, body)

        return answer

    options = dataclasses.replace(FIXED, num_rounds=2)
    with fake_server(noting("A")) as one, fake_server(noting("B")) as other:
        result = measure_serving([server_at(one.url), server_at(other.url)], options, ignore_progress)
    assert order == ["A"] * 4 + ["B"] * 4 + ["A"] * 4 + ["B"] * 4
    prompts = [{body["prompt"] for body in fake.bodies} for fake in (one, other)]
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == 8
    first, second = result.rows
    assert (first.name, second.name) == ("2 users A", "2 users B")
    assert first.metrics["ratio_to_b"] is not None
    assert "ratio_to_b" not in second.metrics
    assert first.metrics["output_tokens_per_s_min"] <= first.metrics["output_tokens_per_s_max"]  # type: ignore[operator]


def test_requests_that_come_by_chance() -> None:
    options = LoadOptions(workload=make_workload("fixed", 5, 2), rate=100.0, duration_s=0.2, num_warmup=0)
    result = measure(answer_in_full, options)
    assert result.rows[0].name == "100 req/s"
    assert result.rows[0].marks == ("exact",)
    assert result.rows[0].metrics["num_requests"] > 3  # type: ignore[operator]


def test_the_long_prompt_comes_when_all_chats_stream_and_their_worst_gap_is_told() -> None:
    chats_stream, long_came = threading.Barrier(2), threading.Event()

    def answer(connection: Connection, body: dict[str, Any]) -> None:
        if len(body["prompt"].split()) > 1000:
            assert not chats_stream.broken
            long_came.set()
            answer_in_full(connection, body)
            return
        connection.start_stream()
        for number in range(body["max_tokens"]):
            if number == 5:
                chats_stream.wait(30)
                long_came.wait(30)
            connection.send_event(text_event("a"))
        connection.send_event(usage_event(24, body["max_tokens"]))
        connection.end_stream()

    options = LoadOptions(workload=make_workload("long-prompt", None, 8), concurrencies=(2,), num_warmup=0)
    result = measure(answer, options)
    metrics = result.rows[0].metrics
    assert result.rows[0].failures == {}
    assert metrics["num_requests"] == 3
    assert metrics["worst_gap_ms"] > 0  # type: ignore[operator]
    assert metrics["long_ttft_ms"] > 0  # type: ignore[operator]


def test_no_more_users_than_asked_for() -> None:
    num_active, most = 0, 0

    async def sender(request: PlannedRequest) -> None:
        nonlocal num_active, most
        num_active += 1
        most = max(most, num_active)
        await asyncio.sleep(0)
        num_active -= 1

    requests = [PlannedRequest(prompt="a", max_tokens=1) for _ in range(10)]
    asyncio.run(run_closed_loop(sender, requests, 3))
    assert most == 3


def test_the_arithmetic_of_a_run() -> None:
    def outcome(sent_at: float, times: list[float], ended_at: float, **fields: Any) -> Outcome:
        request = PlannedRequest(prompt="a", max_tokens=len(times))
        return Outcome(
            request=request,
            sent_at=sent_at,
            ended_at=ended_at,
            token_times=times,
            num_output_tokens=len(times),
            num_prompt_tokens=10,
            has_usage=True,
            **fields,
        )

    metrics = summarize(
        [
            outcome(0.0, [1.0, 1.5, 2.0], 2.0, num_cached_tokens=4),
            outcome(1.0, [3.0, 4.0], 5.0),
            outcome(0.0, [], 9.0, failure="closed early"),
        ],
        duration_s=5.0,
    )
    assert metrics["output_tokens_per_s"] == 1.0
    assert metrics["total_tokens_per_s"] == 5.0
    assert metrics["requests_per_s"] == 0.4
    assert metrics["ttft_p50_ms"] == 1500.0
    assert metrics["inter_token_p50_ms"] == 500.0
    assert metrics["inter_token_max_ms"] == 1000.0
    assert metrics["tpot_p50_ms"] == 750.0
    assert metrics["end_to_end_p50_ms"] == 3000.0
    assert metrics["cached_tokens"] == 4


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"rate": 0.0}, "--rate"),
        ({"timeout_s": -1.0}, "--timeout"),
        ({"num_requests": 0}, "--num-requests"),
        ({"num_warmup": -1}, "--warmup"),
        ({"num_rounds": 0}, "--rounds"),
        ({"rate": 1.0, "duration_s": float("nan")}, "--duration"),
        ({"rate": 1.0, "workload": make_workload("long-prompt")}, "--rate"),
        ({"rate": 1e-9, "duration_s": 1e-9}, "--duration"),
    ],
)
def test_impossible_loads_are_refused(changes: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        measure(answer_in_full, dataclasses.replace(FIXED, **changes))
    assert caught.value.option == option
