"""From logits to tokens: the sampling settings of a step's rows as arrays, and the answers as plain data.

A random number depends on (the sequence's seed, the token's position) and on nothing else, so a seeded request gives
the same tokens alone, in a crowd, or after a preemption. The drawing itself is the op `sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_

import numpy as np

from octavo.core.interfaces import ModelRunnerOutput, ScheduledSequence, SchedulerOutput, TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.errors import NO_ALLOWED_TOKEN, RequestFailedError
from octavo.ops.interface import Array, Ops, PenaltyRows, SampledRows, SamplingBatch

_MASK = 2**64 - 1


def random_numbers(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """[R] float64, uniform in [0, 1): 53 bits of mix(mix(seed) xor position). The numbers are part of what a seed means
    to users, so this function must never change. Any integer is a seed; it counts modulo 2^64.
    """
    return _draw_at(mix_seeds(seeds), positions)


def mix_seeds(seeds: Sequence[int]) -> np.ndarray:
    """[R] uint64, the half of `random_numbers` that does not depend on the position."""
    return _mix(np.array([seed & _MASK for seed in seeds], np.uint64))


def _draw_at(mixed_seeds: np.ndarray, positions: Sequence[int]) -> np.ndarray:
    bits = _mix(mixed_seeds ^ np.array(positions, np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's step and finalizer (Steele, Lea and Flood 2014), modulo 2^64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class TokenCounts:
    """The distinct tokens of one sequence, in order of appearance, and how often each was generated.

    Kept between steps, so that a step costs what it adds. `num_tokens` tokens have been counted.
    """

    def __init__(self, num_prompt_tokens: int):
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self._last_token_id = -1
        self._index_of: dict[int, int] = {}
        self._token_ids = np.empty(64, np.int32)
        self._counts = np.empty(64, np.int32)

    def can_go_on(self, token_ids: Sequence[int], num_prompt_tokens: int, end: int) -> bool:
        """Whether the first `end` tokens begin with what has been counted; looks at the last one only."""
        if num_prompt_tokens != self.num_prompt_tokens or self.num_tokens > end:
            return False
        return self.num_tokens == 0 or token_ids[self.num_tokens - 1] == self._last_token_id

    def count(self, token_ids: Sequence[int], end: int) -> None:
        """Take in the tokens up to `end`."""
        for position in range(self.num_tokens, end):
            token_id = token_ids[position]
            index = self._index_of.get(token_id)
            if index is None:
                index = self._index_of[token_id] = len(self._index_of)
                if index == len(self._token_ids):
                    self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
                    self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
                self._token_ids[index] = token_id
                self._counts[index] = 0
            if position >= self.num_prompt_tokens:
                self._counts[index] += 1
        if end > self.num_tokens:
            self._last_token_id = token_ids[end - 1]
            self.num_tokens = end

    @property
    def token_ids(self) -> np.ndarray:
        return self._token_ids[: len(self._index_of)]

    @property
    def output_counts(self) -> np.ndarray:
        return self._counts[: len(self._index_of)]


class RowSettings:
    """What stays the same of a step's rows as long as the same sequences are sampled; arrays are on the device."""

    def __init__(self, settings: list[SamplingParams], seeds: list[int], move: Callable[[np.ndarray], Array]):
        self.settings, self.seeds = settings, seeds
        self._move = move
        self.temperature = move(np.array([params.temperature for params in settings], np.float32))
        self.top_k = move(np.array([params.top_k for params in settings], np.int32))
        self.top_p = move(np.array([params.top_p for params in settings], np.float32))
        self.min_p = move(np.array([params.min_p for params in settings], np.float32))
        num_logprobs = [-1 if params.logprobs is None else params.logprobs for params in settings]
        self.num_logprobs = move(np.array(num_logprobs, np.int32))
        self._mixed_seeds = mix_seeds(seeds)
        self._is_greedy = all(params.is_greedy for params in settings)
        self._no_random = move(np.zeros(len(settings)))
        self.has_penalties = any(_has_penalties(params) for params in settings)
        self.has_bias = any(params.logit_bias for params in settings)
        self.has_allowed = any(params.allowed_token_ids is not None for params in settings)
        self.has_bad_words = any(params.bad_words_token_ids for params in settings)
        self.has_masks = self.has_allowed

    def draw(self, sampling: Sequence[ScheduledSequence]) -> Array:
        if self._is_greedy:
            return self._no_random  # nobody reads them
        return self._move(_draw_at(self._mixed_seeds, [_position_of_next(sequence) for sequence in sampling]))


