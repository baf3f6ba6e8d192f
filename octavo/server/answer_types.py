"""The shapes of answers, for the OpenAPI document. Answers are joined from bytes; tests hold them to this."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorDetail(msgspec.Struct):
    """param: the field at fault. code: a word for programs, such as context_length_exceeded."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    error: ErrorDetail


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """completion_tokens_details: of models that think aloud"""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None = None


class RankedLogprob(msgspec.Struct):
    """rank: 1 is the best; null for a token that is not among the alternatives"""

    logprob: float
    rank: int | None
    decoded_token: str


# One entry a token, by token id; null for the first one, which nothing predicted.
PromptLogprobs = list[dict[str, RankedLogprob] | None]


class FunctionCall(msgspec.Struct):
    """arguments: JSON as text"""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(msgspec.Struct):
    """content: null beside calls or reasoning, when there is no text"""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = []


class ChatChoice(msgspec.Struct):
    """stop_reason: the stop string or the id of the stop token that ended it. token_ids: with return_token_ids"""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class FunctionCallDelta(msgspec.Struct):
    """arguments: the next piece of the text"""

    name: str | None = None
    arguments: str = ""


class ToolCallDelta(msgspec.Struct):
    """index: which call of the message. id, type and the name come with its first piece"""

    index: int
    function: FunctionCallDelta
    id: str | None = None
    type: Literal["function"] | None = None


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(msgspec.Struct):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """finish_reason: null only in the chunks of a stream"""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct):
    prompt: str


class Health(msgspec.Struct):
    status: Literal["ok"]


class Version(msgspec.Struct):
    version: str


AnyObject = dict[str, Any]
