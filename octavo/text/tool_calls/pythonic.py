"""Calls as Python writes them: `[get_weather(city="Rome"), add(a=1, b=[2, 3])]`, as Llama 3.2, Llama 4 and others."""

from __future__ import annotations

import json

from octavo.text.tool_calls.parser import Steps, ToolCallParser

# A value nests no deeper: each level is a generator inside another one.
MAX_DEPTH = 64

_LITERALS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}


class PythonicParser(ToolCallParser):
    """The arguments come out as JSON, made as they are read: keyword arguments with values that are literals.

    Positional arguments have no names that JSON could give them: such a call is content.
    """

    heads = "<["
    separators = ","

    def _call(self) -> Steps:
        if self._character == "<":  # Llama 4 puts the list between these
            if not (yield from self._literal("<|python_start|>")):
                return False
            self._closer = "<|python_end|>"
            yield from self._skip_space()
        elif self._character != "[":
            return (yield from self._plain())
        if self._character != "[":
            return False
        self._hold()
        yield
        yield from self._skip_space()
        if not (yield from self._function()):
            return False
        while True:
            yield from self._skip_space()
            if self._character != ",":
                break
            self._hold()
            yield
            yield from self._skip_space()
            if not (yield from self._function()):
                self._release()
                return True
        if self._character == "]":
            self._drop_held()
            yield
        return True

    def _function(self) -> Steps:
        name = yield from self._name()
        if not name or (self._tool_names is not None and name not in self._tool_names) or self._character != "(":
            return False
        self._hold()
        yield
        yield from self._skip_space()
        keyword = ""
        if self._character != ")":
            keyword = yield from self._keyword()
            if not keyword:
                return False
        self._start_call(name)
        self._send_arguments("{")
        if (yield from self._keyword_values(keyword)):
            self._send_arguments("}")
        else:
            # No literal: what was looked at and all that follows go on as they are.
            self._send_held()
            yield from self._stream_rest()
        self._end_call()
        return True

    def _keyword_values(self, keyword: str) -> Steps:
        """From the first value on (or the closing parenthesis), to the closing parenthesis."""
        opening = ""
        while keyword:
            self._send_arguments(opening + json.dumps(keyword, ensure_ascii=False) + ": ")
            if not (yield from self._value(0)):
                return False
            yield from self._skip_space()
            opening, keyword = ", ", ""
            if self._character == ",":
                self._hold()
                yield
                yield from self._skip_space()
                if self._character != ")":
                    keyword = yield from self._keyword()
                    if not keyword:
                        return False
                self._drop_held()
        if self._character != ")":
            return False
        self._drop_held()
        yield
        return True

    def _keyword(self) -> Steps:
        """`name=` and the white space around; "" when it is something else."""
        name = yield from self._name()
        yield from self._skip_space()
        if not name or self._character != "=":
            return ""
        self._hold()
        yield
        yield from self._skip_space()
        return name

    def _name(self) -> Steps:
        letters: list[str] = []
        if self._character.isdigit():
            return ""
        while self._character.isalnum() or (self._character and self._character in "_-."):
            letters.append(self._character)
            self._hold()
            yield
        return "".join(letters)

    def _value(self, depth: int) -> Steps:
        """A literal, sent as JSON. False: there is none; what was looked at and not sent is held."""
        self._drop_held()
        if depth > MAX_DEPTH or not self._character:
            return False
        if self._character in "\"'":
            return (yield from self._string())
        if self._character in "[(":
            return (yield from self._items("]" if self._character == "[" else ")", depth, is_dict=False))
        if self._character == "{":
            return (yield from self._items("}", depth, is_dict=True))
        word = []
        while self._character.isalnum() or (self._character and self._character in "+-._"):
            word.append(self._character)
            self._hold()
            yield
        value = _as_json("".join(word))
        if value is None:
            return False
        self._send_arguments(value)
        self._drop_held()
        return True

    def _items(self, closer: str, depth: int, is_dict: bool) -> Steps:
        self._send_arguments("{" if is_dict else "[")
        yield
        opening = ""
        while True:
            yield from self._skip_space()
            if self._character == closer:
                break
            self._send_arguments(opening)
            if is_dict:
                if not self._character or self._character not in "\"'" or not (yield from self._value(depth + 1)):
                    return False
                yield from self._skip_space()
                if self._character != ":":
                    return False
                self._send_arguments(": ")
                yield
                yield from self._skip_space()
            if not (yield from self._value(depth + 1)):
                return False
            yield from self._skip_space()
            if self._character == ",":
                opening = ", "
                yield
            elif self._character != closer:
                return False
        self._drop_held()
        self._send_arguments("}" if is_dict else "]")
        yield
        return True

    def _string(self) -> Steps:
        """Sent a character at a time, so a long text streams."""
        quote = self._character
        self._send_arguments('"')
        yield
        while self._character:
            character = self._character
            if character == quote:
                self._send_arguments('"')
                yield
                return True
            if character != "\\":
                self._send_arguments(json.dumps(character, ensure_ascii=False)[1:-1])
                yield
            else:
                yield
                if not (yield from self._escape()):
                    return False
        return False

    def _escape(self) -> Steps:
        kind = self._character
        if not kind:
            return False
        if kind not in _HEX_LENGTHS:
            self._send_arguments(json.dumps(_ESCAPES.get(kind, kind), ensure_ascii=False)[1:-1])
            yield
            return True
        yield
        digits = ""
        while len(digits) < _HEX_LENGTHS[kind] and self._character and self._character in "0123456789abcdefABCDEF":
            digits += self._character
            yield
        if len(digits) < _HEX_LENGTHS[kind] or int(digits, 16) > 0x10FFFF:
            self._send_arguments(f"\\\\{kind}{digits}")  # no escape after all: the characters as they stand
        else:
            self._send_arguments(_escape_character(int(digits, 16)))
        return True

    def _send_held(self) -> None:
        if self._held:
            self._send_arguments("".join(self._held))
        self._drop_held()


def _as_json(word: str) -> str | None:
    if word in _LITERALS:
        return _LITERALS[word]
    if not word or not (word[0] in "+-." or word[0].isdigit()) or len(word) > 400:
        return None
    try:
        int(word, 10)
        return word.replace("_", "").lstrip("+") if _is_json(word.replace("_", "").lstrip("+")) else str(int(word))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return None
    if number in (float("inf"), float("-inf")) or number != number:
        return None
    return word if _is_json(word) else repr(number)


def _is_json(word: str) -> bool:
    try:
        json.loads(word)
    except ValueError:
        return False
    return True


def _escape_character(code: int) -> str:
    if code < 0x20 or 0xD800 <= code < 0xE000:
        return f"\\u{code:04x}"  # halves of a pair stay escapes: as characters they have no UTF-8 form
    return json.dumps(chr(code), ensure_ascii=False)[1:-1]
