"""The routes as OpenAPI describes them: what they take, what they answer, and an example of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.server import answer_types as answers
from octavo.server.protocol import ChatRequest, CompletionRequest
from octavo.server.tokenize import DetokenizeRequest, TokenizeRequest

ERRORS = {
    400: "A field is missing, wrong, out of range, unknown or not supported; param names it.",
    401: "A key is needed, or the key is not one of this server's.",
    404: "There is no such model here.",
    408: "The body did not arrive in time.",
    413: "The body is larger than --max-request-bytes.",
    415: "The Content-Type is not application/json.",
    429: "The queue is full (--max-num-queued-requests); Retry-After says when to come back.",
    500: "The server is at fault; other requests were not disturbed.",
    503: "The engine is being started again, or the server is shutting down.",
    504: "The request took longer than --request-timeout and was aborted.",
}
_BODY_ERRORS = (400, 401, 404, 408, 413, 415, 500)
_GENERATING_ERRORS = (*_BODY_ERRORS[:-1], 429, 500, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """request, answer, chunk: types; chunk is what one event of a stream holds. error_statuses: with their shape."""

    method: str
    path: str
    name: str
    summary: str
    request: type | None = None
    answer: type | None = None
    chunk: type | None = None
    media_type: str = "application/json"
    request_example: Any = None
    answer_example: Any = None
    error_statuses: tuple[int, ...] = (401, 500)


_CREATED = 1767225600
_USAGE = {
    "prompt_tokens": 37,
    "completion_tokens": 8,
    "total_tokens": 45,
    "prompt_tokens_details": {"cached_tokens": 32},
}
_MODEL = {
    "id": "smollm2-135m-instruct",
    "object": "model",
    "created": _CREATED,
    "owned_by": "octavo",
    "root": "smollm2-135m-instruct",
    "parent": None,
    "max_model_len": 8192,
}

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        name="create_chat_completion",
        summary="Answer a chat, whole or as a stream.",
        request=ChatRequest,
        answer=answers.ChatCompletion,
        chunk=answers.ChatCompletionChunk,
        request_example={
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 16,
        },
        answer_example={
            "id": "chatcmpl-5e0c2b",
            "object": "chat.completion",
            "created": _CREATED,
            "model": "smollm2-135m-instruct",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "The capital of France is Paris.", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": _USAGE,
        },
        error_statuses=_GENERATING_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        name="create_completion",
        summary="Go on with one or more prompts, whole or as a stream.",
        request=CompletionRequest,
        answer=answers.Completion,
        chunk=answers.Completion,
        request_example={"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8},
        answer_example={
            "id": "cmpl-5e0c2b",
            "object": "text_completion",
            "created": _CREATED,
            "model": "smollm2-135m-instruct",
            "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "stop"}],
            "usage": _USAGE,
        },
        error_statuses=_GENERATING_ERRORS,
    ),
    Operation(
        method="GET",
        path="/v1/models",
        name="list_models",
        summary="The names that are served.",
        answer=answers.ModelList,
        answer_example={"object": "list", "data": [_MODEL]},
    ),
    Operation(
        method="GET",
        path="/v1/models/{model}",
        name="get_model",
        summary="One of them, with the longest sequence it takes.",
        answer=answers.Model,
        answer_example=_MODEL,
        error_statuses=(401, 404, 500),
    ),
    Operation(
        method="POST",
        path="/tokenize",
        name="tokenize",
        summary="The tokens that the model would get for a prompt or a chat.",
        request=TokenizeRequest,
        answer=answers.Tokens,
        request_example={"prompt": "The capital of France is", "return_token_strs": True},
        answer_example={
            "count": 5,
            "max_model_len": 8192,
            "tokens": [504, 3575, 282, 4649, 314],
            "token_strs": ["The", " capital", " of", " France", " is"],
        },
        error_statuses=_BODY_ERRORS,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        name="detokenize",
        summary="The text of tokens.",
        request=DetokenizeRequest,
        answer=answers.Text,
        request_example={"tokens": [504, 3575, 282, 4649, 314]},
        answer_example={"prompt": "The capital of France is"},
        error_statuses=_BODY_ERRORS,
    ),
    Operation(
        method="GET",
        path="/health",
        name="get_health",
        summary="200 while the engine does its steps. Needs no key.",
        answer=answers.Health,
        answer_example={"status": "ok"},
        error_statuses=(500, 503),
    ),
    Operation(
        method="GET",
        path="/version",
        name="get_version",
        summary="The version of Octavo.",
        answer=answers.Version,
        answer_example={"version": "0.1.0"},
    ),
    Operation(
        method="GET",
        path="/metrics",
        name="get_metrics",
        summary="Metrics in Prometheus' text form.",
        media_type="text/plain",
        answer_example="octavo:num_requests_running 0.0\n",
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        name="get_openapi",
        summary="This document.",
        answer=answers.AnyObject,
        answer_example={"openapi": "3.1.0"},
    ),
    Operation(
        method="GET",
        path="/docs",
        name="get_docs",
        summary="This document as a page.",
        media_type="text/html",
        answer_example="<!doctype html>",
    ),
)
