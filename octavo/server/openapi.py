"""The API as an OpenAPI 3.1 document, made from the types that decode the requests: it cannot fall behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.server import answer_types as answers
from octavo.server.fields import LABEL_FIELDS, UNSUPPORTED_FIELDS
from octavo.server.protocol import ChatRequest, CompletionRequest
from octavo.server.settings import ServerSettings
from octavo.server.tokenize import DetokenizeRequest, TokenizeRequest

_ERRORS = {
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

# What a type does not say: bounds, and a sentence. Keyed by the field's name, in whichever request it is.
_FIELD_NOTES: dict[str, dict[str, Any]] = {
    "model": {"description": "One of the names of /v1/models; without it, the one that is served."},
    "messages": {"description": "The chat so far: objects with role and content.", "minItems": 1},
    "prompt": {"description": "A text or, for completions, also a list of texts, token ids, or lists of token ids."},
    "temperature": {"minimum": 0, "maximum": 2, "description": "0 is greedy."},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "description": "0 or -1 keeps all tokens."},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": {"description": "The same seed and request give the same answer, whatever else runs."},
    "max_tokens": {"minimum": 1, "description": "The older name of max_completion_tokens."},
    "max_completion_tokens": {"minimum": 1, "description": "Prompt and answer together stay within max_model_len."},
    "min_tokens": {"minimum": 0},
    "stop": {"description": "Texts that end the answer, and are not part of it."},
    "stop_token_ids": {"description": "Tokens that end the answer."},
    "n": {"minimum": 1, "description": "Answers to make of each prompt."},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "description": "1 changes nothing; counts the prompt's tokens too."},
    "ignore_eos": {"description": "Go on until max_tokens."},
    "priority": {"description": "With --scheduling-policy priority: lower goes first."},
    "stream": {"description": "Answer as server-sent events."},
    "tokens": {"description": "Token ids.", "items": {"type": "integer", "minimum": 0}},
    "add_special_tokens": {"description": "Put BOS and the like: by default for a prompt, not for messages."},
    "add_generation_prompt": {"description": "Of messages: end with what opens the assistant's answer."},
    "return_token_strs": {"description": "Tell each token's text as well."},
}


def make_openapi(settings: ServerSettings, version: str) -> dict[str, Any]:
    types = {kind for operation in OPERATIONS for kind in (operation.request, operation.answer, operation.chunk)}
    named = [kind for kind in types if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    _, components = msgspec.json.schema_components([*named, answers.Error], ref_template="#/components/schemas/{name}")
    for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        _complete_request_schema(components[kind.__name__])
    components["TokenizeRequest"]["oneOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Octavo",
            "version": version,
            "description": "LLM inference behind the API that OpenAI's clients speak. Every answer carries its "
            "request's id in X-Request-Id, which a client may choose.",
        },
        "servers": [{"url": settings.root_path or "/"}],
        "paths": {},
        "components": {"schemas": dict(sorted(components.items()))},
    }
    if settings.api_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    for operation in OPERATIONS:
        described = _describe(operation)
        if settings.api_keys and operation.path == "/health":
            described["security"] = []
        document["paths"].setdefault(operation.path, {})[operation.method.lower()] = described
    return document


def _complete_request_schema(schema: dict[str, Any]) -> None:
    """Fields that are accepted without being in the type; whatever is nowhere is refused."""
    properties = schema["properties"]
    for name, note in properties.items():
        note.update(_FIELD_NOTES.get(name, {}))
        # null counts as absent, everywhere but where it is required
        if name not in schema.get("required", ()):
            properties[name] = _or_null(note)
    for name, kind in sorted(LABEL_FIELDS.items()):
        json_type = "object" if kind is dict else "string"
        note = {"type": [json_type, "null"], "description": "For the access log; changes no answer."}
        properties.setdefault(name, note)
    for name, unsupported in sorted(UNSUPPORTED_FIELDS.items()):
        if name not in properties:
            description = "Not supported; only values that ask for nothing are accepted."
            properties[name] = {"enum": [None, *unsupported.accepted], "description": description}
    schema["additionalProperties"] = False


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with null as a further value."""
    if "anyOf" in schema:
        if {"type": "null"} not in schema["anyOf"]:
            schema["anyOf"].append({"type": "null"})
    elif isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    return schema


def _describe(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {"operationId": operation.name, "summary": operation.summary}
    if "{model}" in operation.path:
        described["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if operation.request is not None:
        content = {"schema": _ref(operation.request), "example": operation.request_example}
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    content = {"example": operation.answer_example}
    if operation.answer is not None:
        content["schema"] = _ref(operation.answer)
    else:
        content["schema"] = {"type": "string"}
    answer: dict[str, Any] = {"description": "The answer.", "content": {operation.media_type: content}}
    if operation.chunk is not None:
        answer["content"]["text/event-stream"] = {
            # Of one event, as OpenAPI's newer versions and its tools read a stream.
            "schema": {
                "type": "object",
                "description": f"With stream: events whose data is a {operation.chunk.__name__}, then [DONE].",
                "properties": {
                    "data": {
                        "anyOf": [
                            {"const": "[DONE]"},
                            {
                                "type": "string",
                                "contentMediaType": "application/json",
                                "contentSchema": {"anyOf": [_ref(operation.chunk), _ref(answers.Error)]},
                            },
                        ]
                    }
                },
                "required": ["data"],
            }
        }
    answer["headers"] = _HEADERS
    described["responses"] = {"200": answer, **{str(status): _error(status) for status in operation.error_statuses}}
    return described


_HEADERS = {"X-Request-Id": {"description": "The request's id.", "schema": {"type": "string"}}}


def _error(status: int) -> dict[str, Any]:
    example = {"error": {"message": _ERRORS[status], "type": "invalid_request_error", "param": None, "code": None}}
    if status >= 500:
        example["error"]["type"] = "internal_server_error"
    headers: dict[str, Any] = dict(_HEADERS)
    if status in (429, 503):
        headers["Retry-After"] = {"description": "Seconds.", "schema": {"type": "string"}}
    return {
        "description": _ERRORS[status],
        "headers": headers,
        "content": {"application/json": {"schema": _ref(answers.Error), "example": example}},
    }


def _ref(kind: Any) -> dict[str, Any]:
    if kind is answers.AnyObject:
        return {"type": "object"}
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
