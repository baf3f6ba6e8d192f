"""Whatever is sent, the answer is a request or a refusal: never another exception."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequestError
from octavo.server.constraint import find_constraint
from octavo.server.fields import LABEL_FIELDS, UNSUPPORTED_FIELDS
from octavo.server.openapi import make_openapi
from octavo.server.protocol import ChatRequest, CompletionRequest, decode_chat_request, decode_completion_request
from octavo.server.settings import ServerSettings

NAMES = sorted(
    {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *UNSUPPORTED_FIELDS, *LABEL_FIELDS}
)
NESTED_NAMES = st.sampled_from(
    ["role", "content", "type", "text", "tool_calls", "function", "arguments", "name", "include_usage", "image_url"]
)
WORDS = st.sampled_from(["user", "assistant", "system", "tool", "text", "image_url", "{}", "", "x"]) | st.text(
    max_size=5
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NESTED_NAMES, inner, max_size=4),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), VALUES, max_size=6)

DOCUMENT = make_openapi(ServerSettings(), "9.9.9")
VALIDATORS = {
    kind: jsonschema.Draft202012Validator({**DOCUMENT, "$ref": f"#/components/schemas/{kind.__name__}"})
    for kind in (ChatRequest, CompletionRequest)
}
DECODERS = pytest.mark.parametrize("decode", [decode_chat_request, decode_completion_request])


@DECODERS
@settings(max_examples=300, deadline=None)
@given(body=BODIES)
@example(body={"prompt": [[1], "a", 2], "n": -5})
@example(body={"prompt": "x", "use_beam_search": True, "length_penalty": 11.0})
@example(body={"prompt": "x", "echo": True, "max_tokens": 0, "logit_bias": {"5": 1}, "truncate_prompt_tokens": -1})
@example(body={"prompt": "x", "json_schema": True, "user": "", "metadata": {}, "typical_p": 1.0, "tools": None})
@example(body={"prompt": "x", "stream": True, "stream_options": {"include_usage": None}})
@example(body={"prompt": "x", "allowed_token_ids": [1], "request_id": "a:b", "cache_salt": "x", "best_of": 3, "n": 2})
@example(body={"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "n": 10**40})
def test_any_object_is_taken_or_refused(decode: Callable[[bytes], Any], body: dict[str, Any]) -> None:
    try:
        request = decode(json.dumps(body).encode())
        params = request.sampling_params
        find_constraint(request)
        if request.use_beam_search:
            request.make_beam_search_params(params.max_tokens or 16)
    except InvalidRequestError:
        return
    # What is accepted is described.
    fault = jsonschema.exceptions.best_match(VALIDATORS[type(request)].iter_errors(body))
    assert fault is None, fault.message


@DECODERS
@settings(max_examples=300, deadline=None)
@given(
    raw=st.binary(max_size=40)
    | st.text('{}[]":,\\ 0eE.-\ud800ntu', max_size=20).map(lambda t: t.encode("utf-8", "surrogatepass"))
)
def test_any_bytes_are_taken_or_refused(decode: Callable[[bytes], Any], raw: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        decode(raw)
