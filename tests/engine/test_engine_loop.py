"""The engine process's loop, turned by hand: when it sleeps, and what it tells."""

from __future__ import annotations

import pytest

from octavo.config import EngineArgs
from octavo.core.engine_core import EngineCore
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.messages import (
    AbortRequests,
    AbortSequence,
    AddRequest,
    Command,
    Event,
    Failed,
    Ping,
    Progress,
    Ready,
    Reply,
    ResetPrefixCache,
    Shutdown,
    Start,
    Step,
    decode_command,
    decode_event,
    encode,
    pack_engine_args,
    unpack_engine_args,
)
from octavo.engine.process import EngineLoop, serve

from . import fake_model
from .fake_model import EOS, CountingExecutor


class ScriptedChannel:
    """Hands out one list of commands a call; asking in blocking mode with nothing left to come would be for ever."""

    def __init__(self, *turns: list[Command]):
        self.turns = list(turns)
        self.events: list[Event] = []
        self.was_blocking: list[bool] = []

    def receive(self, is_blocking: bool) -> list[Command]:
        self.was_blocking.append(is_blocking)
        if not self.turns:
            return [Shutdown()] if is_blocking else []
        return [decode_command(encode(command)) for command in self.turns.pop(0)]

    def send(self, event: Event) -> None:
        self.events.append(decode_event(encode(event)))


def request(request_id: str = "r", max_tokens: int = 2, n: int = 1) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=(97,),
        sampling_params=SamplingParams(max_tokens=max_tokens, n=n, seed=2**64 - 1, stop=("é",)),
        seed=2**64 - 1,
        eos_token_ids=(EOS,),
    )


def run(*turns: list[Command]) -> ScriptedChannel:
    channel = ScriptedChannel(*turns)
    executor = CountingExecutor(EngineArgs(max_model_len=100), "fake")
    EngineLoop(EngineCore(executor, executor.config.core), channel).run()
    return channel


def test_with_nothing_to_do_it_sleeps_in_the_receive() -> None:
    channel = run([Ping(1)], [Ping(2)])
    assert channel.was_blocking == [True, True, True]
    assert [event for event in channel.events if isinstance(event, Reply)] == [Reply(1, True), Reply(2, True)]


def test_a_reply_comes_behind_what_the_commands_before_it_have_changed() -> None:
    channel = run([AddRequest(request("a", 50))], [AbortRequests(("a",)), Ping(1)])
    *_, step, reply = channel.events
    assert isinstance(step, Step)
    assert step.stats.num_running == 0
    assert reply == Reply(1, True)


def test_while_it_computes_it_only_looks_for_commands_and_then_sleeps_again() -> None:
    channel = run([AddRequest(request(max_tokens=3))])
    assert channel.was_blocking == [True, False, False, True]


def test_each_step_is_one_message_with_everything_in_it() -> None:
    channel = run([AddRequest(request("a")), AddRequest(request("b"))])
    steps = [event for event in channel.events if isinstance(event, Step)]
    assert len(steps) == len(channel.events) == 2
    assert [(output.request_id, output.new_token_ids) for output in steps[0].outputs] == [("a", [98]), ("b", [98])]
    assert [output.is_final for output in steps[1].outputs] == [True, True]
    assert steps[0].stats.num_running == 2
    assert steps[1].stats.num_running == 0


def test_after_an_abort_of_all_the_gauges_are_told_although_no_step_follows() -> None:
    channel = run([AddRequest(request("a", 50)), AddRequest(request("b", 50))], [AbortRequests(("a", "b", "unknown"))])
    last = channel.events[-1]
    assert isinstance(last, Step)
    assert (last.stats.num_running, last.stats.num_waiting, last.stats.num_used_blocks) == (0, 0, 0)
    assert last.stats.num_scheduled_tokens == 0
    assert channel.was_blocking[-1]


def test_one_sequence_is_aborted_and_its_sibling_goes_on() -> None:
    channel = run([AddRequest(request(n=2, max_tokens=4))], [AbortSequence("r", 0)])
    tokens = {0: 0, 1: 0}
    for event in channel.events:
        assert isinstance(event, Step)
        for output in event.outputs:
            tokens[output.index] += len(output.new_token_ids)
    assert tokens == {0: 1, 1: 4}


def test_a_duplicate_id_is_answered_for_each_generation_and_harms_nobody() -> None:
    channel = run([AddRequest(request("a")), AddRequest(request("a", n=2))])
    outputs = [output for event in channel.events if isinstance(event, Step) for output in event.outputs]
    assert [output.finish_reason for output in outputs] == ["error", "error", None, "length"]


def test_the_prefix_cache_is_reset_and_that_is_confirmed() -> None:
    channel = run([AddRequest(request())], [], [], [ResetPrefixCache(9)])
    assert Reply(9, True) in channel.events


def test_shutdown_leaves_at_once_with_work_unfinished() -> None:
    channel = run([AddRequest(request(max_tokens=50))], [Shutdown()])
    assert len(channel.events) == 1


def start_command(**options: object) -> Start:
    args = pack_engine_args(EngineArgs(**options))  # type: ignore[arg-type]
    return Start(args, "nowhere", "folder", "fake")


def test_it_loads_tells_that_it_is_ready_and_serves() -> None:
    channel = ScriptedChannel([start_command(max_model_len=64, served_model_name=("x", "y"))], [AddRequest(request())])
    serve(channel, fake_model.load)
    progress, ready, *steps = channel.events
    assert progress == Progress("count to ten", 10, 10)
    assert isinstance(ready, Ready)
    assert (ready.max_model_len, ready.served_model_names, ready.vocab_size) == (64, ("x", "y"), 260)
    assert ready.report.ledger.num_blocks == ready.stats.num_blocks == ready.stats.num_free_blocks
    assert len(steps) == 2


def test_a_shutdown_before_the_model_is_loaded_loads_nothing() -> None:
    channel = ScriptedChannel([start_command(), Shutdown()])
    serve(channel, fake_model.load)
    assert channel.events == []


@pytest.mark.parametrize(
    "args",
    [
        EngineArgs(),
        EngineArgs(model="m", served_model_name=("a", "b"), seed=2**64 - 1, gpu_memory_utilization=0.5),
        EngineArgs(enable_chunked_prefill=False, kv_cache_memory_bytes=2**40),
    ],
)
def test_the_options_survive_the_way(args: EngineArgs) -> None:
    command = decode_command(encode(Start(pack_engine_args(args), "p", "gguf", "n")))
    assert isinstance(command, Start)
    assert unpack_engine_args(command.engine_args) == args


def test_failures_survive_the_way() -> None:
    failed = Failed("ConfigError", "no", "--x")
    assert decode_event(encode(failed)) == failed
