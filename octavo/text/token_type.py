"""What kind a token of a vocabulary is: the numbers that GGUF files and SentencePiece models share."""

from __future__ import annotations

import enum


class TokenType(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6
