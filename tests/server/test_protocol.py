"""Bad requests, each a sentence with the field's name. No server: bytes in, a request or an error out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.errors import InvalidRequestError
from octavo.server.constraint import find_constraint
from octavo.server.fields import LABEL_FIELDS, UNSUPPORTED_FIELDS
from octavo.server.protocol import ChatRequest, CompletionRequest, decode_chat_request, decode_completion_request

HI = [{"role": "user", "content": "hi"}]


def refusal(body: dict[str, Any] | bytes, is_chat: bool = True) -> InvalidRequestError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    decode = decode_chat_request if is_chat else decode_completion_request

    def read() -> None:
        request = decode(raw)
        with request.own_names():
            _ = request.sampling_params
        find_constraint(request)

    with pytest.raises(InvalidRequestError) as caught:
        read()
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b'x {"messages": []}',
        b'{"messages": [',
        b"\xff\xfe",
        b'{"messages": "\xff"}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": "\\ud800"}',
        b'{"a": "\\udc00x"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[]",
        b"null",
        b'"text"',
        b"12",
    ],
    ids=lambda body: repr(body[:16]),
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    """H27, H28."""
    assert refusal(body).code == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": "hot"}, "temperature", ['"hot"', "a number"]),
        ({"temperature": True}, "temperature", ["true", "a number"]),
        ({"temperature": -0.1}, "temperature", ["-0.1", "between 0 and 2"]),
        ({"temperature": 2.01}, "temperature", ["2.01", "between 0 and 2"]),
        ({"temperature": 10**400}, "temperature", ["out of range"]),
        ({"top_p": 0}, "top_p", ["0"]),
        ({"top_p": 1.5}, "top_p", ["1.5"]),
        ({"top_k": -2}, "top_k", ["-2"]),
        ({"top_k": 1.5}, "top_k", ["1.5", "an integer"]),
        ({"min_p": -1}, "min_p", ["-1"]),
        ({"seed": 2**70}, "seed", [str(2**70)]),
        ({"seed": "1"}, "seed", ["an integer"]),
        ({"max_tokens": 0}, "max_tokens", ["0", "at least 1", "echo"]),
        ({"max_tokens": -1}, "max_tokens", ["-1"]),
        ({"max_tokens": False}, "max_tokens", ["false", "an integer"]),
        ({"max_tokens": 10**30}, "max_tokens", [str(10**30)]),
        ({"max_completion_tokens": 0}, "max_completion_tokens", ["max_completion_tokens is 0"]),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens", ["5", "6"]),
        ({"min_tokens": -1}, "min_tokens", ["-1"]),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", ["5", "4"]),
        ({"stop": 5}, "stop", ["5"]),
        ({"stop": [5]}, "stop[0]", ["5", "a string"]),
        ({"stop": ""}, "stop", ["empty"]),
        ({"stop": ["a"] * 65}, "stop", ["65", "64"]),
        ({"stop_token_ids": [-1]}, "stop_token_ids", ["-1"]),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", ["an integer"]),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids", ["257", "256"]),
        ({"n": 0}, "n", ["0"]),
        ({"n": 129}, "n", ["129", "128"]),
        ({"presence_penalty": 2.1}, "presence_penalty", ["2.1"]),
        ({"frequency_penalty": -2.1}, "frequency_penalty", ["-2.1"]),
        ({"repetition_penalty": 0}, "repetition_penalty", ["0"]),
        ({"ignore_eos": 1}, "ignore_eos", ["1", "true or false"]),
        ({"priority": 2**31}, "priority", [str(2**31)]),
        ({"stream": "yes"}, "stream", ["yes", "true or false"]),
        ({"stream_options": {"include_usage": True}}, "stream_options", ["stream"]),
        ({"stream": True, "stream_options": []}, "stream_options", ["an object"]),
        ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge", ["include_usage?"]),
        ({"model": 5}, "model", ["5", "a string"]),
        ({"temprature": 1}, "temprature", ["did you mean temperature?"]),
        ({"xyzzy": None}, "xyzzy", ["xyzzy"]),
        ({"user": 5}, "user", ["5", "a string"]),
        ({"metadata": "x"}, "metadata", ["an object"]),
        ({"best_of": 0}, "best_of", ["0", "n, which is 1"]),
        ({"best_of": 2, "n": 3}, "best_of", ["2", "n, which is 3"]),
        ({"best_of": 129}, "best_of", ["129", "128"]),
        ({"best_of": 2, "stream": True}, "best_of", ["stream false"]),
        ({"logit_bias": []}, "logit_bias", ["an object"]),
        ({"logit_bias": {"x": 1}}, "logit_bias", ['"x"', "token ids"]),
        ({"logit_bias": {"-1": 1}}, "logit_bias", ['"-1"', "token ids"]),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5", ['"1"', "a number"]),
        ({"logit_bias": {"5": True}}, "logit_bias.5", ["true", "a number"]),
        ({"logit_bias": {"5": None}}, "logit_bias.5", ["null", "a number"]),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", ["101", "between -100 and 100"]),
        ({"logit_bias": {"5": 10**30}}, "logit_bias.5", ["between -100 and 100"]),
        ({"logit_bias": {"9" * 30: 1}}, "logit_bias", ["token ids"]),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", ["1025", "1024"]),
        ({"allowed_token_ids": []}, "allowed_token_ids", ["at least one"]),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", ["-1"]),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]", ["an integer"]),
        ({"bad_words": "x"}, "bad_words", ["a list"]),
        ({"bad_words": [" "]}, "bad_words", ["empty"]),
        ({"bad_words": ["x"] * 257}, "bad_words", ["257", "256"]),
        ({"stop": "x" * 1025}, "stop", ["1025", "1024"]),
        ({"use_beam_search": 1}, "use_beam_search", ["true or false"]),
        ({"use_beam_search": True, "n": 11}, "n", ["11", "10"]),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p", ["use_beam_search"]),
        ({"use_beam_search": True, "stop": ["x"]}, "stop", ["use_beam_search"]),
        ({"use_beam_search": True, "json_schema": {"type": "object"}}, "json_schema", ["use_beam_search"]),
        ({"length_penalty": 2}, "length_penalty", ["use_beam_search"]),
        ({"prompt_logprobs": -1}, "prompt_logprobs", ["-1", "20"]),
        ({"prompt_logprobs": True}, "prompt_logprobs", ["true", "an integer"]),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ["0", "-1"]),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ["-2", "-1"]),
        ({"request_id": ""}, "request_id", ['""', "128"]),
        ({"request_id": "a b"}, "request_id", ["a b"]),
        ({"cache_salt": ""}, "cache_salt", ["0 characters"]),
        ({"cache_salt": "x" * 257}, "cache_salt", ["257", "256"]),
        ({"return_token_ids": "yes"}, "return_token_ids", ["true or false"]),
        ({"max_tokens": 0, "return_token_ids": True}, "max_tokens", ["prompt_logprobs"]),
        ({"service_tier": "flex"}, "service_tier", ["one tier", '"auto" or "default"']),
        ({"store": True}, "store", ["keeps no answers", "false"]),
        ({"n_predict": 5}, "n_predict", ["use max_tokens"]),
        ({"stream_options": {}}, "stream_options", ["stream"]),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": 1}},
            "stream_options.continuous_usage_stats",
            ["true or false"],
        ),
        ({"response_format": "json"}, "response_format", ["an object"]),
        ({"response_format": {"type": "json"}}, "response_format.type", ["json_object"]),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ["missing"]),
        ({"structured_outputs": {}}, "structured_outputs", ["exactly one"]),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", ["regex and choice"]),
        ({"guided_choice": []}, "guided_choice", ["not empty"]),
        ({"guided_regex": 5}, "guided_regex", ["a string"]),
        ({"grammar": 5}, "grammar", ["a string"]),
        ({"json_schema": 5}, "json_schema", ["an object or a boolean"]),
        ({"guided_regex": "a", "json_schema": {"type": "null"}}, "json_schema", ["guided_regex and json_schema"]),
        ({"Temperature": 1}, "Temperature", ["did you mean temperature?"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_chat", [True, False])
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], param: str, words: list[str], is_chat: bool) -> None:
    body = {**({"messages": HI} if is_chat else {"prompt": "x"}), **fields}
    error = refusal(body, is_chat)
    assert error.param == param
    assert error.code
    for word in words:
        assert word in error.message
    assert error.message.endswith((".", "?"))


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_FIELDS))
def test_a_field_we_do_not_support_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    error = refusal({"messages": HI, name: "something else"})
    assert (error.param, error.code) == (name, "unsupported_field")
    assert "not supported" in error.message
    assert "leave it out" in error.message
    for neutral in (None, *UNSUPPORTED_FIELDS[name].accepted):
        decode_chat_request(json.dumps({"messages": HI, name: neutral}).encode())


def test_the_tables_do_not_contradict_the_types() -> None:
    supported = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert supported & UNSUPPORTED_FIELDS.keys() == {"echo"}  # of completions only
    assert not supported & LABEL_FIELDS.keys()
    assert not LABEL_FIELDS.keys() & UNSUPPORTED_FIELDS.keys()


def test_true_is_not_one() -> None:
    assert refusal({"prompt": "x", "best_of": True}, is_chat=False).param == "best_of"
    assert refusal({"prompt": "x", "typical_p": True}, is_chat=False).param == "typical_p"


def test_a_bad_response_format_is_the_clients_fault() -> None:
    """H29."""
    error = refusal({"messages": HI, "response_format": {"type": "json_schema", "schema": {}}})
    assert (error.param, error.code) == ("response_format.json_schema", "invalid_grammar")


def test_null_counts_as_absent() -> None:
    names = [name for name in ChatRequest.__struct_fields__ if name != "messages"]
    request = decode_chat_request(json.dumps({"messages": HI, **dict.fromkeys(names)}).encode())
    assert request == decode_chat_request(json.dumps({"messages": HI}).encode())


def test_whole_numbers_are_fine_where_fractions_are() -> None:
    request = decode_chat_request(json.dumps({"messages": HI, "temperature": 1, "top_p": 1}).encode())
    assert request.temperature == 1.0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "messages", ["missing"]),
        ({"prompt": "x"}, "prompt", ["/v1/completions"]),
        ({"messages": HI, "logprobs": 5}, "logprobs", ["5", "true or false"]),
        ({"messages": HI, "top_logprobs": 5}, "top_logprobs", ["logprobs"]),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", ["21", "20"]),
        ({"messages": HI, "logprobs": True, "top_logprobs": -1}, "top_logprobs", ["-1"]),
    ],
    ids=str,
)
def test_a_bad_chat(fields: dict[str, Any], param: str, words: list[str]) -> None:
    error = refusal(fields)
    assert error.param == param
    assert all(word in error.message for word in words), error.message


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "prompt", ["missing"]),
        ({"messages": HI}, "messages", ["/v1/chat/completions"]),
        ({"prompt": ""}, "prompt", ["empty"]),
        ({"prompt": []}, "prompt", ["empty"]),
        ({"prompt": [""]}, "prompt[0]", ["empty"]),
        ({"prompt": ["a", ""]}, "prompt[1]", ["empty"]),
        ({"prompt": [[]]}, "prompt[0]", ["empty"]),
        ({"prompt": [1, "a"]}, "prompt", ["mixes"]),
        ({"prompt": [1, [2]]}, "prompt", ["mixes"]),
        ({"prompt": [1.5]}, "prompt[0]", ["1.5"]),
        ({"prompt": [True]}, "prompt[0]", ["true"]),
        ({"prompt": [[1, True]]}, "prompt[0][1]", ["true", "an integer"]),
        ({"prompt": {"text": "x"}}, "prompt", ["a string or a list"]),
        ({"prompt": 5}, "prompt", ["5"]),
        ({"prompt": ["a"] * 1025}, "prompt", ["1025", "1024"]),
        ({"prompt": ["a"] * 100, "n": 128}, "prompt", ["12800", "1024"]),
        ({"prompt": "x", "logprobs": True}, "logprobs", ["true", "integer"]),
        ({"prompt": "x", "logprobs": 21}, "logprobs", ["21", "20"]),
        ({"prompt": "x", "top_logprobs": 2}, "top_logprobs", ["logprobs?"]),
        ({"prompt": "x", "suffix": "y"}, "suffix", ["not supported", "fills no gap"]),
        ({"prompt": "x", "tools": [{}]}, "tools", ["/v1/chat/completions"]),
        ({"prompt": ["a"] * 100, "best_of": 128}, "prompt", ["best_of", "12800", "1024"]),
        ({"prompt": "x", "echo": 1}, "echo", ["1", "true or false"]),
        ({"prompt": "x", "echo": True, "use_beam_search": True}, "echo", ["use_beam_search"]),
        ({"prompt": "x", "echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens", ["1", "0"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_completion(fields: dict[str, Any], param: str, words: list[str]) -> None:
    """H26."""
    error = refusal(fields, is_chat=False)
    assert error.param == param
    assert all(word in error.message for word in words), error.message


def test_long_values_are_shortened_in_messages() -> None:
    assert len(refusal({"messages": HI, "temperature": "x" * 10_000}).message) < 200
    assert len(refusal({"messages": HI, "x" * 10_000: 1}).message) < 1000


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_in_json_is_named(word: str) -> None:
    body = b'{"prompt": "x", "temperature": ' + word.encode() + b"}"
    error = refusal(body, is_chat=False)
    assert error.code == "invalid_json"
    assert f"{word} at byte {body.index(word.encode())}" in error.message


def test_a_format_without_a_type_says_so() -> None:
    error = refusal({"messages": HI, "response_format": {}})
    assert (error.param, error.message.partition(";")[0]) == ("response_format.type", "response_format.type is missing")
