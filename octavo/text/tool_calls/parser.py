"""`ToolCallParser`: a model's output, as it comes, cut into content and calls of tools.

A parser is a machine that sees one character at a time, so its answer cannot depend on how the output is cut into
chunks: streamed and not streamed are the same by construction.

    What becomes of the characters
    - Text is passed on at once. Held back is only what may still become a call (it is let go with the character after
      the one that decided, at the latest), and white space, which belongs to the markup when a call follows.
    - A call *starts* as soon as its name and the first character of its arguments are there. From then on it stays a
      call, and its arguments stream. When the output ends inside them they are what they are: cut off. Where they stop
      being JSON, they go on as they are up to the format's closing marker, or the end of the output.
    - What turns out not to be a call before that is content again, to the character, and the search goes on at the
      character where it failed. So every character is looked at once, however often a call seems to begin.
    - Dropped are the markup of calls (markers, keys, separators) and the white space next to it; nothing else.
"""

from __future__ import annotations

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

from octavo.text.tool_calls.call_id import new_call_id
from octavo.text.tool_calls.events import ArgumentsDelta, CallEnded, CallStarted, Content, Event, join_events
from octavo.text.tool_calls.json_scanner import JsonScanner

WHITE_SPACE = " \t\r\n"

# A step of a machine: runs until it needs the next character; what it returns is the step's outcome.
Steps = Generator[None, None, Any]


class ToolCallParser(ABC):
    """One answer's parser. `push` what comes, then `finish`; both return what is certain by now.

    tool_names:  formats without an opening marker take only these names for calls; None takes any
    new_call_id: makes the ids of calls
    """

    # The characters that a call may begin with.
    heads = "{["
    # Beside white space: what may stand between two calls.
    separators = ""

    def __init__(self, tool_names: Collection[str] | None = None, new_call_id: Callable[[], str] = new_call_id):
        self._tool_names = None if tool_names is None else frozenset(tool_names)
        self._new_call_id = new_call_id
        self._events: list[Event] = []
        self._held: list[str] = []
        self._num_calls = 0
        self._is_after_call = False
        self._is_finished = False
        self._is_in_plain_text = False  # the machine waits between two characters of text, with nothing held
        self._closer: str | None = None  # the marker that closes what was opened last
        self._character = ""  # the one to be looked at; "" at the end of the output
        self._machine = self._run()
        next(self._machine)

    def push(self, text: str) -> list[Event]:
        assert not self._is_finished, "pushed after the end"
        position = 0
        while position < len(text):
            if self._is_in_plain_text:
                run = _find_plain_run(self.heads, text, position)
                if run > position:
                    self._events.append(Content(text[position:run]))
                    position = run
                    continue
            self._character = text[position]
            position += 1
            next(self._machine)
        return self._take_events()

    def finish(self) -> list[Event]:
        """The output has ended: what is held is content, a call that is open ends."""
        if not self._is_finished:
            self._is_finished = True
            self._character = ""
            for _ in self._machine:
                pass
        return self._take_events()

    @property
    def num_calls(self) -> int:
        """Calls that have started."""
        return self._num_calls

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return join_events(events)

    # ---- the machine. Each step looks at self._character and yields for the next one.

    def _run(self) -> Steps:
        yield
        gap = WHITE_SPACE + self.separators
        while self._character:
            if self._character in (gap if self._is_after_call else WHITE_SPACE):
                self._hold()
                yield
            elif self._closer and self._is_after_call and self._character == self._closer[0]:
                if (yield from self._literal(self._closer)) or not self._character:
                    self._drop_held()  # also a marker that the end of the output has cut
                    self._closer = None
                else:
                    self._release()
            elif not (yield from self._call()):
                self._release()
        self._release()

    @abstractmethod
    def _call(self) -> Steps:
        """Read a call, or several, from the first character on. False: there was none, and what was looked at is held.

        When it cannot even begin here, it must take the character all the same (`_plain`).
        """

    def _plain(self) -> Steps:
        """The character is text, and so is what follows up to the next one that a call may begin with."""
        self._hold()
        self._release()
        self._is_in_plain_text = True
        yield
        self._is_in_plain_text = False
        return False

    def _literal(self, text: str) -> Steps:
        """Whether the text comes next; it is held as far as it does."""
        for expected in text:
            if self._character != expected:
                return False
            self._hold()
            yield
        return True

    def _skip_space(self) -> Steps:
        while self._character and self._character in WHITE_SPACE:
            self._hold()
            yield

    # ---- what is held, and what is sent

    def _hold(self) -> None:
        self._held.append(self._character)

    def _drop_held(self) -> None:
        self._held.clear()

    def _release(self) -> None:
        """What is held is content."""
        text = "".join(self._held)
        self._held.clear()
        if self._is_after_call:
            text = text.lstrip(WHITE_SPACE + self.separators)
        if text:
            self._is_after_call = False
            self._closer = None
            self._events.append(Content(text))

    def _start_call(self, name: str) -> None:
        self._drop_held()
        self._events.append(CallStarted(self._num_calls, self._new_call_id(), name))
        self._num_calls += 1

    def _send_arguments(self, text: str) -> None:
        self._events.append(ArgumentsDelta(self._num_calls - 1, text))

    def _end_call(self) -> None:
        self._events.append(CallEnded(self._num_calls - 1))
        self._is_after_call = True

    def _stream_object(self) -> Steps:
        """Arguments from their opening bracket on. False: they broke, and all up to the closing marker was sent."""
        scanner = JsonScanner()
        while self._character:
            text = scanner.feed(self._character)
            if scanner.is_broken:
                yield from self._stream_rest()
                return False
            self._send_arguments(text)
            yield
            if scanner.is_done:
                return True
        return False

    def _stream_rest(self) -> Steps:
        """Arguments that are no JSON, as they are, up to the closing marker, which is dropped, or to the end."""
        closer, self._closer = self._closer, None
        while self._character:
            if closer and self._character == closer[0]:
                if (yield from self._literal(closer)):
                    self._drop_held()
                    return
                self._send_arguments("".join(self._held))
                self._drop_held()
            else:
                self._send_arguments(self._character)
                yield


