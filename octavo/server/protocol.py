"""The API's request types, and how a body becomes one: strictly, with a sentence for whatever is wrong.

A body passes four doors: it is JSON, it is an object, its fields are ones we know and support (`fields`), and their
types and ranges are right. Nothing is guessed, and nothing is ignored unless the server was started with --lenient.
"""

from __future__ import annotations

from typing import Any, TypeVar

from octavo.core.sampling_params import MAX_LOGIT_BIAS, MAX_N, SamplingParams
from octavo.errors import InvalidRequestError
from octavo.server.decoding import convert_fields, decode_json_object, refuse_value, shorten_json
from octavo.server.fields import FieldReading
from octavo.server.messages import check_messages
from octavo.server.sampling_fields import (
    MAX_CHOICES,
    SamplingFields,
    StreamOptions,
    check_num_logprobs,
    check_sampling_fields,
)

# OpenAI's default of the older endpoint; a chat goes on to the model's window instead.
COMPLETION_MAX_TOKENS = 16


class ChatRequest(SamplingFields, kw_only=True):
    """messages: as the chat template takes them, checked by `messages`"""

    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int | None = None
    # What `chat_prompt` reads.
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool | None = None

    @property
    def sampling_params(self) -> SamplingParams:
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.make_sampling_params(None, num_logprobs, self.prompt_logprobs)


class CompletionRequest(SamplingFields, kw_only=True):
    """prompts: one entry a prompt, a text or token ids; made from `prompt`

    echo:               the answer begins with the prompt, and so do its logprobs
    add_special_tokens: BOS and the like before a text; token ids stay as they are
    """

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    @property
    def sampling_params(self) -> SamplingParams:
        """An echoed prompt is scored like the answer after it, so `prompt_logprobs` is the larger of both wishes."""
        wishes = [self.logprobs if self.echo else None, self.prompt_logprobs]
        num_prompt_logprobs = max((wish for wish in wishes if wish is not None), default=None)
        return self.make_sampling_params(COMPLETION_MAX_TOKENS, self.logprobs, num_prompt_logprobs)

    @property
    def echoes_prompt(self) -> bool:
        return self.echo


def decode_chat_request(body: bytes, reading: FieldReading | None = None) -> ChatRequest:
    """Raises InvalidRequestError."""
    fields = _decode_fields(body, ChatRequest, FIELDS_OF_COMPLETIONS, reading or FieldReading())
    if "messages" in fields:
        fields["messages"] = check_messages(fields["messages"])
    request = convert_fields(fields, ChatRequest)
    check_sampling_fields(request)
    if request.top_logprobs is not None:
        check_num_logprobs("top_logprobs", request.top_logprobs)
        if request.top_logprobs and not request.logprobs:
            refuse_value("top_logprobs", request.top_logprobs, "it needs logprobs to be true")
    return request


def decode_completion_request(body: bytes, reading: FieldReading | None = None) -> CompletionRequest:
    """Raises InvalidRequestError."""
    fields = _decode_fields(body, CompletionRequest, FIELDS_OF_CHATS, reading or FieldReading())
    if isinstance(fields.get("logprobs"), bool):
        hint = "leave it out" if fields["logprobs"] is False else "send the number of alternatives, such as 1"
        refuse_value("logprobs", fields["logprobs"], f"on this endpoint it is an integer; {hint}", code="invalid_type")
    request = convert_fields(fields, CompletionRequest)
    check_sampling_fields(request)
    if request.logprobs is not None:
        check_num_logprobs("logprobs", request.logprobs)
    _check_prompt(request)
    return request


_Request = TypeVar("_Request", ChatRequest, CompletionRequest)

# Fields of the other endpoint, and which that is.
FIELDS_OF_COMPLETIONS = {"prompt": "/v1/completions"}
# Not top_logprobs, which here is logprobs, and whose refusal says so.
FIELDS_OF_CHATS = {
    name: "/v1/chat/completions"
    for name in ChatRequest.__struct_fields__
    if name not in CompletionRequest.__struct_fields__ and name != "top_logprobs"
}


def _decode_fields(
    body: bytes, request_type: type[_Request], elsewhere: dict[str, str], reading: FieldReading
) -> dict[str, Any]:
    """elsewhere: fields that belong to another endpoint, and which."""
    fields = decode_json_object(body)
    kept = reading.keep_supported(fields, request_type.__struct_fields__, elsewhere=elsewhere)
    if isinstance(kept.get("stream_options"), dict):
        kept["stream_options"] = reading.keep_supported(
            kept["stream_options"], StreamOptions.__struct_fields__, path="stream_options."
        )
    _check_logit_bias(kept.get("logit_bias"))
    return kept


def _check_logit_bias(value: Any) -> None:
    """Its keys are no fields, so the general check could not name one. Raises InvalidRequestError."""
    if not isinstance(value, dict):
        return
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit()):
            rule = 'its keys must be token ids, as in {"50": -100}'
            refuse_value("logit_bias", f"an object with the key {shorten_json(key)}", rule, show=str)
        if isinstance(bias, bool) or not isinstance(bias, (int, float)):
            refuse_value(f"logit_bias.{key[:20]}", bias, "it must be a number", code="invalid_type")
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            rule = f"it must be between {-MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}"
            refuse_value(f"logit_bias.{key[:20]}", bias, rule)


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
    num_choices = len(request.prompts) * request.num_generations
    # An n that is wrong by itself is told by SamplingParams.
    if request.n <= MAX_N and num_choices > MAX_CHOICES:
        name = "n" if request.num_generations == request.n else "best_of"
        raise InvalidRequestError(
            f"{len(request.prompts)} prompts with {name} = {request.num_generations} make {num_choices} choices; "
            f"one request may ask for {MAX_CHOICES}. Send several requests.",
            param="prompt",
        )
