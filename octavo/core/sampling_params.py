"""How to generate: `SamplingParams`, checked when made. Standard library only."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from octavo.errors import InvalidRequestError

# The largest number of alternatives reported for each token; OpenAI's limit for top_logprobs.
MAX_LOGPROBS = 20
MAX_N = 128
MAX_LOGIT_BIAS = 100.0  # OpenAI's
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 256
# Logits are multiplied and divided by it: within this, and its inverse, they stay finite in float32.
MAX_REPETITION_PENALTY = 1e6
_SEED_MIN, _SEED_MAX = -(2**63), 2**64 - 1
# What other libraries call our fields, where the spelling is not near.
_ELSEWHERE = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "num_return_sequences": "n",
    "temp": "temperature",
    "eos_token_id": "stop_token_ids",
    "stop_strings": "stop",
    "bad_words_ids": "bad_words",
    "top_logprobs": "logprobs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling settings; immutable, with the names and defaults of vLLM.

    n:                  generations for the prompt, 1 to 128; they share the prompt's blocks
    temperature:        0 is greedy; at most 2 by OpenAI's rule is checked by the server, here only >= 0 and finite
    top_p:              in (0, 1]; 1 is off
    top_k:              0 or -1 is off
    min_p:              in [0, 1]; 0 is off
    seed:               None lets the engine draw one; the random numbers depend on (seed, index, position) only
    max_tokens:         None means up to the model's window
    min_tokens:         no end-of-sequence token, stop token or stop string before this many
    stop:               texts that end the generation; not part of the output
    stop_token_ids:     tokens that end the generation, beside the model's own end-of-sequence tokens
    ignore_eos:         go on after the model's end-of-sequence tokens
    presence_penalty, frequency_penalty: in [-2, 2], over the generated tokens
    repetition_penalty: in [1e-6, 1e6], over prompt and generated tokens (Keskar et al. 2019); 1 is off
    logit_bias:         {token id: -100 to 100}, added to the logits after the penalties; kept as pairs
    allowed_token_ids:  nothing but these is sampled, so an end token only if it is among them; None allows all
    bad_words:          texts that are not generated: the token that would complete one, as the tokenizer writes it with
                        and without a space before, is not sampled. Other spellings of it in tokens are not seen
    bad_words_token_ids: made of bad_words at the engine's border
    logprobs:           None for none, else the number of alternatives (0 to 20) beside the sampled token's own,
                        all from the model's raw logits, before penalties and temperature
    prompt_logprobs:    the same for the prompt's tokens from the second on; the prefix cache is not used for them
    skip_special_tokens: leave special tokens out of the text
    include_stop_str_in_output: keep the stop string, or the stop token's text, at the end of the text

    Raises InvalidRequestError, with the field's name as `param`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __new__(cls, *args: Any, **fields: Any) -> SamplingParams:
        """Refuses what is no field: a dataclass would do so too, but without a word about what was meant."""
        if not fields.keys() <= cls.__dataclass_fields__.keys():
            _refuse_unknown(next(name for name in fields if name not in cls.__dataclass_fields__), cls)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        if isinstance(self.stop, str):
            set_field(self, "stop", (self.stop,))
        set_field(self, "stop", tuple(self.stop or ()))
        set_field(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        set_field(self, "logit_bias", _read_logit_bias(self.logit_bias))
        if isinstance(self.bad_words, str):
            set_field(self, "bad_words", (self.bad_words,))
        set_field(self, "bad_words", tuple(self.bad_words or ()))
        if self.allowed_token_ids is not None:
            set_field(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.top_k == -1:
            set_field(self, "top_k", 0)

        _check_int("n", self.n, 1, MAX_N)
        _check_number("temperature", self.temperature, 0.0, math.inf)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            _refuse("top_p", self.top_p, "it must be above 0 and at most 1")
        _check_int("top_k", self.top_k, 0, 2**31 - 1, hint="use 0 or -1 to turn it off")
        _check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, _SEED_MIN, _SEED_MAX)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"it must be at most max_tokens, which is {self.max_tokens}")
        for text in self.stop:
            if not isinstance(text, str):
                _refuse("stop", text, "each stop must be a string")
            if not text:
                _refuse("stop", text, "a stop string must not be empty")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                _refuse("allowed_token_ids", [], "at least one token must be allowed; leave it out to allow all")
            for token_id in self.allowed_token_ids:
                _check_int("allowed_token_ids", token_id, 0, 2**31 - 1)
        if len(self.bad_words) > MAX_BAD_WORDS:
            _refuse("bad_words", f"a list of {len(self.bad_words)}", f"it may have at most {MAX_BAD_WORDS} entries")
        for word in self.bad_words:
            if not isinstance(word, str):
                _refuse("bad_words", word, "each bad word must be a string")
            if not word.strip():
                _refuse("bad_words", word, "a bad word must not be empty")
        _check_bool("ignore_eos", self.ignore_eos)
        _check_bool("skip_special_tokens", self.skip_special_tokens)
        _check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.repetition_penalty == 0.0:
            _refuse("repetition_penalty", self.repetition_penalty, "it must be above 0; 1 turns it off")
        _check_number("repetition_penalty", self.repetition_penalty, 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _read_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """A mapping, or pairs; ids may be written as text, as JSON does."""
    if not value:
        return ()
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        _refuse("logit_bias", value, 'it must be an object such as {"50": -100}')
    read: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            _refuse("logit_bias", value, 'it must be an object such as {"50": -100}')
        token_id, bias = pair
        if isinstance(token_id, str) and token_id.isascii() and token_id.isdigit():
            token_id = int(token_id[:11])  # too many digits for any vocabulary stay so
        _check_int("logit_bias", token_id, 0, 2**31 - 1, hint="its keys are token ids")
        _check_number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        read[token_id] = float(bias)
    if len(read) > MAX_BIASED_TOKENS:
        _refuse("logit_bias", f"an object of {len(read)}", f"it may have at most {MAX_BIASED_TOKENS} entries")
    return tuple(read.items())


def _refuse_unknown(name: str, cls: type[SamplingParams]) -> NoReturn:
    known = list(cls.__dataclass_fields__)
    near = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}."
    raise InvalidRequestError(f"SamplingParams has no field {name!r}; {hint}", param=name, code="unknown_field")


def _refuse(param: str, value: object, rule: str) -> NoReturn:
    raise InvalidRequestError(f"{param} is {value!r}, but {rule}.", param=param, value=value)


def _check_int(param: str, value: object, low: int, high: int, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(param, value, "it must be an integer")
    elif not low <= value <= high:
        _refuse(param, value, f"it must be between {low} and {high}" + (f" ({hint})" if hint else ""))


def _check_number(param: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse(param, value, "it must be a number")
    elif not math.isfinite(value):
        _refuse(param, value, "it must be finite")
    elif not low <= value <= high:
        limit = f"it must be at least {low:g}" if high == math.inf else f"it must be between {low:g} and {high:g}"
        _refuse(param, value, limit)


def _check_bool(param: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(param, value, "it must be true or false")
