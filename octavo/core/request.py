"""What was asked: an immutable `Request`. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.interfaces import GrammarSpec
from octavo.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to answer it; n > 1 makes n sequences of it.

    request_id:      unique among the unfinished requests (the engine layer makes it so)
    prompt_token_ids: at least one token, each below the vocabulary's size (checked at the border)
    sampling_params: with max_tokens resolved to a number
    seed:            the resolved seed; sequence `index` draws from (seed, index, position)
    eos_token_ids:   the model's end-of-sequence tokens
    arrival_time:    seconds, the engine loop's clock
    priority:        lower is more urgent (vLLM's rule); looked at by the priority policy only
    cache_salt:      blocks are shared only between requests of the same salt
    grammar:         constrains the text of each of its sequences
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    grammar: GrammarSpec | None = None
