"""`AsyncEngine` with a real engine process that runs a model that counts: streams, aborts, deaths and shutdowns."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
import uvloop

from octavo import AsyncEngine, EngineArgs, SamplingParams
from octavo.engine.client import MAX_FAILURES_IN_A_ROW
from octavo.engine.outputs import CompletionDelta
from octavo.errors import ConfigError, CorruptFileError, EngineDeadError, InvalidRequestError

from . import fake_model
from .fake_model import DIE, EOS, EXECUTOR_NAME, HANG, RAISE, TEAR, make_tokenizer

# Generous: what is waited for comes within milliseconds, or never.
TIMEOUT_S = 60.0
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
Stream = AsyncGenerator[CompletionDelta, None]


async def start(name: str = "slow", **options: Any) -> AsyncEngine:
    return await AsyncEngine.start(
        EngineArgs(model="fake", **{"max_model_len": 20_000, **options}),
        source=fake_model.source(name),
        tokenizer=make_tokenizer(),
        executor_name=EXECUTOR_NAME,
        restart_delay_s=0.0,
    )


def with_engine(test: Callable[[AsyncEngine], Awaitable[None]], name: str = "slow", **options: Any) -> None:
    """Run `test` on an engine of its own; nothing of it may be left afterwards."""

    async def main() -> None:
        engine = await start(name, **options)
        try:
            await asyncio.wait_for(test(engine), TIMEOUT_S)
        finally:
            await engine.shutdown()
        assert engine.engine_pid is None

    asyncio.run(main())


async def read(stream: Stream) -> list[CompletionDelta]:
    return [delta async for delta in stream]


def text_of(deltas: list[CompletionDelta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


async def assert_all_is_free(engine: AsyncEngine) -> None:
    """A ping follows the aborts through the same socket, so the gauges after its answer are those after the aborts."""
    await engine.check_health(TIMEOUT_S)
    assert engine.num_unfinished_requests == 0
    assert engine.metrics.read("num_requests_running") == 0
    assert engine.metrics.read("num_requests_waiting") == 0
    assert engine.metrics.read("kv_cache_usage_perc") == 0
    assert engine.metrics.read("num_blocks", state="used") == 0
    assert engine.metrics.read("num_unowned_blocks") == 0


def finished(engine: AsyncEngine, reason: str) -> float:
    return engine.metrics.read("request_success_total", finished_reason=reason)


def test_a_stream_ends_with_one_final_delta() -> None:
    async def check(engine: AsyncEngine) -> None:
        deltas = await read(engine.generate(b"a", SamplingParams(max_tokens=5)))
        assert text_of(deltas) == "bcdef"
        assert [token for delta in deltas for token in delta.token_ids] == list(b"bcdef")
        assert [delta.is_final for delta in deltas].count(True) == 1
        assert deltas[-1].is_final
        assert deltas[-1].finish_reason == "length"
        assert deltas[-1].num_prompt_tokens == 1
        deltas = await read(engine.generate(b"x", SamplingParams(max_tokens=5)))
        assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].token_ids) == ("yz", "stop", [EOS])
        await assert_all_is_free(engine)

    with_engine(check)


def test_what_it_tells_about_itself() -> None:
    async def check(engine: AsyncEngine) -> None:
        info = engine.info
        assert (info.model, info.served_model_names, info.max_model_len) == ("fake", ("a", "b"), 100)
        assert (info.vocab_size, info.eos_token_ids) == (fake_model.VOCAB_SIZE, (EOS,))
        assert info.report.num_blocks > 0
        assert engine.chat_template is None
        assert engine.is_running

    with_engine(check, max_model_len=100, served_model_name=("a", "b"))


def test_n_generations_share_a_stream() -> None:
    async def check(engine: AsyncEngine) -> None:
        deltas = await read(engine.generate(b"a", SamplingParams(n=3, max_tokens=4)))
        assert [text_of(deltas, index) for index in range(3)] == ["bcde"] * 3
        assert [delta.finish_reason for delta in deltas].count("length") == 3
        assert [delta.is_final for delta in deltas].count(True) == 1
        assert deltas[-1].is_final

    with_engine(check)


def test_a_stop_string_ends_one_of_n_and_the_engine_lets_it_go() -> None:
    async def check(engine: AsyncEngine) -> None:
        deltas = await read(engine.generate(b"a", SamplingParams(n=2, stop=("efg",), max_tokens=None)))
        assert [text_of(deltas, index) for index in range(2)] == ["bcd", "bcd"]
        assert {delta.stop_reason for delta in deltas if delta.finish_reason} == {"efg"}
        assert sum(len(delta.token_ids) for delta in deltas) == 12
        await assert_all_is_free(engine)
        assert finished(engine, "stop") == 2
        assert finished(engine, "abort") == 0
        assert engine.metrics.read("generation_tokens_total") == 12

    with_engine(check)


def test_many_streams_at_once_do_not_mix() -> None:
    async def check(engine: AsyncEngine) -> None:
        starts = [97 + number % 20 for number in range(64)]
        streams = [engine.generate([token], SamplingParams(max_tokens=5, n=1 + token % 2)) for token in starts]
        answers = await asyncio.gather(*map(read, streams))
        for token, deltas in zip(starts, answers, strict=True):
            assert text_of(deltas) == bytes(range(token + 1, token + 6)).decode()
        assert engine.metrics.read("prompt_tokens_total") == 64
        assert engine.metrics.read("time_to_first_token_seconds_count") == 64
        await assert_all_is_free(engine)

    with_engine(check, name="fake")


def test_a_slow_reader_finds_joined_deltas_and_loses_nothing() -> None:
    async def check(engine: AsyncEngine) -> None:
        stream = engine.generate(b"a", SamplingParams(n=2, max_tokens=20, logprobs=1))
        first = await stream.__anext__()
        await read(engine.generate(b"a", SamplingParams(max_tokens=40)))
        rest = await read(stream)
        assert len(rest) <= 3
        assert [text_of([first, *rest], index) for index in range(2)] == ["bcdefghijklmnopqrstu"] * 2
        assert sum(len(delta.logprobs) for delta in [first, *rest]) == 40
        assert [delta.is_final for delta in rest] == [False] * (len(rest) - 1) + [True]

    with_engine(check)


@pytest.mark.parametrize("way", ["close", "cancel", "break"])
def test_a_reader_that_leaves_aborts_its_request_in_the_engine(way: str) -> None:
    async def check(engine: AsyncEngine) -> None:
        stream = engine.generate(b"a", ENDLESS)
        await stream.__anext__()
        if way == "cancel":
            reader = asyncio.create_task(read(stream))
            await engine.check_health(TIMEOUT_S)
            reader.cancel()
            await asyncio.wait((reader,))
        elif way == "break":
            async for _ in stream:
                break
            await stream.aclose()
        else:
            await stream.aclose()
        await assert_all_is_free(engine)
        assert finished(engine, "abort") == 1

    with_engine(check)


def test_a_stream_that_is_never_read_sends_nothing() -> None:
    async def check(engine: AsyncEngine) -> None:
        stream = engine.generate(b"a", ENDLESS)
        await stream.aclose()
        await assert_all_is_free(engine)
        assert engine.stats.num_scheduled_tokens_total == 0

    with_engine(check)


def test_three_aborted_streams_count_three_and_the_gauges_return_to_zero() -> None:
    async def check(engine: AsyncEngine) -> None:
        streams = [engine.generate(b"a", ENDLESS, request_id=f"r{number}") for number in range(3)]
        for stream in streams:
            await stream.__anext__()
        assert await engine.abort("r0")
        for stream in streams[1:]:
            await stream.aclose()
        last = (await read(streams[0]))[-1]
        assert (last.finish_reason, last.is_final) == ("abort", True)
        await assert_all_is_free(engine)
        assert finished(engine, "abort") == 3
        assert not await engine.abort("r0")

    with_engine(check)


def test_two_requests_of_one_name_are_both_answered() -> None:
    async def check(engine: AsyncEngine) -> None:
        streams = [engine.generate([token], SamplingParams(max_tokens=5), request_id="same") for token in b"ak"]
        answers = await asyncio.gather(*map(read, streams))
        assert [text_of(deltas) for deltas in answers] == ["bcdef", "lmnop"]

    with_engine(check)


def test_a_bad_request_is_refused_before_it_is_sent() -> None:
    async def check(engine: AsyncEngine) -> None:
        for call in (engine.validate, engine.generate):
            with pytest.raises(InvalidRequestError, match="token id 999"):
                call([999], SamplingParams())
            with pytest.raises(InvalidRequestError, match="use at most 99"):
                call(b"a", SamplingParams(max_tokens=100))
        engine.validate(b"a", SamplingParams(max_tokens=99))
        assert engine.num_unfinished_requests == 0

    with_engine(check, max_model_len=100)


def test_a_failure_in_a_step_ends_its_own_request_only() -> None:
    async def check(engine: AsyncEngine) -> None:
        good, bad = engine.generate(b"a", SamplingParams(max_tokens=50)), engine.generate([RAISE], ENDLESS)
        answers = await asyncio.gather(read(good), read(bad))
        assert len(text_of(answers[0])) == 25
        last = answers[1][-1]
        assert (last.finish_reason, last.is_final) == ("error", True)
        assert "the device hiccuped" in (last.error or "")
        assert finished(engine, "error") == 1
        assert engine.stats.num_restarts_total == 0

    with_engine(check)


def test_a_text_that_cannot_be_made_ends_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(engine: AsyncEngine) -> None:
        token_bytes = engine.tokenizer.token_bytes

        def broken(token_id: int) -> bytes:
            if token_id == 120:
                raise RuntimeError("no such token")
            return token_bytes(token_id)

        monkeypatch.setattr(engine.tokenizer, "token_bytes", broken)
        streams = [engine.generate([token], SamplingParams(max_tokens=5)) for token in b"aw"]
        answers = await asyncio.gather(*map(read, streams), return_exceptions=True)
        assert text_of(answers[0]) == "bcdef"  # type: ignore[arg-type]
        assert answers[1][-1].finish_reason == "error"  # type: ignore[index]
        await assert_all_is_free(engine)

    with_engine(check)


# --- death and restart --------------------------------------------------------------------------------------------


def test_kill_under_load_answers_every_client_and_the_service_is_back() -> None:
    async def check(engine: AsyncEngine) -> None:
        old_pid = engine.engine_pid
        assert old_pid is not None
        streams = [engine.generate(b"a", ENDLESS) for _ in range(32)]
        for stream in streams:
            await stream.__anext__()
        health = asyncio.create_task(engine.check_health(TIMEOUT_S))
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        os.kill(old_pid, signal.SIGKILL)
        outcomes = await asyncio.gather(*readers, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {EngineDeadError}
        assert "SIGKILL" in str(outcomes[0])
        assert "started again" in str(outcomes[0])
        await asyncio.wait((health,))
        assert engine.metrics.read("num_requests_running") == 0

        # Until it is back, clients are told so at once.
        with pytest.raises(EngineDeadError, match="started again"):
            engine.generate(b"a", ENDLESS)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await engine.check_health(TIMEOUT_S)

        await engine.wait_until_running(TIMEOUT_S)
        assert engine.engine_pid != old_pid
        assert text_of(await read(engine.generate(b"a", SamplingParams(max_tokens=5)))) == "bcdef"
        assert engine.stats.num_restarts_total == 1
        assert engine.metrics.read("engine_restarts_total") == 1
        assert finished(engine, "error") == 32
        await assert_all_is_free(engine)

    with_engine(check)


def test_messages_of_a_dead_incarnation_are_not_heard() -> None:
    async def check(engine: AsyncEngine) -> None:
        """The old process's last messages lie in a socket that is closed; a stream of the new one gets its own only."""
        assert engine.engine_pid is not None
        for _ in range(3):
            old = engine.generate(b"a", ENDLESS, request_id="same")
            await old.__anext__()
            os.kill(engine.engine_pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await read(old)
            await engine.wait_until_running(TIMEOUT_S)
            deltas = await read(engine.generate(b"k", SamplingParams(max_tokens=5), request_id="same"))
            assert text_of(deltas) == "lmnop"

    with_engine(check)


def test_a_request_that_kills_the_engine_is_not_sent_again_and_after_some_deaths_it_stays_down() -> None:
    async def check(engine: AsyncEngine) -> None:
        for num_deaths in range(MAX_FAILURES_IN_A_ROW + 1):
            assert engine.stats.num_restarts_total == num_deaths
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await read(engine.generate([DIE], ENDLESS))
            if num_deaths < MAX_FAILURES_IN_A_ROW:
                await engine.wait_until_running(TIMEOUT_S)
        with pytest.raises(EngineDeadError, match=r"SIGKILL.* 6 times in a row"):
            await engine.wait_until_running(TIMEOUT_S)
        assert not engine.is_running
        with pytest.raises(EngineDeadError, match="restart the server"):
            engine.generate(b"a", ENDLESS)

    with_engine(check)


def test_a_bug_in_the_engine_is_told_and_it_starts_again(capfd: pytest.CaptureFixture[str]) -> None:
    async def check(engine: AsyncEngine) -> None:
        with pytest.raises(EngineDeadError, match=r"SystemExit: the books are torn.* started again"):
            await read(engine.generate([TEAR], ENDLESS))
        await engine.wait_until_running(TIMEOUT_S)
        assert text_of(await read(engine.generate(b"a", SamplingParams(max_tokens=2)))) == "bc"

    with_engine(check)
    assert "Traceback" in capfd.readouterr().err


def test_an_engine_that_hangs_fails_the_health_check_and_can_still_be_shut_down() -> None:
    async def check(engine: AsyncEngine) -> None:
        reader = asyncio.create_task(read(engine.generate([HANG], ENDLESS)))
        await asyncio.sleep(0)  # the reader sends the request, so the ping comes behind it and its step
        with pytest.raises(EngineDeadError, match="has not answered within"):
            await engine.check_health(0.05)
        pid = engine.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(EngineDeadError, match="SIGTERM"):
            await reader

    with_engine(check)


def test_ctrl_c_is_not_the_engine_process_s_business() -> None:
    async def check(engine: AsyncEngine) -> None:
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGINT)
        assert text_of(await read(engine.generate(b"a", SamplingParams(max_tokens=2)))) == "bc"
        assert engine.stats.num_restarts_total == 0

    with_engine(check)


