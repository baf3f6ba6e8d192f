"""Preemption, eviction, aborts, gauges, the end: H49 to H57."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import httpx
import pytest

from octavo.core.block_pool import BlockPool
from tests.cases.conftest import Api
from tests.core.tiny_core import TinyCore, tokens_alone
from tests.system.conftest import running_server, wait_until

ENDLESS = {"model": "smollm2", "prompt": "x", "max_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize("has_cache", [True, False])
def test_h49_preempted_requests_end_with_every_token(has_cache: bool) -> None:
    # A pool of 1.3 windows for four requests that each want nearly one.
    core = TinyCore(block_size=4, num_blocks=26, max_model_len=80, enable_prefix_caching=has_cache)
    for number in range(4):
        core.add(f"r{number}", range(number * 5, number * 5 + 10), max_tokens=60)
    num_preemptions = 0
    while core.core.has_unfinished():
        num_preemptions += core.step().stats.num_preemptions
    assert num_preemptions > 0
    for number in range(4):
        alone = _tokens_alone_in_a_large_window(range(number * 5, number * 5 + 10), 60)
        assert core.tokens(f"r{number}") == alone
        assert len(alone) == 60


@pytest.mark.parametrize("has_cache", [True, False])
def test_h50_three_choices_survive_preemption(has_cache: bool) -> None:
    core = TinyCore(enable_prefix_caching=has_cache)
    core.add("a", range(6), n=3, max_tokens=12)
    num_preemptions = 0
    while core.core.has_unfinished():
        num_preemptions += core.step().stats.num_preemptions
    assert num_preemptions > 0
    for index in range(3):
        assert core.tokens("a", index) == tokens_alone(range(6), index, max_tokens=12)


def test_h51_a_victim_that_was_scheduled_in_this_step_goes_back_whole() -> None:
    core = TinyCore(policy="priority", max_num_batched_tokens=10, enable_prefix_caching=False)
    for priority in (1, 2, 3):
        core.add(f"p{priority}", range(priority * 20, priority * 20 + 5), priority=priority)
    core.step(3)
    assert core.blocks() == (0, 0, 6)
    core.add("urgent", range(80, 89), priority=0, max_tokens=2)
    core.step()
    assert core.status("p3") == "preempted"
    core.finish()
    for priority in (1, 2, 3):
        assert core.tokens(f"p{priority}") == tokens_alone(range(priority * 20, priority * 20 + 5))
    assert core.tokens("urgent") == tokens_alone(range(80, 89), max_tokens=2)


def test_h52_a_preempted_request_is_not_overtaken_for_ever() -> None:
    core = TinyCore(enable_prefix_caching=False, max_num_seqs=3)
    core.add("a", range(8), max_tokens=14)
    core.add("b", range(20, 30), max_tokens=6)
    while core.status("b") != "preempted":
        core.step()
    for number in range(30):
        core.add(f"new {number}", (50 + number, 2, 3), max_tokens=2)
        core.step()
        if core.finals("b"):
            break
    assert core.tokens("b") == tokens_alone(range(20, 30), max_tokens=6)


def test_h53_an_evicted_prefix_is_a_miss() -> None:
    pool = BlockPool(1)
    pool.publish_block(pool.take_block(), b"old", 0)
    pool.free_block(0)
    assert pool.find_block(b"old", 0) == 0
    assert pool.take_block() == 0
    assert pool.find_block(b"old", 0) is None
    pool.free_block(0)
    assert pool.find_block(b"old", 0) is None
    pool.check_invariants()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_h54_a_client_that_leaves_takes_its_request_along(api: Api, is_streamed: bool) -> None:
    api.wait_until_idle()
    before = _num_aborted(api)
    leave_in_the_middle(api, num_clients=1, is_streamed=is_streamed)
    api.wait_until_idle()
    assert _num_aborted(api) == before + 1


def test_h55_gauges_are_zero_after_all_are_aborted(api: Api) -> None:
    leave_in_the_middle(api, num_clients=4, is_streamed=True)
    api.wait_until_idle()
    samples = api.server.metrics()
    assert samples["octavo:kv_cache_usage_perc"] == 0
    assert samples['octavo:num_blocks{state="used"}'] == 0
    assert samples["octavo:num_unowned_blocks"] == 0


def test_h56_three_aborted_streams_count_three(api: Api) -> None:
    api.wait_until_idle()
    before = api.server.metrics()
    leave_in_the_middle(api, num_clients=3, is_streamed=True)
    api.wait_until_idle()
    after = api.server.metrics()
    reasons = [name for name in after if name.startswith("octavo:request_success_total")]
    changes = {name: after[name] - before.get(name, 0) for name in reasons if after[name] != before.get(name, 0)}
    assert changes == {'octavo:request_success_total{finished_reason="abort"}': 3}


def test_h57_sigterm_ends_a_stream_and_leaves_no_process(smollm2_gguf: Any, tmp_path: Any) -> None:
    options = ("--served-model-name", "smollm2", "--shutdown-timeout", "0")
    with running_server(smollm2_gguf, tmp_path / "serve.log", *options) as server:
        engine_pid = server.engine_pid()
        body = {**ENDLESS, "max_tokens": 4000, "stream": True}
        lines: list[str] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                lines += [line] if line else []
                if len(lines) == 3:
                    server.process.send_signal(signal.SIGTERM)
        assert '"error"' in "".join(lines[-2:]) or '"finish_reason":"abort"' in "".join(lines[-3:])
        assert server.process.wait(30) is not None
        wait_until(lambda: not os.path.exists(f"/proc/{engine_pid}"), 10, "the engine process is gone")


def leave_in_the_middle(api: Api, num_clients: int, is_streamed: bool) -> None:
    """Clients that ask for much, wait until all of them run, and close their connections."""
    body = httpx.Request("POST", "http://x/", json={**ENDLESS, "stream": is_streamed}).content
    url = httpx.URL(api.server.url)
    connections = [socket.create_connection((url.host, url.port)) for _ in range(num_clients)]
    try:
        for connection in connections:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
            connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        wait_until(
            lambda: api.server.metrics()["octavo:num_requests_running"] == num_clients, 20, "all of them are running"
        )
    finally:
        for connection in connections:
            connection.close()


def _num_aborted(api: Api) -> float:
    return api.server.metrics().get('octavo:request_success_total{finished_reason="abort"}', 0)


def _tokens_alone_in_a_large_window(prompt: range, max_tokens: int) -> list[int]:
    core = TinyCore(num_blocks=100, max_model_len=80, enable_prefix_caching=False)
    core.add("alone", prompt, max_tokens=max_tokens)
    core.finish()
    return core.tokens("alone")
