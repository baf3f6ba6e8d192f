"""What a request says reaches the engine, and what it asks to be told is in the answer, on both endpoints."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from octavo.core.interfaces import GrammarSpec, TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.outputs import CompletionDelta
from octavo.server.request_ids import RequestIdFilter
from tests.server.conftest import Serving
from tests.server.fake_engine import FakeEngine, say
from tests.server.sse import read_events

pytestmark = pytest.mark.anyio

ENDPOINTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
both = pytest.mark.parametrize("path", ENDPOINTS)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@both
@pytest.mark.parametrize(
    ("sent", "attribute", "expected"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"min_p": 0.5}, "min_p", 0.5),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"stop_token_ids": [5, 6]}, "stop_token_ids", (5, 6)),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output", True),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
        ({"spaces_between_special_tokens": False}, "skip_special_tokens", True),
        ({"bad_words": ["x", "y"]}, "bad_words", ("x", "y")),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids", (1, 2)),
        ({"logit_bias": {"7": -100, "8": 2.5}}, "logit_bias", ((7, -100.0), (8, 2.5))),
        ({"prompt_logprobs": 2}, "prompt_logprobs", 2),
        ({"max_completion_tokens": 7}, "max_tokens", 7),
        ({"max_completion_tokens": 7, "max_tokens": 7}, "max_tokens", 7),
        ({"max_tokens": 0, "prompt_logprobs": 0}, "max_tokens", 1),
        ({"stop": "x"}, "stop", ("x",)),
        ({"seed": -5}, "seed", -5),
    ],
    ids=str,
)
async def test_the_engine_gets_what_was_sent(
    serving: Serving, path: str, sent: dict[str, Any], attribute: str, expected: Any
) -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        answer = await client.post(path, json={**ENDPOINTS[path], **sent})
    assert answer.status_code == 200, answer.text
    assert getattr(engine.calls[0].params, attribute) == expected


@both
async def test_a_request_names_itself(serving: Serving, path: str) -> None:
    """As in vLLM a header's id goes before the body's."""
    engine = FakeEngine()
    body = {**ENDPOINTS[path], "request_id": "mine", "priority": -3, "cache_salt": "tenant"}
    async with serving(engine) as client:
        answer = await client.post(path, json=body)
        both_named = await client.post(path, json=body, headers={"x-request-id": "header"})
    assert answer.json()["id"].partition("-")[2] == "mine"
    assert answer.headers["x-request-id"] == "mine"
    assert both_named.json()["id"].partition("-")[2] == "header"
    assert both_named.headers["x-request-id"] == "header"
    call = engine.calls[0]
    assert (call.priority, call.cache_salt, call.request_id) == (-3, "/tenant", answer.json()["id"])


async def test_salts_of_different_keys_never_meet(serving: Serving) -> None:
    engine = FakeEngine()
    async with serving(engine, api_keys=("one", "two")) as client:
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            await client.post("/v1/completions", json={"prompt": "x", "cache_salt": "same"}, headers=headers)
    first, second = (call.cache_salt for call in engine.calls)
    assert first != second
    assert first.endswith("/same")


@both
async def test_the_senders_labels_are_logged_and_not_answered(
    serving: Serving, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = {**ENDPOINTS[path], "user": "hedy", "metadata": {"a": 1}, "chat_id": "c 1", "session_id": None}
    with caplog.at_level(logging.INFO, "octavo.access"):
        async with serving(FakeEngine(), access_log=True) as client:
            answer = await client.post(path, json=body)
    assert answer.status_code == 200
    assert "hedy" not in answer.text
    [line] = [record.message for record in caplog.records if record.name == "octavo.access"]
    assert line.endswith('user=hedy metadata="{\\"a\\":1}" chat_id="c 1"')


async def test_the_log_knows_a_request_by_the_name_it_gave_itself(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.addFilter(RequestIdFilter())
    with caplog.at_level(logging.INFO, "octavo.access"):
        async with serving(FakeEngine(), access_log=True) as client:
            await client.post("/v1/completions", json={"prompt": "x", "request_id": "mine"})
    [record] = [record for record in caplog.records if record.name == "octavo.access"]
    assert record.message.startswith("id=mine ")
    assert record.request == ""  # type: ignore[attr-defined]  # the line names it already


@both
async def test_the_best_are_picked_from_many(serving: Serving, path: str) -> None:
    def script(params: SamplingParams) -> list[CompletionDelta]:
        return [
            CompletionDelta(
                index=index,
                text=f"t{index}",
                token_ids=[index],
                logprobs=[TokenLogprobs(index, -float(params.n - index))],
                finish_reason="stop",
                is_final=index == params.n - 1,
            )
            for index in range(params.n)
        ]

    engine = FakeEngine(script)
    async with serving(engine) as client:
        answer = (await client.post(path, json={**ENDPOINTS[path], "n": 2, "best_of": 4})).json()
    assert engine.calls[0].params.n == 4
    texts = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["t3", "t2"]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 2


@both
async def test_best_of_as_many_as_n_may_be_streamed(serving: Serving, path: str) -> None:
    async with serving(FakeEngine()) as client:
        answer = await client.post(path, json={**ENDPOINTS[path], "n": 2, "best_of": 2, "stream": True})
    assert {event["choices"][0]["index"] for event in read_events(answer)} == {0, 1}


@both
async def test_beam_search_has_n_beams(serving: Serving, path: str) -> None:
    engine = FakeEngine()
    search = {"use_beam_search": True, "n": 3, "length_penalty": 0.5, "temperature": 0}
    chat = "/v1/chat/completions"
    async with serving(engine) as client:
        answer = await client.post(path, json={**ENDPOINTS[path], **search, "max_tokens": 4})
        unbounded = await client.post(chat, json={**ENDPOINTS[chat], **search})
    assert len(answer.json()["choices"]) == 3
    assert unbounded.status_code == 200
    first, second = engine.beam_searches
    assert (first.beam_width, first.length_penalty, first.max_tokens) == (3, 0.5, 4)
    assert second.max_tokens == 128 - len("<user>hi<bot>")


@both
async def test_usage_so_far_in_every_chunk(serving: Serving, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**ENDPOINTS[path], "stream": True, "stream_options": options}
    async with serving(FakeEngine(say("a", "b"))) as client:
        events = read_events(await client.post(path, json=body))
        body["stream_options"] = {"continuous_usage_stats": True}
        without_last = read_events(await client.post(path, json=body))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == ([1, 1, 2, 2] if "chat" in path else [1, 2, 2])
    assert without_last[-1]["choices"]


@both
async def test_tokens_are_named_by_id(serving: Serving, path: str) -> None:
    logprobs = {"logprobs": True, "top_logprobs": 1} if "chat" in path else {"logprobs": 1}
    body = {**ENDPOINTS[path], **logprobs, "return_tokens_as_token_ids": True}
    async with serving(FakeEngine(say("a", "b"))) as client:
        [choice] = (await client.post(path, json=body)).json()["choices"]
    if "chat" in path:
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["token_id:97", "token_id:98"]
        assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token"] == "token_id:97"
    else:
        assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98"]
        assert choice["logprobs"]["top_logprobs"][0] == {"token_id:97": -0.5}


@both
@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            "json_schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
        ({"guided_json": SCHEMA}, "json_schema"),
        ({"guided_json_object": True}, "json_object"),
        ({"guided_regex": "a+"}, "regex"),
        ({"guided_choice": ["a"]}, "choice"),
        ({"guided_grammar": 'start: "a"'}, "lark"),
        ({"grammar": 'root ::= "a" | "b"'}, "lark"),
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"response_format": {"type": "text"}, "grammar": "", "json_schema": {}, "guided_json_object": False}, None),
    ],
    ids=str,
)
async def test_text_is_constrained(serving: Serving, path: str, sent: dict[str, Any], kind: str | None) -> None:
    """Prepared before the answer begins, and for every prompt."""
    engine = FakeEngine()
    async with serving(engine) as client:
        answer = await client.post(path, json={**ENDPOINTS[path], **sent, "n": 2, "stop": ["x"], "stream": True})
    assert answer.status_code == 200, answer.text
    grammar = engine.calls[0].grammar
    assert (grammar and grammar.kind) == kind
    assert set(engine.prepared) == set(filter(None, [grammar]))


@both
@pytest.mark.parametrize(
    ("sent", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strang"}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
        ({"guided_regex": "["}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"grammar": "root ::= nothing"}, "grammar"),
        ({"json_schema": {"type": 5}}, "json_schema"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
    ],
    ids=str,
)
async def test_what_cannot_be_compiled_is_refused_before_the_stream(
    serving: Serving, path: str, sent: dict[str, Any], param: str
) -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        answer = await client.post(path, json={**ENDPOINTS[path], **sent, "stream": True})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, "invalid_grammar", "invalid_request_error")
    assert engine.calls == []


async def test_every_prompt_has_the_grammar(serving: Serving) -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        await client.post("/v1/completions", json={"prompt": ["a", "b"], "guided_choice": ["x"]})
    assert [call.grammar for call in engine.calls] == [GrammarSpec("choice", '["x"]')] * 2


@both
async def test_lenient_ignores_and_tells(serving: Serving, path: str) -> None:
    body = {
        **ENDPOINTS[path],
        "temprature": 0.5,
        "suffix": "x",
        "store": True,
        "user": 5,
        "stream": True,
        "stream_options": {"include_usage": True, "padding": 1},
        "naïve, field\r\n": None,
    }
    async with serving(FakeEngine(), is_lenient=True) as client:
        answer = await client.post(path, json=body)
        plain = await client.post(path, json={**ENDPOINTS[path], "user": "me"})
        wrong = await client.post(path, json={**body, "temperature": 9})
    assert answer.status_code == 200
    ignored = answer.headers["x-octavo-ignored-fields"].split(", ")
    assert ignored == ["temprature", "suffix", "store", "user", "na%C3%AFve%2C%20field%0D%0A", "stream_options.padding"]
    assert "x-octavo-ignored-fields" not in plain.headers
    assert wrong.json()["error"]["param"] == "temperature"
    assert wrong.headers["x-octavo-ignored-fields"] == answer.headers["x-octavo-ignored-fields"]


async def test_a_flood_of_unknown_fields_is_told_in_short(serving: Serving) -> None:
    body = {"prompt": "a", **{f"field_{number}": 1 for number in range(1000)}}
    async with serving(FakeEngine(), is_lenient=True) as client:
        answer = await client.post("/v1/completions", json=body)
    names = answer.headers["x-octavo-ignored-fields"].split(", ")
    assert len(answer.headers["x-octavo-ignored-fields"]) < 1100
    assert (names[0], names[-1]) == ("field_0", "...")


async def test_lenient_tokenizing_ignores_and_tells(serving: Serving) -> None:
    async with serving(FakeEngine(), is_lenient=True) as client:
        answer = await client.post("/tokenize", json={"prompt": "a", "colour": 1})
        back = await client.post("/detokenize", json={"tokens": [97], "colour": 1})
    assert (answer.json()["tokens"], back.json()["prompt"]) == ([97], "a")
    assert answer.headers["x-octavo-ignored-fields"] == back.headers["x-octavo-ignored-fields"] == "colour"


@both
async def test_what_asks_for_nothing_is_accepted(serving: Serving, path: str) -> None:
    body = {**ENDPOINTS[path], "service_tier": "auto", "store": False, "logit_bias": {}, "best_of": 1, "suffix": ""}
    async with serving(FakeEngine()) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", ["does not have", "embeddings"]),
        ("/v1/responses", ["does not have", "/v1/chat/completions"]),
        ("/v1/responses/resp_1", ["does not have"]),
        ("/v1/audio/speech", ["does not have", "audio"]),
        ("/v1/messages", ["Anthropic", "/v1/chat/completions"]),
        ("/v1/chat/completions/id", ["keeps no answers"]),
        ("/api/generate", ["Ollama", "/v1/completions"]),
        ("/api/tags", ["Ollama", "/v1/models"]),
        ("/api/whatever", ["Ollama"]),
        ("/completion", ["llama.cpp", "/v1/completions"]),
        ("/chat/completions", ["/v1/chat/completions", "base URL"]),
        ("/v1/v1/models", ["/v1/models", "base URL"]),
        ("/v1/complete", ["Anthropic"]),
        ("/v1/completion", ["did you mean /v1/completions?"]),
        ("/xyz", ["there are /v1/chat/completions"]),
    ],
)
async def test_a_path_of_another_server_is_explained(serving: Serving, path: str, words: list[str]) -> None:
    async with serving(FakeEngine()) as client:
        answer = await client.post(path, json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "no_such_path")
    for word in words:
        assert word in error["message"]
    assert "did you mean" not in error["message"] or path == "/v1/completion"
