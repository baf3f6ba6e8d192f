"""Text in the cells of a terminal: wide characters take two, combining ones none. Standard library only."""

from __future__ import annotations

import unicodedata


def cell_width(text: str) -> int:
    return len(text) if text.isascii() else sum(map(_char_width, text))


def cut_to_width(text: str, width: int) -> str:
    """The longest beginning that is no wider."""
    if text.isascii():
        return text[: max(width, 0)]
    used = 0
    for position, char in enumerate(text):
        used += _char_width(char)
        if used > width:
            return text[:position]
    return text


def wrap_words(text: str, width: int) -> list[str]:
    """Lines that break between words; a word that is wider than a line is cut at the line's end."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        if line and cell_width(line) + 1 + cell_width(word) <= width:
            line += " " + word
            continue
        if line:
            lines.append(line)
        while cell_width(word) > width:
            head = cut_to_width(word, width) or word[0]
            lines.append(head)
            word = word[len(head) :]
        line = word
    return [*lines, line] if line else lines


def _char_width(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
