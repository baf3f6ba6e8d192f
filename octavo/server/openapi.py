"""The API as an OpenAPI 3.1 document, made from the types that decode the requests: it cannot fall behind them."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.server import answer_types as answers
from octavo.server.field_notes import FIELD_NOTES, STREAM_OPTION_NOTES
from octavo.server.fields import LABEL_FIELDS, UNSUPPORTED_FIELDS
from octavo.server.operations import ERRORS, OPERATIONS, Operation
from octavo.server.protocol import FIELDS_OF_CHATS, FIELDS_OF_COMPLETIONS, ChatRequest, CompletionRequest
from octavo.server.settings import ServerSettings
from octavo.server.tokenize import DetokenizeRequest, TokenizeRequest


def make_openapi(settings: ServerSettings, version: str) -> dict[str, Any]:
    types = {kind for operation in OPERATIONS for kind in (operation.request, operation.answer, operation.chunk)}
    named = [kind for kind in types if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    _, components = msgspec.json.schema_components([*named, answers.Error], ref_template="#/components/schemas/{name}")
    for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        _complete_request_schema(components[kind.__name__])
    for kind, elsewhere in ((ChatRequest, FIELDS_OF_COMPLETIONS), (CompletionRequest, FIELDS_OF_CHATS)):
        for name, path in elsewhere.items():
            components[kind.__name__]["properties"][name] = {"type": "null", "description": f"A field of {path}."}
    for name, note in STREAM_OPTION_NOTES.items():
        schema = components["StreamOptions"]["properties"][name]
        _annotate(schema, note)
        _or_null(schema)
    components["StreamOptions"]["additionalProperties"] = False
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
        _annotate(note, FIELD_NOTES.get(name, {}))
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
            # 0 and 0.0 are one number, in Python as in JSON
            accepted = [
                value for at, value in enumerate(unsupported.accepted) if value not in unsupported.accepted[:at]
            ]
            properties[name] = {"enum": [None, *accepted], "description": description}
    schema["additionalProperties"] = False


def _annotate(schema: dict[str, Any], note: dict[str, Any]) -> None:
    """Bounds go where the type is; msgspec writes an optional field as a choice between its type and null."""
    about_value = {name: value for name, value in note.items() if name not in _ANNOTATIONS}
    choices = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(choices) == 1 and "$ref" not in choices[0]:
        choices[0].update(about_value)
    else:
        schema.update(about_value)
    schema.update({name: value for name, value in note.items() if name in _ANNOTATIONS})


_ANNOTATIONS = frozenset({"description", "examples"})


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with null as a further value."""
    if "anyOf" in schema:
        if {"type": "null"} not in schema["anyOf"]:
            schema["anyOf"].append({"type": "null"})
    elif "const" in schema:
        schema["enum"] = [schema.pop("const"), None]
        schema.pop("type", None)
    elif "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        schema["type"] = [*types, "null"]
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
    code = "invalid_value" if status == 400 else None
    example = {"error": {"message": ERRORS[status], "type": "invalid_request_error", "param": None, "code": code}}
    if status >= 500:
        example["error"]["type"] = "internal_server_error"
    headers: dict[str, Any] = dict(_HEADERS)
    if status in (429, 503):
        headers["Retry-After"] = {"description": "Seconds.", "schema": {"type": "string"}}
    return {
        "description": ERRORS[status],
        "headers": headers,
        "content": {"application/json": {"schema": _ref(answers.Error), "example": example}},
    }


def _ref(kind: Any) -> dict[str, Any]:
    if kind is answers.AnyObject:
        return {"type": "object"}
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
