"""The API's request types, and how a body becomes one: strictly, with a sentence for whatever is wrong.

A body passes four doors: it is JSON, it is an object, its fields are ones we know and support (`fields`), and their
types and ranges are right. Nothing is ignored and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from octavo.core.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams
from octavo.errors import InvalidRequestError
from octavo.server.decoding import convert_fields, decode_json_object, refuse_value
from octavo.server.fields import keep_supported, refuse_pending
from octavo.server.messages import check_messages

MAX_TEMPERATURE = 2.0  # OpenAI's rule; larger values only make noise
MAX_STOPS = 64
MAX_STOP_TOKEN_IDS = 256
MAX_CHOICES = 1024  # prompts times n, of one request
_MAX_PRIORITY = 2**31 - 1
# OpenAI's default of the older endpoint; a chat goes on to the model's window instead.
_COMPLETION_MAX_TOKENS = 16


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against an observer of packet sizes: only false is supported


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both endpoints share. `n` is per prompt."""

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    priority: int = 0
    request_id: str | None = None
    cache_salt: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    def join_salt(self, key_salt: str) -> str:
        """The namespace in the prefix cache: of the caller's key, and within it what the request asks for."""
        return f"{key_salt}/{self.cache_salt}" if self.cache_salt else key_salt

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

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

    def make_sampling_params(self, default_max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises InvalidRequestError for what SamplingParams refuses."""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=default_max_tokens if max_tokens is None else max_tokens,
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logprobs=logprobs,
        )


class ChatRequest(SamplingFields, kw_only=True):
    """messages: as the chat template takes them, checked by `messages`"""

    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int | None = None
    # The messages' and tools' side; their shapes are checked by those who read them.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    include_reasoning: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    add_special_tokens: Any = None

    @property
    def sampling_params(self) -> SamplingParams:
        return self.make_sampling_params(None, (self.top_logprobs or 0) if self.logprobs else None)


class CompletionRequest(SamplingFields, kw_only=True):
    """prompts: one entry a prompt, a text or token ids; made from `prompt`"""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    @property
    def sampling_params(self) -> SamplingParams:
        return self.make_sampling_params(_COMPLETION_MAX_TOKENS, self.logprobs)


def decode_chat_request(body: bytes) -> ChatRequest:
    """Raises InvalidRequestError."""
    fields = _decode_fields(body, ChatRequest, {"prompt": "/v1/completions", "echo": "/v1/completions"})
    refuse_pending(fields)
    if "messages" in fields:
        fields["messages"] = check_messages(fields["messages"])
    request = convert_fields(fields, ChatRequest)
    _check_shared(request)
    if request.top_logprobs is not None:
        _check_top_logprobs("top_logprobs", request.top_logprobs)
        if not request.logprobs:
            refuse_value("top_logprobs", request.top_logprobs, "it needs logprobs to be true")
    return request


def decode_completion_request(body: bytes) -> CompletionRequest:
    """Raises InvalidRequestError."""
    fields = _decode_fields(body, CompletionRequest, {"messages": "/v1/chat/completions"})
    if isinstance(fields.get("logprobs"), bool):
        hint = "leave it out" if fields["logprobs"] is False else "send the number of alternatives, such as 1"
        refuse_value("logprobs", fields["logprobs"], f"on this endpoint it is an integer; {hint}", code="invalid_type")
    request = convert_fields(fields, CompletionRequest)
    _check_shared(request)
    if request.logprobs is not None:
        _check_top_logprobs("logprobs", request.logprobs)
    _check_prompt(request)
    return request


_Request = TypeVar("_Request", ChatRequest, CompletionRequest)


def _decode_fields(body: bytes, request_type: type[_Request], elsewhere: dict[str, str]) -> dict[str, Any]:
    """elsewhere: fields that belong to another endpoint, and which."""
    fields = decode_json_object(body)
    for name, endpoint in elsewhere.items():
        if fields.get(name) is not None and name not in request_type.__struct_fields__ and name != "echo":
            raise InvalidRequestError(
                f"{name} is not a field of this endpoint; send it to {endpoint}.", param=name, code="unknown_field"
            )
    kept = keep_supported(fields, request_type.__struct_fields__)
    if isinstance(kept.get("stream_options"), dict):
        kept["stream_options"] = keep_supported(
            kept["stream_options"], StreamOptions.__struct_fields__, path="stream_options."
        )
    return kept


def _check_shared(request: SamplingFields) -> None:
    if not 0.0 <= request.temperature <= MAX_TEMPERATURE:
        refuse_value("temperature", request.temperature, f"it must be between 0 and {MAX_TEMPERATURE:g}")
    if not isinstance(request.stop, str) and len(request.stop) > MAX_STOPS:
        refuse_value("stop", f"a list of {len(request.stop)}", f"at most {MAX_STOPS} are taken", show=str)
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        refuse_value(
            "stop_token_ids",
            f"a list of {len(request.stop_token_ids)}",
            f"at most {MAX_STOP_TOKEN_IDS} are taken",
            show=str,
        )
    if not -_MAX_PRIORITY <= request.priority <= _MAX_PRIORITY:
        refuse_value("priority", request.priority, f"it must be between {-_MAX_PRIORITY} and {_MAX_PRIORITY}")
    if request.max_completion_tokens is not None and request.max_tokens not in (None, request.max_completion_tokens):
        refuse_value(
            "max_completion_tokens",
            request.max_completion_tokens,
            f"max_tokens is {request.max_tokens}; they mean the same, send one of them",
        )
    if request.stream_options is not None:
        if not request.stream:
            refuse_value("stream_options", "set", "it needs stream to be true", show=str)
        if request.stream_options.include_obfuscation:
            raise InvalidRequestError(
                "stream_options.include_obfuscation is not supported; leave it out, or send false.",
                param="stream_options.include_obfuscation",
                code="unsupported_field",
            )


def _check_top_logprobs(param: str, value: int) -> None:
    if not 0 <= value <= MAX_LOGPROBS:
        refuse_value(param, value, f"it must be between 0 and {MAX_LOGPROBS}")


def _check_prompt(request: CompletionRequest) -> None:
    prompt = request.prompt
    if not prompt:
        raise InvalidRequestError("prompt is empty; send at least one character or token.", param="prompt")
    if isinstance(prompt, list):
        kinds = {type(item) for item in prompt}
        if len(kinds) > 1:
            raise InvalidRequestError(
                "prompt mixes texts and token ids; send a text, a list of texts, a list of token ids, "
                "or a list of lists of token ids.",
                param="prompt",
            )
        for index, item in enumerate(request.prompts):
            if not item:
                raise InvalidRequestError(
                    f"prompt[{index}] is empty; send at least one character or token.", param=f"prompt[{index}]"
                )
    num_choices = len(request.prompts) * request.n
    # An n that is wrong by itself is told by SamplingParams.
    if request.n <= MAX_N and num_choices > MAX_CHOICES:
        raise InvalidRequestError(
            f"{len(request.prompts)} prompts with n = {request.n} make {num_choices} choices; "
            f"one request may ask for {MAX_CHOICES}. Send several requests.",
            param="prompt",
        )
