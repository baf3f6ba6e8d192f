"""Tokens become text: one detokenizer and one stop checker a sequence, for `LLM` and `AsyncEngine` alike.

Pure: no sockets, no clock. The caller tells the core when a stop string has ended a sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from octavo.core.interfaces import FinishReason, SequenceOutput, TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.outputs import CompletionDelta, CompletionOutput, Logprob, RequestOutput
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.stop import StopChecker
from octavo.text.tokenizer import Tokenizer


class RequestText:
    """The text side of one request: its n sequences, and which delta is the last.

    shown_token_ids: see IncrementalDetokenizer
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        num_prompt_tokens: int,
        shown_token_ids: Collection[int] = (),
    ):
        self._sequences = [_SequenceText(tokenizer, params, shown_token_ids) for _ in range(params.n)]
        self._num_unfinished = params.n
        self._num_prompt_tokens = num_prompt_tokens
        # Collected until the first delta, which takes them along.
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]

    @property
    def is_finished(self) -> bool:
        return self._num_unfinished == 0

    def push(self, output: SequenceOutput) -> CompletionDelta | None:
        """What a step's output adds; None when it adds nothing yet, or the sequence has already ended for us.

        When the delta has a finish_reason that the output does not have, a stop string was found and the core still
        believes that the sequence runs.
        """
        if output.new_prompt_logprobs and self._prompt_logprobs is not None:
            self._prompt_logprobs += output.new_prompt_logprobs
            if not output.new_token_ids and output.finish_reason is None:
                return None
        sequence = self._sequences[output.index]
        if sequence.is_finished:
            return None
        delta = sequence.push(output)
        delta.num_prompt_tokens = self._num_prompt_tokens
        delta.num_cached_tokens = output.num_cached_tokens
        if self._prompt_logprobs is not None and len(self._prompt_logprobs) == self._num_prompt_tokens:
            delta.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        if delta.finish_reason is not None:
            self._end(sequence, delta)
        return delta

    def end_all(self, reason: FinishReason, error: str | None = None) -> list[CompletionDelta]:
        """End every unfinished sequence from outside: an abort, or the engine's death. The last delta is final."""
        deltas = []
        for index, sequence in enumerate(self._sequences):
            if not sequence.is_finished:
                output = SequenceOutput(request_id="", index=index, finish_reason=reason, error=error)
                delta = sequence.push(output)
                delta.num_prompt_tokens = self._num_prompt_tokens
                self._end(sequence, delta)
                deltas.append(delta)
        return deltas

    def _end(self, sequence: _SequenceText, delta: CompletionDelta) -> None:
        sequence.is_finished = True
        self._num_unfinished -= 1
        delta.is_final = self._num_unfinished == 0


class _SequenceText:
    __slots__ = (
        "_checker",
        "_detokenizer",
        "_includes_stop",
        "_min_tokens",
        "_num_tokens",
        "_skips_special_tokens",
        "is_finished",
    )

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, shown_token_ids: Collection[int]):
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, params.skip_special_tokens, is_continuation=True, shown_token_ids=shown_token_ids
        )
        self._includes_stop = params.include_stop_str_in_output
        self._checker = StopChecker(params.stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._skips_special_tokens = params.skip_special_tokens
        self._num_tokens = 0
        self.is_finished = False

    def push(self, output: SequenceOutput) -> CompletionDelta:
        reason = output.finish_reason
        shown = output.new_token_ids
        # The token that ended the generation is counted, but its text is no part of the answer: a stop token is like a
        # stop string, and an end token is a control token, even where the tokenizer's files do not mark it as one.
        is_ended_by_token = reason is FinishReason.STOP and not output.ends_in_text
        is_left_out = self._skips_special_tokens if output.stop_reason is None else not self._includes_stop
        if is_ended_by_token and is_left_out:
            shown = shown[:-1]
        text, num_shown, stop = self._push_tokens(shown)
        if stop is None and reason is not None:
            rest, stop = self._finish()
            text += rest
        if stop is not None and self._includes_stop:
            text += stop
        if stop is None:
            return CompletionDelta(
                index=output.index,
                text=text,
                token_ids=output.new_token_ids,
                logprobs=output.new_logprobs,
                finish_reason=None if reason is None else reason.value,
                stop_reason=output.stop_reason,
                error=output.error,
            )
        # Tokens after the one that completed the stop string were never asked for.
        return CompletionDelta(
            index=output.index,
            text=text,
            token_ids=output.new_token_ids[:num_shown],
            logprobs=output.new_logprobs[:num_shown],
            finish_reason=FinishReason.STOP.value,
            stop_reason=stop,
        )

    def _push_tokens(self, token_ids: Sequence[int]) -> tuple[str, int, str | None]:
        """(text that may be sent, tokens used, the stop string that was completed)."""
        if self._checker is None:
            return self._detokenizer.push(token_ids), len(token_ids), None
        text = ""
        for position, token_id in enumerate(token_ids):
            self._num_tokens += 1
            piece = self._detokenizer.push((token_id,))
            if self._num_tokens < self._min_tokens:
                text += piece
                continue
            match = self._checker.push(piece)
            text += match.text
            if match.stop is not None:
                return text, position + 1, match.stop
        return text, len(token_ids), None

    def _finish(self) -> tuple[str, str | None]:
        """What the detokenizer and the stop checker still hold."""
        rest = self._detokenizer.finish()
        if self._checker is None:
            return rest, None
        match = self._checker.push(rest)
        return match.text + self._checker.finish(), match.stop


class OutputAccumulator:
    """Deltas add up to a RequestOutput."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
    ):
        self._tokenizer = tokenizer
        self._texts: list[list[str]] = [[] for _ in range(params.n)]
        with_logprobs = params.logprobs is not None
        self.error: str | None = None
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            outputs=[
                CompletionOutput(
                    index=index,
                    logprobs=[] if with_logprobs else None,
                    cumulative_logprob=0.0 if with_logprobs else None,
                )
                for index in range(params.n)
            ],
        )

    def push(self, delta: CompletionDelta) -> None:
        completion = self.output.outputs[delta.index]
        completion.token_ids += delta.token_ids
        self._texts[delta.index].append(delta.text)
        if completion.logprobs is not None and completion.cumulative_logprob is not None:
            for entry in delta.logprobs:
                completion.logprobs.append(self._named(entry))
                completion.cumulative_logprob += entry.logprob
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = [
                None if entry is None else self._named(entry) for entry in delta.prompt_logprobs
            ]
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, delta.num_cached_tokens)
        self.error = self.error or delta.error
        if delta.finish_reason is not None:
            completion.finish_reason = delta.finish_reason
            completion.stop_reason = delta.stop_reason
            completion.text = "".join(self._texts[delta.index])
        if delta.is_final:
            self.output.finished = True

    def _named(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The sampled token first, then the alternatives, best first. A rank beyond the alternatives is not known."""
        text = self._tokenizer.token_text
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
        named = {entry.token_id: Logprob(entry.logprob, ranks.get(entry.token_id), text(entry.token_id))}
        for token_id, logprob in entry.top:
            if token_id != entry.token_id:
                named[token_id] = Logprob(logprob, ranks[token_id], text(token_id))
        return named
