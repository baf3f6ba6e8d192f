"""The engine process: commands in, steps, events out. Started as `python -m octavo.engine.process --address ...`.

It sleeps in one blocking receive while there is nothing to do. It ends when told to, when its parent ends (its standard
input, a pipe that the parent holds, is closed), or on SIGTERM; Ctrl-C is the parent's to decide about.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zmq

from octavo.core.engine_core import EngineCore
from octavo.core.interfaces import FinishReason, SequenceOutput
from octavo.core.request import Request
from octavo.engine.loaded import DEFAULT_EXECUTOR, ExecutorFactory, find_executor_factory
from octavo.engine.messages import (
    EXIT_REPORTED,
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
    SetVocabulary,
    Shutdown,
    Start,
    Step,
    decode_command,
    encode,
    unpack_engine_args,
)
from octavo.errors import ClientError, ConfigError
from octavo.structured.grammar import make_grammar_factory
from octavo.weights.model_source import ModelSource

# How long a last message may take to leave; the parent reads at once unless it is gone.
_LINGER_MS = 2000
# Progress that comes faster than anyone can read only costs time.
_PROGRESS_INTERVAL_S = 0.05


class Channel(Protocol):
    """The engine loop's only connection to the world."""

    def receive(self, is_blocking: bool) -> list[Command]:
        """All commands that have come. When blocking and there are none, sleeps until one comes."""
        ...

    def send(self, event: Event) -> None: ...


class EngineLoop:
    """Turns of: take the commands, compute one step, tell what happened in one message."""

    def __init__(self, core: EngineCore, channel: Channel):
        self._core = core
        self._channel = channel

    def run(self) -> None:
        while self.turn():
            pass

    def turn(self) -> bool:
        """False when it is time to leave. What it raises is a bug of ours; the core must not be used after it."""
        commands = self._channel.receive(is_blocking=not self._core.has_unfinished())
        outputs: list[SequenceOutput] = []
        replies: list[Reply] = []
        for command in commands:
            if isinstance(command, Shutdown):
                return False
            self._obey(command, outputs, replies)
        if self._core.has_unfinished():
            start = time.monotonic()
            result = self._core.step(start)
            stats = result.stats
            stats.step_time_s = time.monotonic() - start
            self._core.note_step_time(stats)
            self._channel.send(Step(outputs + result.outputs, stats))
        elif commands:
            # After aborts no step follows, and the gauges must not keep their last values.
            self._channel.send(Step(outputs, self._core.stats()))
        # Last: who has a reply has also been told what the commands before it have changed, and knows that steps end.
        for reply in replies:
            self._channel.send(reply)
        return True

    def _obey(self, command: Command, outputs: list[SequenceOutput], replies: list[Reply]) -> None:
        core = self._core
        if isinstance(command, AddRequest):
            outputs += self._add(command.request)
        elif isinstance(command, AbortSequence):
            outputs += core.abort_sequence(command.request_id, command.index)
        elif isinstance(command, AbortRequests):
            for request_id in command.request_ids:
                outputs += core.abort(request_id)
        elif isinstance(command, SetVocabulary):
            core.grammar_factory = make_grammar_factory(command.vocabulary)
        elif isinstance(command, ResetPrefixCache):
            core.reset_prefix_cache()
            replies.append(Reply(command.call_id, True))
        elif isinstance(command, Ping):
            replies.append(Reply(command.call_id, True))
        else:
            raise AssertionError(f"{type(command).__name__} does not belong here")

    def _add(self, request: Request) -> list[SequenceOutput]:
        try:
            return self._core.add(request, time.monotonic())
        except ClientError as error:
            last = request.sampling_params.n - 1
            return [
                SequenceOutput(
                    request_id=request.request_id,
                    index=index,
                    finish_reason=FinishReason.ERROR,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    is_final=index == last,
                    error=error.message,
                )
                for index in range(last + 1)
            ]


class SocketChannel:
    """A Channel over one ZeroMQ socket, to the parent's address."""

    def __init__(self, address: str):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def receive(self, is_blocking: bool) -> list[Command]:
        commands = []
        if is_blocking:
            commands.append(decode_command(self._socket.recv()))
        while True:
            try:
                commands.append(decode_command(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return commands

    def send(self, event: Event) -> None:
        self._socket.send(encode(event))

    def close(self) -> None:
        self._socket.close(linger=_LINGER_MS)
        self._context.term()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="octavo.engine.process", description="The engine process of octavo serve.")
    parser.add_argument("--address", required=True, help="ZeroMQ address of the parent's socket")
    parser.add_argument("--executor", default=DEFAULT_EXECUTOR, help="module:function that loads the executor")
    options = parser.parse_args(argv)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    threading.Thread(target=_leave_with_parent, args=(options.address,), daemon=True).start()
    channel = SocketChannel(options.address)
    try:
        serve(channel, find_executor_factory(options.executor))
    except BaseException as error:
        channel.send(_describe(error))
        return EXIT_REPORTED
    finally:
        channel.close()
    return 0


def serve(channel: Channel, factory: ExecutorFactory) -> None:
    """Load as the first command says, then run the loop until it ends."""
    # The parent sends nothing else before Ready, unless it has changed its mind.
    start, *others = channel.receive(is_blocking=True)
    if Shutdown() in (start, *others):
        return
    assert isinstance(start, Start), start
    assert not others, others
    source = ModelSource(path=Path(start.source_path), kind=start.source_kind, name=start.source_name)
    executor = factory(unpack_engine_args(start.engine_args), source, _ProgressReporter(channel))
    core = EngineCore(executor, executor.config.core)
    if executor.config.target_step_s > 0:
        core.pace(executor.config.target_step_s)
    channel.send(
        Ready(
            report=executor.report,
            served_model_names=executor.config.served_model_names,
            max_model_len=executor.config.core.max_model_len,
            vocab_size=executor.model_config.vocab_size,
            eos_token_ids=executor.model_config.eos_token_ids,
            stats=core.stats(),
        )
    )
    EngineLoop(core, channel).run()


class _ProgressReporter:
    def __init__(self, channel: Channel):
        self._channel = channel
        self._last = ("", 0.0)

    def __call__(self, what: str, num_done: int, num_total: int) -> None:
        last_what, last_time = self._last
        now = time.monotonic()
        if what != last_what or now - last_time >= _PROGRESS_INTERVAL_S or num_done == num_total:
            self._last = (what, now)
            self._channel.send(Progress(what, num_done, num_total))


def _describe(error: BaseException) -> Failed:
    """What the parent tells the user. A traceback is printed only for what is nobody's fault but ours."""
    if isinstance(error, ConfigError):
        return Failed("ConfigError", error.message, error.option)
    name = type(error).__name__
    if type(error).__module__ == "octavo.errors":
        return Failed(name, str(error))
    traceback.print_exc(file=sys.stderr)
    if isinstance(error, MemoryError):
        hint = "lower --gpu-memory-utilization, --kv-cache-memory-bytes or --max-model-len"
        return Failed(name, f"The engine ran out of memory ({error}); {hint}.")
    return Failed(name, f"{name}: {error}")


def _leave_with_parent(address: str) -> None:
    """The parent's end of our standard input closes when it ends, however it ends; then we tidy up for it."""
    while os.read(0, 4096):
        pass
    if address.startswith("ipc://"):
        socket_path = Path(address.removeprefix("ipc://"))
        with contextlib.suppress(OSError):
            socket_path.unlink()
            socket_path.parent.rmdir()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
