"""best_of: generate more than asked for and keep the likeliest. Pure; `AsyncEngine.generate_best` drives it."""

from __future__ import annotations

import dataclasses

from octavo.core.sampling_params import MAX_N, SamplingParams
from octavo.engine.outputs import CompletionDelta
from octavo.engine.request_stream import join_deltas
from octavo.errors import InvalidRequestError


def widen_params(params: SamplingParams, best_of: int) -> SamplingParams:
    """params for all the candidates. Raises InvalidRequestError."""
    if isinstance(best_of, bool) or not isinstance(best_of, int) or not params.n <= best_of <= MAX_N:
        raise InvalidRequestError(
            f"best_of is {best_of!r}, but it must be an integer from n, which is {params.n}, to {MAX_N}.",
            param="best_of",
            value=best_of,
        )
    return dataclasses.replace(params, n=best_of, logprobs=params.logprobs or 0)


class BestOf:
    """Collects the candidates' deltas and picks those with the highest log-probability a token."""

    def __init__(self, params: SamplingParams):
        """params: as the request has them, before they were widened"""
        self._params = params
        self._candidates: dict[int, CompletionDelta] = {}

    def push(self, delta: CompletionDelta) -> None:
        known = self._candidates.get(delta.index)
        self._candidates[delta.index] = delta if known is None else join_deltas(known, delta)

    def pick(self) -> list[CompletionDelta]:
        """n whole answers, best first, the last one final. One that failed or was aborted comes last."""
        prompt_logprobs = next((c.prompt_logprobs for c in self._candidates.values() if c.prompt_logprobs), None)
        ranked = sorted(
            self._candidates.values(), key=lambda each: (_is_broken(each), -_mean_logprob(each), each.index)
        )
        picked = ranked[: self._params.n]
        for index, delta in enumerate(picked):
            delta.index = index
            delta.is_final = index == len(picked) - 1
            delta.prompt_logprobs = prompt_logprobs if index == 0 else None
            if self._params.logprobs is None:
                delta.logprobs = []
        return picked


def _is_broken(delta: CompletionDelta) -> bool:
    return delta.finish_reason not in ("stop", "length")


def _mean_logprob(delta: CompletionDelta) -> float:
    return sum(entry.logprob for entry in delta.logprobs) / max(len(delta.logprobs), 1)