# --- start and end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("corrupt", {}, CorruptFileError, "download it again"),
        ("fake", {"block_size": 7}, ConfigError, "--block-size"),
        ("crash", {}, EngineDeadError, "SIGSEGV"),
    ],
)
def test_a_failed_start_raises_the_root_cause(
    name: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        asyncio.run(start(name, **options))
    if isinstance(caught.value, ConfigError):
        assert caught.value.option == "--block-size"


def test_progress_is_told_on_the_event_loop() -> None:
    seen: list[tuple[str, int, int]] = []

    async def main() -> None:
        engine = await AsyncEngine.start(
            EngineArgs(),
            lambda *progress: seen.append(progress),
            source=fake_model.source(),
            tokenizer=make_tokenizer(),
            executor_name=EXECUTOR_NAME,
        )
        await engine.shutdown()

    asyncio.run(main())
    assert seen == [("count to ten", 10, 10)]


def test_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    async def check(engine: AsyncEngine) -> None:
        stream = engine.generate(b"a", SamplingParams(max_tokens=100, ignore_eos=True))
        unread = engine.generate(b"a", ENDLESS)
        await stream.__anext__()
        draining = asyncio.create_task(engine.drain(TIMEOUT_S))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="takes no new requests"):
            engine.generate(b"a", ENDLESS)
        with pytest.raises(EngineDeadError, match="takes no new requests"):
            await unread.__anext__()
        assert (await read(stream))[-1].finish_reason == "length"
        assert await draining

    with_engine(check)


