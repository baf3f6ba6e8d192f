"""The border: a prompt and its sampling settings become a `Request`, or an error that says what to send instead.

Both `LLM` and `AsyncEngine` let nothing into the core that has not been through here.
"""

from __future__ import annotations

import dataclasses
import operator
import random
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from octavo.core.interfaces import GrammarSpec
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What a request is held against.

    max_model_len: prompt and answer together, in tokens
    vocab_size:    rows of the model's embedding; token ids are below it
    bos_token_id:  what an empty prompt starts from; None refuses it
    eos_token_ids: end the generation unless the request says ignore_eos
    encode_plain:  of the tokenizer, for bad_words; without it they are refused
    """

    max_model_len: int
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    encode_plain: Callable[[str, bool], list[int]] | None = None


class SeedSource:
    """Seeds for the requests that bring none: from the system's entropy, or, given a seed, always the same ones."""

    def __init__(self, seed: int | None = None):
        self._random: random.Random = secrets.SystemRandom() if seed is None else random.Random(seed)

    def draw(self) -> int:
        return self._random.getrandbits(63)


def make_request(
    request_id: str,
    prompt_token_ids: Iterable[int],
    params: SamplingParams,
    limits: RequestLimits,
    seeds: SeedSource,
    *,
    priority: int = 0,
    cache_salt: str = "",
    grammar: GrammarSpec | None = None,
    prompt_param: str = "prompt",
) -> Request:
    """prompt_param: the field that the prompt came from, for errors. Raises InvalidRequestError."""
    token_ids = check_prompt(prompt_token_ids, limits, prompt_param)
    resolved = resolve_params(len(token_ids), params, limits, prompt_param)
    return Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling_params=resolved,
        seed=seeds.draw() if params.seed is None else params.seed,
        eos_token_ids=limits.eos_token_ids,
        arrival_time=time.monotonic(),
        priority=priority,
        cache_salt=cache_salt,
        grammar=grammar,
    )


def check_prompt(token_ids: Iterable[int], limits: RequestLimits, param: str = "prompt") -> tuple[int, ...]:
    """At least one token, all in the vocabulary, and room for an answer. Raises InvalidRequestError."""
    checked = _to_plain_ints(token_ids, param)
    if not checked:
        if limits.bos_token_id is None:
            raise InvalidRequestError(
                f"The {param} is empty, and this model has no beginning-of-sequence token to start from; "
                "send at least one token.",
                param=param,
                code="empty_prompt",
            )
        checked = (limits.bos_token_id,)
    if min(checked) < 0 or max(checked) >= limits.vocab_size:
        position, wrong = next((i, t) for i, t in enumerate(checked) if not 0 <= t < limits.vocab_size)
        raise InvalidRequestError(
            f"{param} has the token id {wrong} at position {position}, but this model's vocabulary has the ids "
            f"0 to {limits.vocab_size - 1}.",
            param=param,
            value=wrong,
            code="token_id_out_of_range",
        )
    if len(checked) >= limits.max_model_len:
        raise InvalidRequestError(
            f"{_begin_with(param)} {len(checked)} tokens, but max_model_len is {limits.max_model_len} for prompt and "
            f"answer together; shorten {'them' if param == 'messages' else 'it'} by "
            f"{len(checked) - limits.max_model_len + 1} tokens, to at most {limits.max_model_len - 1}.",
            param=param,
            value=len(checked),
            code="context_length_exceeded",
        )
    return checked


def resolve_params(
    num_prompt_tokens: int, params: SamplingParams, limits: RequestLimits, prompt_param: str = "prompt"
) -> SamplingParams:
    """The parameters with max_tokens as a number. Raises InvalidRequestError."""
    room = limits.max_model_len - num_prompt_tokens
    if params.max_tokens is not None and params.max_tokens > room:
        raise InvalidRequestError(
            f"max_tokens is {params.max_tokens}, but {_has(prompt_param)} {num_prompt_tokens} tokens "
            f"and max_model_len is {limits.max_model_len}; use at most {room}.",
            param="max_tokens",
            value=params.max_tokens,
            code="context_length_exceeded",
        )
    if params.min_tokens > room:
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}, but {_has(prompt_param)} {num_prompt_tokens} tokens "
            f"and max_model_len is {limits.max_model_len}; use at most {room}.",
            param="min_tokens",
            value=params.min_tokens,
            code="context_length_exceeded",
        )
    _check_token_ids("stop_token_ids", params.stop_token_ids, limits)
    _check_token_ids("allowed_token_ids", params.allowed_token_ids or (), limits)
    _check_token_ids("logit_bias", (token_id for token_id, _ in params.logit_bias), limits)
    if params.max_tokens is not None and not params.bad_words:
        return params
    return dataclasses.replace(
        params,
        max_tokens=room if params.max_tokens is None else params.max_tokens,
        bad_words_token_ids=_encode_bad_words(params.bad_words, limits),
    )


def _has(param: str) -> str:
    """The prompt within a sentence: "the messages have", "the prompt has", "prompt[1] has"."""
    return f"{param if '[' in param else f'the {param}'} {'have' if param == 'messages' else 'has'}"


def _begin_with(param: str) -> str:
    words = _has(param)
    return f"T{words[1:]}" if words.startswith("the ") else words


def _check_token_ids(param: str, token_ids: Iterable[int], limits: RequestLimits) -> None:
    for token_id in token_ids:
        if token_id >= limits.vocab_size:
            raise InvalidRequestError(
                f"{param} has the token id {token_id}, but this model's vocabulary has the ids "
                f"0 to {limits.vocab_size - 1}.",
                param=param,
                value=token_id,
                code="token_id_out_of_range",
            )


def _encode_bad_words(words: Iterable[str], limits: RequestLimits) -> tuple[tuple[int, ...], ...]:
    """Each word as the tokenizer writes it within a text: as it stands, and with a space before."""
    encoded: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            token_ids = tuple(limits.encode_plain(text, True)) if limits.encode_plain is not None else ()
            if not token_ids or max(token_ids) >= limits.vocab_size:
                raise InvalidRequestError(
                    f"bad_words has {word!r}, which this model cannot write.", param="bad_words", value=word
                )
            encoded[token_ids] = None
    return tuple(encoded)


def _to_plain_ints(token_ids: Iterable[Any], param: str) -> tuple[int, ...]:
    """NumPy's integers are fine; True and 1.0 are mistakes."""
    token_ids = tuple(token_ids)
    if set(map(type, token_ids)) <= {int}:
        return token_ids
    for position, token_id in enumerate(token_ids):
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
            raise InvalidRequestError(
                f"{param} has {token_id!r} at position {position}, but token ids are integers.",
                param=param,
                value=token_id,
                code="invalid_type",
            )
    return tuple(map(operator.index, token_ids))
