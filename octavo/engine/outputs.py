"""What a caller gets back, in the shapes vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.interfaces import TokenLogprobs


@dataclass(slots=True)
class Logprob:
    """One token's log-probability (natural log, from the raw logits). rank 1 is the best."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One generation.

    logprobs:      one dict a token, {token_id: Logprob}: the sampled token and the best alternatives; None if not asked
    finish_reason: "stop", "length", "abort", "error", or None while it goes on
    stop_reason:   the stop string or the stop token id that ended it
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All generations of one prompt.

    prompt_logprobs: when asked for, one entry a prompt token as in CompletionOutput.logprobs; None for the first
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(slots=True)
class CompletionDelta:
    """What was added to one generation since the last delta: the streaming form.

    text:      new text, never ending inside a character nor inside what may become a stop string
    token_ids: new tokens, counted for usage; `text` may lag behind them
    logprobs:  one TokenLogprobs a new token when asked for
    prompt_logprobs: when asked for, one entry a prompt token, None for the first; in the request's first delta only
    queue_time_s: with its first tokens: from arrival to the step in which its prompt was first computed
    is_final:  the request is over: all n generations have ended, this is the last delta
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    is_final: bool = False
    error: str | None = None
    queue_time_s: float | None = None
