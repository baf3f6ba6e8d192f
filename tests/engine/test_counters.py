"""The counters agree with each other whatever ends the requests, and the queue is counted as it is."""

from __future__ import annotations

import asyncio

from octavo import AsyncEngine, SamplingParams

from .test_async_engine import ENDLESS, assert_all_is_free, read, with_engine

REASONS = ("stop", "length", "abort", "error")


def count_finished(engine: AsyncEngine) -> dict[str, float]:
    return {reason: engine.metrics.read("request_success_total", finished_reason=reason) for reason in REASONS}


def test_every_sequence_that_was_accepted_is_counted_once() -> None:
    async def check(engine: AsyncEngine) -> None:
        read_whole = [read(engine.generate(b"a", SamplingParams(max_tokens=4, n=2))) for _ in range(3)]
        read_whole += [read(engine.generate(b"x", SamplingParams(max_tokens=9))) for _ in range(2)]
        named = [asyncio.ensure_future(read(engine.generate(b"a", ENDLESS, request_id="named"))) for _ in range(2)]
        left = [engine.generate(b"a", ENDLESS) for _ in range(4)]
        await asyncio.gather(*read_whole, *(anext(stream) for stream in left))
        for stream in left:
            await stream.aclose()
        while not await engine.abort("named"):
            await asyncio.sleep(0)
        await asyncio.gather(*named)
        await assert_all_is_free(engine)

        finished = count_finished(engine)
        assert finished == {"length": 6, "stop": 2, "abort": 6, "error": 0}
        metrics = engine.metrics
        # By request: 3 + 2 + 2 + 4, and all of them were computed before they ended.
        for name in (
            "e2e_request_latency_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_params_n",
            "request_params_max_tokens",
        ):
            assert metrics.read(f"{name}_count") == 11, name
        num_begun = metrics.read("time_to_first_token_seconds_count")
        for name in ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"):
            assert metrics.read(f"{name}_count") == num_begun, name
        assert metrics.read("request_generation_tokens_sum") == metrics.read("generation_tokens_total")
        assert metrics.read("request_params_n_sum") == sum(finished.values())

    with_engine(check)


def test_the_queue_is_what_is_beyond_the_seats() -> None:
    async def check(engine: AsyncEngine) -> None:
        assert [engine.count_queued(num_more) for num_more in (1, 2, 3)] == [0, 0, 1]
        streams = [engine.generate(b"a", ENDLESS) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        assert [engine.count_queued(num_more) for num_more in (0, 1, 4)] == [0, 1, 4]
        waiting = asyncio.ensure_future(read(engine.generate(b"a", SamplingParams(max_tokens=1))))
        while engine.stats.num_waiting == 0:
            await asyncio.sleep(0)
        assert engine.count_queued(0) == 1
        for stream in streams:
            await stream.aclose()
        await waiting
        await assert_all_is_free(engine)
        assert engine.count_queued(1) == 0

    with_engine(check, max_num_seqs=2)


def test_a_delta_tells_once_how_long_its_request_waited() -> None:
    async def check(engine: AsyncEngine) -> None:
        deltas = await read(engine.generate(b"a", SamplingParams(max_tokens=5)))
        told = [delta.queue_time_s for delta in deltas if delta.queue_time_s is not None]
        assert len(told) == 1
        assert 0 <= told[0] == engine.metrics.read("request_queue_time_seconds_sum")

    with_engine(check)


def test_the_cache_is_described_under_the_chosen_prefix() -> None:
    async def check(engine: AsyncEngine) -> None:
        assert b'octavo:cache_config_info{block_size="16",cache_dtype=' in engine.metrics.render()

    with_engine(check)
