"""How much of a prompt a step may read while others wait for their next token: as much as keeps steps short.

A step's time is that of its decoding rows plus that of its prompt tokens. What a prompt token costs depends on the
machine, the model and how much of the prompt is behind it, so it is measured, step by step, and never assumed. Which
tokens come out does not depend on any of it. Standard library only; no clock.
"""

from __future__ import annotations

# Never fewer, or a prompt would take forever on a slow machine: the weights are read for every chunk.
MIN_CHUNK = 32
# Before anything was measured.
_FIRST_CHUNK = 128
# Rows of prompts are computed in tiles of so many.
_CHUNK_STEP = 16
# The share of a new measurement. The longer the prompt is, the dearer its tokens: the latest step tells most.
_WEIGHT = 0.5


class StepPacer:
    """Told of every step, asked before every step.

    target_s: seconds that a step with decoding rows should take. Where decoding alone takes more than half of it,
              prompts get as much time as decoding, so that they come to their end, too.
    """

    def __init__(self, target_s: float):
        self.target_s = target_s
        self._decode_s = 0.0  # of a step without prompt tokens
        self._prompt_token_s: float | None = None

    def note_step(self, num_prompt_tokens: int, num_decode_tokens: int, time_s: float) -> None:
        """prompt tokens: all but the one that a decoding sequence computes, also those computed once more"""
        if num_prompt_tokens == 0:
            self._decode_s = _blend(self._decode_s or None, time_s)
            return
        decode_s = self._decode_s if num_decode_tokens > 0 else 0.0
        # A step shorter than its decoding was thought to be says nothing good about either.
        each_s = max(time_s - decode_s, 0.25 * time_s) / num_prompt_tokens
        self._prompt_token_s = _blend(self._prompt_token_s, each_s)

    def limit_prompt_tokens(self) -> int:
        """For a step in which sequences decode."""
        if not self._prompt_token_s:
            return _FIRST_CHUNK
        time_s = max(self.target_s - self._decode_s, self._decode_s)
        num_tokens = int(time_s / self._prompt_token_s) // _CHUNK_STEP * _CHUNK_STEP
        return max(num_tokens, MIN_CHUNK)


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
