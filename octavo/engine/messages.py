"""What the API process and the engine process say to each other: plain data, msgpack on the wire.

Each direction has one union type; a message is one ZeroMQ frame. Commands go to the engine process, events come back.
A socket belongs to one incarnation of the engine process, so messages of a dead one cannot reach the next.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import msgspec

from octavo.config import EngineArgs
from octavo.core.interfaces import SequenceOutput, StepStats
from octavo.core.request import Request
from octavo.report import StartReport
from octavo.structured.vocabulary import Vocabulary


class _Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Fields travel by position: both ends are always the same version of this file."""


# --- commands ---------------------------------------------------------------------------------------------------


class Start(_Message, frozen=True):
    """The first command. Answered by any number of Progress, then by one Ready or one Failed.

    source_path, source_kind, source_name: the resolved model, see weights.source.ModelSource
    """

    engine_args: dict[str, Any]
    source_path: str
    source_kind: Literal["folder", "gguf"]
    source_name: str


class AddRequest(_Message, frozen=True):
    request: Request


class AbortRequests(_Message, frozen=True):
    """Forget these requests and free their blocks; unknown ids are ignored."""

    request_ids: tuple[str, ...]


class AbortSequence(_Message, frozen=True):
    """One generation met a stop string; its siblings go on."""

    request_id: str
    index: int


class SetVocabulary(_Message, frozen=True):
    """Sent once, before the first request with a grammar: the engine process has no tokenizer."""

    vocabulary: Vocabulary


class Ping(_Message, frozen=True):
    """Answered by Reply from the engine loop, after the step that follows."""

    call_id: int


class ResetPrefixCache(_Message, frozen=True):
    """Answered by Reply: value is whether the cache was reset."""

    call_id: int


class Shutdown(_Message, frozen=True):
    """Leave at once."""


Command = Start | AddRequest | AbortRequests | AbortSequence | SetVocabulary | Ping | ResetPrefixCache | Shutdown


# --- events -----------------------------------------------------------------------------------------------------


class Progress(_Message, frozen=True):
    """num_total: 0 while it is not known."""

    what: str
    num_done: int
    num_total: int


class Ready(_Message, frozen=True):
    """The engine takes requests from now on.

    vocab_size:    rows of the model's embedding
    eos_token_ids: as the model's configuration says; the tokenizer may know more
    stats:         the gauges of the empty engine
    """

    report: StartReport
    served_model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    stats: StepStats


class Failed(_Message, frozen=True):
    """The engine process leaves, after this, with EXIT_REPORTED.

    error_type: the exception's class name; one of octavo.errors is raised again as itself
    message:    one paragraph: what was wrong and the way out
    option:     of a ConfigError, else None
    """

    error_type: str
    message: str
    option: str | None = None


class Step(_Message, frozen=True):
    """Everything that one turn of the engine loop did: at most one step, and the aborts before it."""

    outputs: list[SequenceOutput]
    stats: StepStats


class Reply(_Message, frozen=True):
    call_id: int
    value: bool


Event = Progress | Ready | Failed | Step | Reply

# The exit status after a Failed message was sent: the parent then waits for the message.
EXIT_REPORTED = 70

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    return _encoder.encode(message)


def decode_command(frame: bytes | memoryview) -> Command:
    return _command_decoder.decode(frame)


def decode_event(frame: bytes | memoryview) -> Event:
    return _event_decoder.decode(frame)


def pack_engine_args(args: EngineArgs) -> dict[str, Any]:
    """Only what differs from the defaults, so that a failure is easy to read in a log."""
    packed = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if value != field.default:
            packed[field.name] = value
    return msgspec.to_builtins(packed)


def unpack_engine_args(packed: dict[str, Any]) -> EngineArgs:
    return msgspec.convert(packed, EngineArgs)
