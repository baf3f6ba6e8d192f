"""What a server sends of a model's reasoning, told apart from its answer. Standard library only."""

from __future__ import annotations

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Reasoning(str):
    """A piece of it. Shown dimmed on a terminal, and no part of the answer or of the conversation."""

    __slots__ = ()
