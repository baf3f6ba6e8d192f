"""Where does a JSON value end? `JsonScanner` reads one object or list a character at a time."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARACTERS = frozenset("+-.eE0123456789")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_SPACE = frozenset(" \t\r\n")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Feed it from the opening bracket on, until it is done or broken.

    is_done:   the bracket that closes the value was the last character fed
    is_broken: the last character fed cannot stand there
    Strict but for one thing: control characters inside strings, which models write as they are, come back escaped, so
    that what comes back is JSON. No recursion: depth costs one list entry.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._closers: list[str] = []
        self._state = "value"
        self._rest = ""  # of a literal or of a \uXXXX escape's count
        self._number = ""
        self._is_key = False

    def feed(self, character: str) -> str:
        """The character, or the escape that it must become."""
        state = self._state
        if state == "string":
            return self._in_string(character)
        if state == "number":
            if character in _NUMBER_CHARACTERS:
                self._number += character
                return character
            self.is_broken = _NUMBER.fullmatch(self._number) is None
            state = self._state = "after"
            if self.is_broken:
                return character
        if state == "escape":
            self._in_escape(character)
        elif state == "hex":
            self.is_broken = character not in _HEX
            self._rest = self._rest[1:]
            self._state = "hex" if self._rest else "string"
        elif state == "literal":
            self.is_broken = character != self._rest[0]
            self._rest = self._rest[1:]
            self._state = "literal" if self._rest else "after"
        elif character not in _SPACE:
            self._structure(state, character)
        return character

    def _in_string(self, character: str) -> str:
        if character == '"':
            self._state = "colon" if self._is_key else "after"
        elif character == "\\":
            self._state = "escape"
        elif character < " ":
            return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character) or f"\\u{ord(character):04x}"
        return character

    def _in_escape(self, character: str) -> None:
        if character == "u":
            self._state, self._rest = "hex", "XXXX"
        else:
            self._state = "string"
            self.is_broken = character not in _ESCAPES

    def _structure(self, state: str, character: str) -> None:
        if state == "after" and character == "," and self._closers:
            self._state = "key" if self._closers[-1] == "}" else "value"
        elif state in ("after", "first_key", "first_value") and self._closers and character == self._closers[-1]:
            self._closers.pop()
            self._state = "after"
            self.is_done = not self._closers
        elif state == "colon" and character == ":":
            self._state = "value"
        elif state in ("key", "first_key") and character == '"':
            self._state, self._is_key = "string", True
        elif state in ("value", "first_value"):
            self._begin_value(character)
        else:
            self.is_broken = True

    def _begin_value(self, character: str) -> None:
        if character == "{":
            self._closers.append("}")
            self._state = "first_key"
        elif character == "[":
            self._closers.append("]")
            self._state = "first_value"
        elif not self._closers:
            self.is_broken = True
        elif character == '"':
            self._state, self._is_key = "string", False
        elif character in _LITERALS:
            self._state, self._rest = "literal", _LITERALS[character]
        elif character in "-0123456789":
            self._state, self._number = "number", character
        else:
            self.is_broken = True