def test_drain_gives_up_after_its_time_and_shutdown_then_answers_the_rest() -> None:
    async def main() -> None:
        engine = await start()
        reader = asyncio.create_task(read(engine.generate(b"a", ENDLESS)))
        await engine.check_health(TIMEOUT_S)
        assert not await engine.drain(0.0)
        pid = engine.engine_pid
        assert pid is not None
        await engine.shutdown()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await reader
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        await engine.shutdown()  # once more does no harm

    asyncio.run(main())


def test_the_prefix_cache_can_be_reset() -> None:
    async def check(engine: AsyncEngine) -> None:
        prompt = b"abcdefgh" * 8
        await read(engine.generate(prompt, SamplingParams(max_tokens=1)))
        warm = await read(engine.generate(prompt, SamplingParams(max_tokens=1)))
        assert warm[-1].num_cached_tokens >= 48
        await engine.reset_prefix_cache()
        cold = await read(engine.generate(prompt, SamplingParams(max_tokens=1)))
        assert cold[-1].num_cached_tokens == 0
        assert engine.metrics.read("prefix_cache_hits_total") == warm[-1].num_cached_tokens

    with_engine(check)


def test_it_runs_on_uvloop() -> None:
    async def main() -> None:
        engine = await start("fake")
        answers = await asyncio.gather(*(read(engine.generate(b"a", SamplingParams(max_tokens=5))) for _ in range(8)))
        assert [text_of(deltas) for deltas in answers] == ["bcdef"] * 8
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        await engine.shutdown()

    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
