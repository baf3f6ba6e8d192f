"""Ends numbers that would never end: a JSON grammar allows any number of digits, and a small model can get stuck there.

Follows the generated text just far enough to know whether it is inside a number, and which digits the next token may
still bring. It only takes tokens away from a mask, and never the last one: a number that has to be longer (an enum of
twenty digits) stays possible.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# A double holds 15 to 17 significant digits; more carry nothing. Two digits of exponent stay below the largest double
# (1.8e308) together with the 16 digits before them.
MAX_DIGITS = 16
MAX_EXPONENT_DIGITS = 2

Mask = npt.NDArray[np.int32]

_QUOTE, _BACKSLASH = 0x22, 0x5C
_NO_NUMBER, _INTEGER, _FRACTION, _EXPONENT = range(4)
_LIMITS = (MAX_DIGITS, MAX_DIGITS, MAX_DIGITS, MAX_EXPONENT_DIGITS)
_LEADING_DIGITS = re.compile(rb"[0-9]+")
_LONG_EXPONENT = re.compile(rb"[0-9.]*[eE][+-]?[0-9]{%d,}" % (MAX_EXPONENT_DIGITS + 1))


class DigitMasks:
    """Which tokens bring how many digits; one for a vocabulary.

    allowed[r]: [ceil(vocab_size / 32)] int32, the tokens that begin with at most r digits; from `len(allowed)` on
                every token does
    """

    def __init__(self, tokens: Sequence[bytes], vocab_size: int):
        lengths = np.zeros(vocab_size, np.int32)
        for token_id, token in enumerate(tokens):
            match = _LEADING_DIGITS.match(token)
            if match is not None:
                lengths[token_id] = match.end()
            if _LONG_EXPONENT.match(token) is not None:
                lengths[token_id] = MAX_DIGITS + 1
        longest = min(int(lengths.max(initial=0)), MAX_DIGITS + 1)
        self.allowed = [_pack(lengths <= limit) for limit in range(longest)]


class DigitCap:
    """The state of one text."""

    __slots__ = ("_is_escaped", "_is_in_string", "_masks", "_num_digits", "_part")

    def __init__(self, masks: DigitMasks):
        self._masks = masks.allowed
        self._is_in_string = False
        self._is_escaped = False
        self._part = _NO_NUMBER
        self._num_digits = 0

    def apply(self, mask: Mask) -> None:
        """mask: changed in place"""
        if self._is_in_string:
            return
        num_left = max(_LIMITS[self._part] - self._num_digits, 0)
        if num_left < len(self._masks):
            rest = mask & self._masks[num_left]
            if rest.any():
                mask[:] = rest

    def accept(self, token: bytes) -> None:
        for byte in token:
            if self._is_in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif byte == _BACKSLASH:
                    self._is_escaped = True
                elif byte == _QUOTE:
                    self._is_in_string = False
            elif 0x30 <= byte <= 0x39:
                self._part = self._part or _INTEGER
                self._num_digits += 1
            elif self._part and byte in b".eE+-":
                if byte in b".eE":
                    self._part = _FRACTION if byte == 0x2E else _EXPONENT
                    self._num_digits = 0
            else:
                self._is_in_string = byte == _QUOTE
                self._part = _NO_NUMBER
                self._num_digits = 0


def _pack(is_allowed: npt.NDArray[np.bool_]) -> Mask:
    num_words = -(-len(is_allowed) // 32)
    bits = np.zeros(num_words * 32, np.bool_)
    bits[: len(is_allowed)] = is_allowed
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)