def _find_plain_run(heads: str, text: str, start: int) -> int:
    """The end of the text from start on that is certainly content: no head of a call in it, no white space at its end.

    The machine would say the same a character at a time; most text takes this way, many times as fast.
    """
    match = _plain_run(heads).match(text, start)
    return match.end() if match else start


@functools.lru_cache
def _plain_run(heads: str) -> re.Pattern[str]:
    return re.compile(rf"[^{re.escape(heads)}]*[^{re.escape(heads + WHITE_SPACE)}]")


class JsonCallParser(ToolCallParser):
    """What the formats share that write a call as a JSON object with a name and arguments."""

    argument_keys: Sequence[str] = ("arguments", "parameters")

    def _object_or_list(self, is_marked: bool) -> Steps:
        """A call `{...}`, or calls `[{...}, {...}]`. is_marked: an opening marker has said that this is a call."""
        if self._character == "{":
            return (yield from self._object(is_marked))
        if self._character != "[":
            return False
        self._hold()
        yield
        yield from self._skip_space()
        if self._character != "{" or not (yield from self._object(is_marked)):
            return False
        while True:
            yield from self._skip_space()
            if self._character != ",":
                break
            self._hold()
            yield
            yield from self._skip_space()
            if self._character != "{" or not (yield from self._object(is_marked)):
                self._release()
                return True
        if self._character == "]":
            self._drop_held()
            yield
        return True

    def _object(self, is_marked: bool) -> Steps:
        """A call from its opening bracket on. False: it is none; what was looked at is held."""
        reading = _CallReading()
        self._hold()
        yield
        yield from self._skip_space()
        is_closed = self._character == "}"
        while not is_closed:
            if not (yield from self._member(reading, is_marked)):
                break
            yield from self._skip_space()
            is_closed = self._character == "}"
            if not is_closed:
                if self._character != ",":
                    break
                self._hold()
                yield
                yield from self._skip_space()
        if reading.has_started:
            self._finish_started(reading, is_closed)
            if is_closed and not reading.is_broken:
                yield
            return True
        if not is_closed or reading.name is None or (reading.arguments is None and not is_marked):
            return False
        self._start_call(reading.name)
        self._send_arguments(reading.arguments or "{}")
        self._end_call()
        yield
        return True

    def _finish_started(self, reading: _CallReading, is_closed: bool) -> None:
        if not reading.has_ended:
            self._end_call()
        if is_closed and not reading.is_broken:
            self._drop_held()
        else:
            self._release()

    def _member(self, reading: _CallReading, is_marked: bool) -> Steps:
        """One "key": value. False: this is no call, or no more of one."""
        key = yield from self._string()
        if key is None:
            return False
        if not is_marked and not reading.has_started and key not in ("name", "type", "id", *self.argument_keys):
            return False
        yield from self._skip_space()
        if self._character != ":":
            return False
        self._hold()
        yield
        yield from self._skip_space()
        if reading.has_started:
            return (yield from self._other_value())
        if key == "name" and reading.name is None:
            reading.name = yield from self._string()
            is_known = self._tool_names is None or is_marked or reading.name in self._tool_names
            if not reading.name or not is_known:
                return False
            if reading.is_complete:
                self._start_early(reading)
            return True
        if key in self.argument_keys and reading.arguments is None:
            return (yield from self._arguments(reading))
        return (yield from self._other_value())

    def _arguments(self, reading: _CallReading) -> Steps:
        if self._character == "{":
            if reading.name is None:
                reading.arguments = yield from self._buffered_object()
                return reading.arguments is not None
            reading.has_started = True
            self._start_call(reading.name)
            reading.is_broken = not (yield from self._stream_object())
            self._end_call()
            reading.has_ended = True
            return not reading.is_broken
        if self._character == '"':  # JSON inside JSON: some models write the arguments as OpenAI sends them
            reading.arguments = yield from self._string()
            if reading.arguments is not None and not reading.arguments.strip():
                reading.arguments = "{}"
        elif self._character == "n":
            reading.arguments = "{}" if (yield from self._literal("null")) else None
        if reading.is_complete:
            self._start_early(reading)
        return reading.arguments is not None

    def _start_early(self, reading: _CallReading) -> None:
        """Name and arguments are whole: no need to wait for the end of the object."""
        assert reading.name is not None
        assert reading.arguments is not None
        self._start_call(reading.name)
        self._send_arguments(reading.arguments)
        self._end_call()
        reading.has_started = reading.has_ended = True

    def _buffered_object(self) -> Steps:
        """Arguments that came before the name: they can only be kept."""
        scanner = JsonScanner()
        pieces = []
        while self._character:
            pieces.append(scanner.feed(self._character))
            if scanner.is_broken:
                return None
            self._hold()
            yield
            if scanner.is_done:
                return "".join(pieces)
        return None

    def _other_value(self) -> Steps:
        if self._character == '"':
            return (yield from self._string()) is not None
        if self._character and self._character in "{[":
            return (yield from self._buffered_object()) is not None
        is_any = False
        while self._character.isalnum() or (self._character and self._character in "+-."):
            is_any = True
            self._hold()
            yield
        return is_any

    def _string(self) -> Steps:
        """The value of the JSON string that comes next; None when there is none."""
        if self._character != '"':
            return None
        pieces = ['"']
        is_escaped = False
        self._hold()
        yield
        while self._character:
            pieces.append(self._character)
            is_end = self._character == '"' and not is_escaped
            is_escaped = self._character == "\\" and not is_escaped
            self._hold()
            yield
            if is_end:
                try:
                    return json.loads("".join(pieces), strict=False)
                except ValueError:
                    return None
        return None


class _CallReading:
    """What is known of the call object that is being read."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: str | None = None
        self.has_started = False
        self.has_ended = False
        self.is_broken = False

    @property
    def is_complete(self) -> bool:
        return self.name is not None and self.arguments is not None