class Sampler:
    def __init__(self, ops: Ops):
        self._ops = ops
        self._rows = RowSettings([], [], ops.to_device)
        self._counts: dict[int, TokenCounts] = {}
        self._allowed: dict[int, np.ndarray] = {}  # the masks of allowed_token_ids
        self._masks = np.empty((0, 0), np.int32)  # of the last step, as large as any before

    @property
    def num_kept_sequences(self) -> int:
        return len(self._counts.keys() | self._allowed.keys())

    def drop(self, seq_ids: Sequence[int]) -> None:
        """Forget sequences that ended or were preempted; unknown ones are fine."""
        for seq_id in seq_ids:
            self._counts.pop(seq_id, None)
            self._allowed.pop(seq_id, None)

    def sample(self, logits: Array, plan: SchedulerOutput) -> ModelRunnerOutput:
        """logits: [R, vocab_size] float32, one row for each sequence with is_sampling, in order, then one for each of
        the scored_positions; changed in place."""
        sampling = [sequence for sequence in plan.scheduled if sequence.is_sampling]
        scored = [sequence for sequence in plan.scheduled if sequence.prompt_logprobs_start is not None]
        output = ModelRunnerOutput()
        if sampling:
            batch, failures = self.build_batch(sampling, logits.shape[1])
            rows = logits[: len(sampling)] if scored else logits
            sampled = self._ops.sample(rows, batch)
            output = _make_output(sampling, sampled, rows, failures)
        if scored:
            self._score_prompts(logits[len(sampling) :], scored, output)
        return output

    def _score_prompts(self, logits: Array, scored: Sequence[ScheduledSequence], output: ModelRunnerOutput) -> None:
        """Each row is sampled with the prompt's next token as the only one allowed: the same arithmetic, to the bit, as
        for tokens that are generated."""
        targets = [(sequence, position + 1) for sequence in scored for position in sequence.scored_positions]
        if not targets:
            return
        num_rows, vocab_size = logits.shape
        assert num_rows == len(targets), (num_rows, len(targets))
        token_ids = np.array([sequence.token_ids[position] for sequence, position in targets], np.uint32)
        masks = np.zeros((num_rows, -(-vocab_size // 32)), np.uint32)
        rows = np.arange(num_rows, dtype=np.int32)
        masks[rows, token_ids // 32] = np.uint32(1) << token_ids % np.uint32(32)
        batch = SamplingBatch(
            temperature=np.zeros(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int32),
            top_p=np.ones(num_rows, np.float32),
            min_p=np.zeros(num_rows, np.float32),
            random=np.zeros(num_rows),
            num_logprobs=np.array([sequence.sampling_params.prompt_logprobs for sequence, _ in targets], np.int32),
            allowed=(rows, masks.view(np.int32)),
        )
        sampled = self._ops.sample(logits, _to_device(self._ops, batch))
        for row, (sequence, position) in enumerate(targets):
            if sampled.token_ids[row] < 0:
                output.failures.setdefault(sequence.seq_id, _explain_failure(logits, row))
                continue
            entry = _read_logprobs(sampled, row, sequence.token_ids[position], batch.num_logprobs[row])
            output.prompt_logprobs.setdefault(sequence.seq_id, []).append(entry)

    def build_batch(
        self, sampling: Sequence[ScheduledSequence], vocab_size: int
    ) -> tuple[SamplingBatch, dict[int, str]]:
        """The settings of the rows, on the device, with the interface's dtypes; and for each sequence whose grammar
        cannot go on, its seq_id with a sentence."""
        rows = self._find_rows(sampling)
        allowed, failures = self._write_masks(sampling, vocab_size) if rows.has_masks else (None, {})
        batch = SamplingBatch(
            temperature=rows.temperature,
            top_k=rows.top_k,
            top_p=rows.top_p,
            min_p=rows.min_p,
            random=rows.draw(sampling),
            num_logprobs=rows.num_logprobs,
            penalties=self._build_penalties(sampling) if rows.has_penalties else None,
            banned=_build_banned(sampling) if rows.has_bad_words or _any_banned(sampling) else None,
            allowed=allowed,
            bias=_build_bias(sampling) if rows.has_bias else None,
        )
        is_plain = batch.penalties is None and batch.banned is None and allowed is None and batch.bias is None
        return batch if is_plain else _to_device(self._ops, batch), failures

    def _find_rows(self, sampling: Sequence[ScheduledSequence]) -> RowSettings:
        """Of the last step, when the same sequences are sampled again: converting them costs more than a draw."""
        settings = [sequence.sampling_params for sequence in sampling]
        seeds = [sequence.seed for sequence in sampling]
        rows = self._rows
        is_same = len(rows.settings) == len(settings) and rows.seeds == seeds and all(map(is_, rows.settings, settings))
        if not is_same:
            rows = self._rows = RowSettings(settings, seeds, self._ops.to_device)
        # A grammar is a sequence's, not of its parameters.
        rows.has_masks = rows.has_allowed or any(sequence.grammar is not None for sequence in sampling)
        return rows

    def _write_masks(
        self, sampling: Sequence[ScheduledSequence], vocab_size: int
    ) -> tuple[tuple[np.ndarray, np.ndarray] | None, dict[int, str]]:
        """SamplingBatch.allowed, and the failures."""
        rows = [row for row, sequence in enumerate(sampling) if _has_mask(sequence)]
        failures: dict[int, str] = {}
        if not rows:
            return None, failures
        num_words = -(-vocab_size // 32)
        if self._masks.shape[0] < len(rows) or self._masks.shape[1] != num_words:
            self._masks = np.empty((len(rows), num_words), np.int32)
        masks = self._masks[: len(rows)]
        for row, mask in zip(rows, masks, strict=True):
            failure = self._write_mask(sampling[row], mask)
            if failure is not None:
                failures[sampling[row].seq_id] = failure
                mask.fill(-1)  # what is sampled does not matter
        return (np.array(rows, np.int32), masks), failures

    def _write_mask(self, sequence: ScheduledSequence, mask: np.ndarray) -> str | None:
        """Returns a sentence when nothing can be sampled."""
        grammar = sequence.grammar
        if grammar is not None:
            try:
                grammar.write_mask(mask)
            except RequestFailedError as error:
                return error.message
        if sequence.sampling_params.allowed_token_ids is not None:
            allowed = self._find_allowed(sequence, len(mask))
            if grammar is None:
                mask[:] = allowed
            else:
                mask &= allowed
                if not mask.any():
                    return NO_ALLOWED_TOKEN
        _exclude(mask, sequence.banned_token_ids)
        _exclude(mask, _find_bad_ends(sequence))
        return None

    def _find_allowed(self, sequence: ScheduledSequence, num_words: int) -> np.ndarray:
        found = self._allowed.get(sequence.seq_id)
        if found is None:
            token_ids = np.array(sequence.sampling_params.allowed_token_ids, np.uint32)
            words = np.zeros(num_words, np.uint32)
            np.bitwise_or.at(words, token_ids // 32, np.uint32(1) << token_ids % np.uint32(32))
            found = self._allowed[sequence.seq_id] = words.view(np.int32)
        return found

    def _build_penalties(self, sampling: Sequence[ScheduledSequence]) -> PenaltyRows | None:
        rows = [row for row, sequence in enumerate(sampling) if _has_penalties(sequence.sampling_params)]
        if not rows:
            return None
        counts = [self._update_counts(sampling[row]) for row in rows]
        start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([len(count.token_ids) for count in counts], out=start[1:])
        settings = [sampling[row].sampling_params for row in rows]
        return PenaltyRows(
            rows=np.array(rows, np.int32),
            start=start,
            token_ids=np.concatenate([count.token_ids for count in counts]),
            output_counts=np.concatenate([count.output_counts for count in counts]),
            presence=np.array([params.presence_penalty for params in settings], np.float32),
            frequency=np.array([params.frequency_penalty for params in settings], np.float32),
            repetition=np.array([params.repetition_penalty for params in settings], np.float32),
        )

    def _update_counts(self, sequence: ScheduledSequence) -> TokenCounts:
        end = _position_of_next(sequence)
        counts = self._counts.get(sequence.seq_id)
        if counts is None or not counts.can_go_on(sequence.token_ids, sequence.num_prompt_tokens, end):
            counts = self._counts[sequence.seq_id] = TokenCounts(sequence.num_prompt_tokens)
        counts.count(sequence.token_ids, end)
        return counts


def _position_of_next(sequence: ScheduledSequence) -> int:
    """The position that the sampled token will have."""
    return sequence.num_computed_tokens + sequence.num_scheduled_tokens


def _exclude(mask: np.ndarray, token_ids: Sequence[int]) -> None:
    """Clear the tokens' bits, unless none would be left: text that is complete ends, whatever else was asked for."""
    if not token_ids:
        return
    words = mask.view(np.uint32)
    kept = {token_id // 32: words[token_id // 32] for token_id in token_ids}
    for token_id in token_ids:
        words[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    if not mask.any():
        for index, word in kept.items():
            words[index] = word


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _has_mask(sequence: ScheduledSequence) -> bool:
    return sequence.grammar is not None or sequence.sampling_params.allowed_token_ids is not None


def _find_bad_ends(sequence: ScheduledSequence) -> list[int]:
    """The tokens that would complete one of bad_words, looking at what was generated."""
    bad_words = sequence.sampling_params.bad_words_token_ids
    if not bad_words:
        return []
    token_ids = sequence.token_ids
    end = _position_of_next(sequence)
    found = []
    for *head, last in bad_words:
        start = end - len(head)
        if start >= sequence.num_prompt_tokens and list(token_ids[start:end]) == head:
            found.append(last)
    return found


def _any_banned(sampling: Sequence[ScheduledSequence]) -> bool:
    return any(sequence.banned_token_ids for sequence in sampling)


def _build_banned(sampling: Sequence[ScheduledSequence]) -> tuple[np.ndarray, np.ndarray] | None:
    pairs: list[tuple[int, int]] = []
    for row, sequence in enumerate(sampling):
        has_bad_words = bool(sequence.sampling_params.bad_words_token_ids)
        if (sequence.banned_token_ids or has_bad_words) and not _has_mask(sequence):  # else the mask excludes them
            pairs += [(row, token_id) for token_id in (*sequence.banned_token_ids, *_find_bad_ends(sequence))]
    if not pairs:
        return None
    rows, token_ids = zip(*pairs, strict=True)
    return np.array(rows, np.int32), np.array(token_ids, np.int32)


def _build_bias(sampling: Sequence[ScheduledSequence]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    triples = [
        (row, token_id, value)
        for row, sequence in enumerate(sampling)
        if sequence.sampling_params.logit_bias
        for token_id, value in sequence.sampling_params.logit_bias
    ]
    if not triples:
        return None
    rows, token_ids, values = zip(*triples, strict=True)
    return np.array(rows, np.int32), np.array(token_ids, np.int32), np.array(values, np.float32)


def _to_device(ops: Ops, batch: SamplingBatch) -> SamplingBatch:
    move = ops.to_device
    penalties = batch.penalties
    if penalties is not None:
        penalties = PenaltyRows(
            rows=move(penalties.rows),
            start=move(penalties.start),
            token_ids=move(penalties.token_ids),
            output_counts=move(penalties.output_counts),
            presence=move(penalties.presence),
            frequency=move(penalties.frequency),
            repetition=move(penalties.repetition),
        )
    return SamplingBatch(
        temperature=move(batch.temperature),
        top_k=move(batch.top_k),
        top_p=move(batch.top_p),
        min_p=move(batch.min_p),
        random=move(batch.random),
        num_logprobs=move(batch.num_logprobs),
        penalties=penalties,
        banned=None if batch.banned is None else (move(batch.banned[0]), move(batch.banned[1])),
        allowed=None if batch.allowed is None else (move(batch.allowed[0]), move(batch.allowed[1])),
        bias=None if batch.bias is None else (move(batch.bias[0]), move(batch.bias[1]), move(batch.bias[2])),
    )


def _make_output(
    sampling: Sequence[ScheduledSequence], sampled: SampledRows, logits: Array, failures: dict[int, str]
) -> ModelRunnerOutput:
    output = ModelRunnerOutput(failures=failures)
    for row, (sequence, token_id) in enumerate(zip(sampling, sampled.token_ids.tolist(), strict=True)):
        if sequence.seq_id in failures:
            continue
        if token_id < 0:
            output.failures[sequence.seq_id] = _explain_failure(logits, row)
            continue
        output.token_ids[sequence.seq_id] = token_id
        num_logprobs = sequence.sampling_params.logprobs
        if num_logprobs is not None:
            output.logprobs[sequence.seq_id] = _read_logprobs(sampled, row, token_id, num_logprobs)
    return output


def _read_logprobs(sampled: SampledRows, row: int, token_id: int, num_logprobs: int) -> TokenLogprobs:
    ids = sampled.top_ids[row, :num_logprobs].tolist()
    values = sampled.top_logprobs[row, :num_logprobs].tolist()
    # A vocabulary smaller than the number wanted leaves -1 at the end.
    top = tuple((top_id, value) for top_id, value in zip(ids, values, strict=True) if top_id >= 0)
    return TokenLogprobs(token_id, float(sampled.logprobs[row]), top)


def _explain_failure(logits: Array, row: int) -> str:
    values = np.asarray(logits[row])
    if np.isnan(values).any() or np.isposinf(values).any():
        return (
            "The model's logits are not finite (NaN or infinite): the weights may be damaged, or a value left the "
            "range of float16; try --kv-cache-dtype float32."
        )
    return "No token is left to sample: every token of the vocabulary is excluded."
