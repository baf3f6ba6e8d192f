"""How much of a prompt a step may read while others wait for their next token: as much as keeps steps short.

A step's time is that of its decoding rows plus that of its prompt tokens. What a prompt token costs depends on the
machine, the model and how much of the prompt is behind it, so it is measured, step by step, and never assumed. Which
tokens come out does not depend on any of it. Standard library only; no clock.
"""

from __future__ import annotations

# Never fewer, or a prompt would take forever on a slow machine: the weights are read for every chunk.
MIN_CHUNK = 32
# A prompt that waits for its first token weighs as much as so many sequences that wait for their next: beyond that
# steps get longer, or small chunks would serve the few at the cost of the many.
_PROMPT_WEIGHT = 12
# Nor fewer than this for each prompt of several that wait: one long prompt may take its time, a queue of them may not.
_CHUNK_OF_MANY = 64
# Before anything was measured.
_FIRST_CHUNK = 128
# Rows of prompts are computed in tiles of so many.
_CHUNK_STEP = 16
# What twice and half as many sequences take, where it was not measured. Rather too much: what is not put down to them
# is put down to the prompt, whose chunks would then shrink to nothing for no good.
_TWICE, _HALF = 1.7, 0.8
# The share of a new measurement that is lower. A higher one counts at once: the further into a prompt, the dearer its
# tokens are.
_WEIGHT = 0.5


class StepPacer:
    """Told of every step, asked before every step.

    target_s: seconds that a step with decoding rows should take, more while many prompts wait. Where decoding alone
              takes more than half of it, prompts get as much time as decoding, so that they come to their end, too.
    """

    def __init__(self, target_s: float):
        self.target_s = target_s
        # Of steps without prompt tokens, by the bit length of their number of sequences: half as many and twice as many
        # sequences are other steps altogether.
        self._decode_s: dict[int, float] = {}
        self._prompt_token_s: float | None = None

    def note_step(self, num_prompt_tokens: int, num_decode_tokens: int, time_s: float) -> None:
        """prompt tokens: all but the one that a decoding sequence computes, also those computed once more"""
        if num_prompt_tokens == 0:
            size = num_decode_tokens.bit_length()
            self._decode_s[size] = _blend(self._decode_s.get(size), time_s)
            return
        decode_s = self._guess_decode_s(num_decode_tokens)
        # A step shorter than its decoding was thought to be says nothing good about either.
        each_s = max(time_s - decode_s, 0.25 * time_s) / num_prompt_tokens
        self._prompt_token_s = max(_blend(self._prompt_token_s, each_s), each_s)

    def limit_prompt_tokens(self, num_decoding: int, num_prompts: int) -> int:
        """For a step in which some sequences decode (at least one) and some prompts are to be read."""
        if not self._prompt_token_s:
            return _FIRST_CHUNK
        target_s = self.target_s * max(1.0, _PROMPT_WEIGHT * num_prompts / num_decoding)
        decode_s = self._guess_decode_s(num_decoding)
        time_s = max(target_s - decode_s, decode_s)
        num_tokens = int(time_s / self._prompt_token_s) // _CHUNK_STEP * _CHUNK_STEP
        return max(num_tokens, MIN_CHUNK if num_prompts < 2 else _CHUNK_OF_MANY * num_prompts)

    def _guess_decode_s(self, num_sequences: int) -> float:
        """Measured, or from the nearest size that was; 0 for no sequences, or nothing measured."""
        if num_sequences == 0 or not self._decode_s:
            return 0.0
        size = num_sequences.bit_length()
        nearest = min(self._decode_s, key=lambda known: abs(known - size))
        return self._decode_s[nearest] * (_TWICE if size > nearest else _HALF) ** abs(size - nearest)


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
