"""Beam search above the core: pure bookkeeping, driven by `LLM` and `AsyncEngine` one token a beam at a time.

A beam is a request of one token each step; the prefix cache makes its past cheap. Scores are sums of log-probabilities
of the raw logits, divided by length ** length_penalty; the length counts generated tokens without the end token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from octavo.core.interfaces import TokenLogprobs
from octavo.core.sampling_params import MAX_LOGPROBS, SamplingParams
from octavo.engine.outputs import CompletionDelta
from octavo.errors import InvalidRequestError
from octavo.text.tokenizer import Tokenizer

# Twice as many candidates as beams are looked at, so that end tokens leave enough to go on with.
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """beam_width:     beams kept, and returned at most; 1 to 10
    max_tokens:     a number; prompt and answer must fit the window
    length_penalty: above 0 favours long answers, below 0 short ones; 0 compares the sums themselves
    ignore_eos:     go on after the model's end tokens
    stop_token_ids: end a beam like an end token

    Raises InvalidRequestError, with the field's name as `param`.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        # The fields that SamplingParams has too are checked by it.
        SamplingParams(
            max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, stop_token_ids=tuple(self.stop_token_ids)
        )
        if isinstance(self.beam_width, bool) or not isinstance(self.beam_width, int):
            raise InvalidRequestError(f"beam_width is {self.beam_width!r}, but it must be an integer.", param="n")
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise InvalidRequestError(
                f"beam_width is {self.beam_width}, but it must be between 1 and {MAX_BEAM_WIDTH}.",
                param="n",
                value=self.beam_width,
            )
        is_number = isinstance(self.length_penalty, (int, float)) and not isinstance(self.length_penalty, bool)
        if not is_number or not -10.0 <= self.length_penalty <= 10.0:
            raise InvalidRequestError(
                f"length_penalty is {self.length_penalty!r}, but it must be a number between -10 and 10.",
                param="length_penalty",
                value=self.length_penalty,
            )

    @property
    def step_params(self) -> SamplingParams:
        """Of one beam's request for one token."""
        return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=2 * self.beam_width)


@dataclass(frozen=True, slots=True)
class Beam:
    """finish_reason: "stop" or "length", None while it goes on
    stop_reason:   the token of stop_token_ids that ended it
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | None = None

    def score(self, length_penalty: float) -> float:
        return _score(self.cumulative_logprob, len(self.token_ids) - (self.finish_reason == "stop"), length_penalty)


class BeamSearch:
    """live: the beams to be given one more token each, in the order in which `push` takes the answers"""

    def __init__(self, params: BeamSearchParams, eos_token_ids: Collection[int]):
        self._params = params
        self._eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._finished: list[Beam] = []
        self.live = [Beam()]

    @property
    def is_finished(self) -> bool:
        return not self.live

    def push(self, answers: list[TokenLogprobs]) -> None:
        """answers: for each live beam, the best candidates for its next token."""
        params = self._params
        candidates = [
            (beam.cumulative_logprob + logprob, beam, token_id, logprob)
            for beam, answer in zip(self.live, answers, strict=True)
            for token_id, logprob in answer.top
        ]
        candidates.sort(key=lambda candidate: -candidate[0])  # stable: among equals the better beam's better token
        self.live = []
        for rank, (total, beam, token_id, logprob) in enumerate(candidates[: 2 * params.beam_width]):
            grown = ((*beam.token_ids, token_id), (*beam.logprobs, logprob), total)
            is_stop_token = token_id in params.stop_token_ids
            if token_id in self._eos_token_ids or is_stop_token:
                # What would not have been kept as a beam is no answer either.
                if rank < params.beam_width:
                    stop_reason = token_id if is_stop_token and token_id not in self._eos_token_ids else None
                    self._finish(Beam(*grown, "stop", stop_reason))
            elif len(grown[0]) >= params.max_tokens:
                self._finish(Beam(*grown, "length"))
            elif len(self.live) < params.beam_width:
                self.live.append(Beam(*grown))
        if self.live and self._is_settled():
            self.live = []

    def best(self, num_beams: int) -> list[Beam]:
        """The best finished ones, best first."""
        return self._finished[:num_beams]

    def _finish(self, beam: Beam) -> None:
        self._finished.append(beam)
        self._finished.sort(key=lambda each: -each.score(self._params.length_penalty))
        del self._finished[self._params.beam_width :]

    def _is_settled(self) -> bool:
        """No live beam can come to score more than the worst of the answers: sums only fall."""
        if len(self._finished) < self._params.beam_width:
            return False
        penalty = self._params.length_penalty
        length = self._params.max_tokens if penalty > 0 else len(self.live[0].token_ids)
        return _score(self.live[0].cumulative_logprob, length, penalty) <= self._finished[-1].score(penalty)


def make_deltas(
    beams: list[Beam], tokenizer: Tokenizer, params: BeamSearchParams, num_prompt_tokens: int
) -> list[CompletionDelta]:
    """Each beam whole, in one delta; the last one is final."""
    deltas = []
    for index, beam in enumerate(beams):
        shown = beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids
        deltas.append(
            CompletionDelta(
                index=index,
                text=tokenizer.decode(shown, params.skip_special_tokens, is_continuation=True),
                token_ids=list(beam.token_ids),
                logprobs=[
                    TokenLogprobs(token_id, logprob)
                    for token_id, logprob in zip(beam.token_ids, beam.logprobs, strict=True)
                ],
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
                num_prompt_tokens=num_prompt_tokens,
                is_final=index == len(beams) - 1,
            )
        )
    return deltas


def _score(total: float, length: int, length_penalty: float) -> float:
    return total / max(length, 1) ** length_penalty
