"""The fields that chat completions and completions share, their bounds, and the engine's parameters made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from octavo.core.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams
from octavo.engine.beam_search import MAX_BEAM_WIDTH, BeamSearchParams
from octavo.errors import InvalidRequestError
from octavo.server.decoding import refuse_value
from octavo.server.request_ids import MAX_REQUEST_ID_CHARS, is_sane

MAX_TEMPERATURE = 2.0  # OpenAI's rule; larger values only make noise
MAX_STOPS = 64
MAX_STOP_CHARS = 1024  # of one stop string: so much text is held back while it may still become one
MAX_STOP_TOKEN_IDS = 256
MAX_ALLOWED_TOKEN_IDS = 2**18  # more than any vocabulary has today
MAX_CHOICES = 1024  # prompts times n, of one request
MAX_CACHE_SALT_CHARS = 256
_MAX_PRIORITY = 2**31 - 1


class StreamOptions(msgspec.Struct, frozen=True):
    """continuous_usage_stats: vLLM's: usage so far in every chunk"""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # padding against an observer of packet sizes: only false is supported


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both endpoints share. `n` is per prompt. Fields that constrain the text are read by `constraint`."""

    model: str | None = None
    # How tokens are chosen
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    # Where it ends
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    # How many answers, and which
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    # What is said of them
    skip_special_tokens: bool = True
    # Nothing is put between special tokens, whatever is asked for: every token's text is its own bytes.
    spaces_between_special_tokens: bool = True
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    # What the text must match
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_json_object: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    json_schema: Any = None
    # How the request is treated
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    request_id: str | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def is_scoring_only(self) -> bool:
        """max_tokens is 0: nothing is generated, the request is about its prompt's log-probabilities."""
        return self._sent_max_tokens == 0

    @property
    def num_generations(self) -> int:
        """Of one prompt."""
        return max(self.n, self.best_of or 0)

    def join_salt(self, key_salt: str) -> str:
        """The namespace in the prefix cache: of the caller's key, and within it what the request asks for."""
        return f"{key_salt}/{self.cache_salt}" if self.cache_salt else key_salt

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors about max_tokens speak of max_completion_tokens, if that is what was sent."""
        try:
            yield
        except InvalidRequestError as error:
            name = "max_completion_tokens"
            if error.param != "max_tokens" or self.max_completion_tokens is None:
                raise
            message = error.message.replace("max_tokens", name)
            raise InvalidRequestError(message, param=name, value=error.value, code=error.code) from None

    def make_sampling_params(
        self, default_max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """Raises InvalidRequestError for what SamplingParams refuses."""
        max_tokens = default_max_tokens if self._sent_max_tokens is None else self._sent_max_tokens
        if max_tokens == 0:
            if prompt_logprobs is None and not self.echoes_prompt:
                refuse_value("max_tokens", 0, "it must be at least 1; 0 only goes with echo or prompt_logprobs")
            if self.min_tokens:
                refuse_value("min_tokens", self.min_tokens, "it must be at most max_tokens, which is 0")
            max_tokens = 1  # the engine always generates; `Generation` leaves it out
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,  # type: ignore[arg-type]  # it reads mappings
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )

    def make_beam_search_params(self, max_tokens: int) -> BeamSearchParams:
        """n is the number of beams, as in vLLM. max_tokens: what the request means. Raises InvalidRequestError."""
        return BeamSearchParams(
            beam_width=self.n,
            max_tokens=max_tokens,
            length_penalty=self.length_penalty,
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids),
            skip_special_tokens=self.skip_special_tokens,
        )

    @property
    def echoes_prompt(self) -> bool:
        return False

    @property
    def _sent_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def check_sampling_fields(request: SamplingFields) -> None:
    """What neither the types nor SamplingParams check. Raises InvalidRequestError."""
    if not 0.0 <= request.temperature <= MAX_TEMPERATURE:
        refuse_value("temperature", request.temperature, f"it must be between 0 and {MAX_TEMPERATURE:g}")
    _check_lists(request)
    if not -_MAX_PRIORITY <= request.priority <= _MAX_PRIORITY:
        refuse_value("priority", request.priority, f"it must be between {-_MAX_PRIORITY} and {_MAX_PRIORITY}")
    if request.max_completion_tokens is not None and request.max_tokens not in (None, request.max_completion_tokens):
        refuse_value(
            "max_completion_tokens",
            request.max_completion_tokens,
            f"max_tokens is {request.max_tokens}; they mean the same, send one of them",
        )
    if request.prompt_logprobs is not None:
        check_num_logprobs("prompt_logprobs", request.prompt_logprobs)
    num_kept = request.truncate_prompt_tokens
    if num_kept is not None and num_kept < 1 and num_kept != -1:
        rule = "it must be at least 1, or -1 for as many as the window has room for"
        refuse_value("truncate_prompt_tokens", num_kept, rule)
    _check_names(request)
    _check_best_of(request)
    _check_beam_search(request)
    _check_stream_options(request)


def check_num_logprobs(param: str, value: int) -> None:
    if not 0 <= value <= MAX_LOGPROBS:
        refuse_value(param, value, f"it must be between 0 and {MAX_LOGPROBS}")


def _check_lists(request: SamplingFields) -> None:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    for param, entries, limit in (
        ("stop", stops, MAX_STOPS),
        ("stop_token_ids", request.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("allowed_token_ids", request.allowed_token_ids or (), MAX_ALLOWED_TOKEN_IDS),
    ):
        if len(entries) > limit:
            refuse_value(param, f"a list of {len(entries)}", f"at most {limit} are taken", show=str)
    for text in stops:
        if len(text) > MAX_STOP_CHARS:
            rule = f"one stop string may have at most {MAX_STOP_CHARS}"
            refuse_value("stop", f"a text of {len(text)} characters", rule, show=str)


def _check_names(request: SamplingFields) -> None:
    if request.request_id is not None and not is_sane(request.request_id):
        rule = f"it must be 1 to {MAX_REQUEST_ID_CHARS} letters, digits or . _ : @ / + = -"
        refuse_value("request_id", request.request_id, rule)
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= MAX_CACHE_SALT_CHARS:
        rule = f"it must have 1 to {MAX_CACHE_SALT_CHARS}"
        refuse_value("cache_salt", f"a text of {len(request.cache_salt)} characters", rule, show=str)


def _check_best_of(request: SamplingFields) -> None:
    best_of = request.best_of
    # An n that is wrong by itself is told by SamplingParams.
    if best_of is None or not 1 <= request.n <= MAX_N:
        return
    if not request.n <= best_of <= MAX_N:
        refuse_value("best_of", best_of, f"it must be between n, which is {request.n}, and {MAX_N}")
    if request.stream and best_of > request.n:
        refuse_value("best_of", best_of, "the best can only be told when all are complete; send stream false")


def _check_beam_search(request: SamplingFields) -> None:
    if not math.isfinite(request.length_penalty):
        refuse_value("length_penalty", request.length_penalty, "it must be finite", show=str)
    if not request.use_beam_search:
        if request.length_penalty != 1.0:
            refuse_value("length_penalty", request.length_penalty, "it needs use_beam_search to be true")
        return
    if request.n > MAX_BEAM_WIDTH:
        refuse_value("n", request.n, f"with use_beam_search it is the number of beams, at most {MAX_BEAM_WIDTH}")
    for name in _NOT_WITH_BEAM_SEARCH:
        value: Any = getattr(request, name, None)
        if value and value != getattr(_UNSET, name, None) and (name, value) != ("top_k", -1):
            refuse_value(name, value, "it does not go with use_beam_search; leave it out", code="unsupported_field")


# A beam's next token is always among the likeliest ones; a temperature or a seed would change nothing.
_NOT_WITH_BEAM_SEARCH = (
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "stop",
    "include_stop_str_in_output",
    "best_of",
    "prompt_logprobs",
    "top_logprobs",
    "echo",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_json_object",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "grammar",
    "json_schema",
    "tools",
)
_UNSET = SamplingFields()


def _check_stream_options(request: SamplingFields) -> None:
    if request.stream_options is None:
        return
    if not request.stream:
        refuse_value("stream_options", "set", "it needs stream to be true", show=str)
    if request.stream_options.include_obfuscation:
        raise InvalidRequestError(
            "stream_options.include_obfuscation is not supported; leave it out, or send false.",
            param="stream_options.include_obfuscation",
            code="unsupported_field",
        )
