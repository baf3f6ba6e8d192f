from __future__ import annotations

from typing import Any

import pytest

from octavo.core.interfaces import TokenLogprobs
from octavo.engine.outputs import CompletionDelta
from octavo.errors import NO_ALLOWED_TOKEN, EngineDeadError, OverloadedError
from tests.server.conftest import CREATED, Serving
from tests.server.fake_engine import FakeEngine, FakeInfo, say
from tests.server.sse import read_events

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


async def test_a_stream_has_exactly_these_bytes(serving: Serving) -> None:
    """H06, H09: index and null finish reasons in every chunk."""
    engine = FakeEngine(say("Hé", '"\n'))
    async with serving(engine) as client:
        answer = await client.post(PATH, json={"model": "also-fake", "messages": HI, "stream": True})
    request_id = "chatcmpl-" + answer.headers["x-request-id"]
    head = (
        f'data: {{"id":"{request_id}","object":"chat.completion.chunk","created":{CREATED},"model":"also-fake",'
        '"choices":[{"index":0,"delta":{'
    )
    assert answer.content.decode() == (
        head + '"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        f'{head}"content":"Hé"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}"content":"\\"\\n"}},"logprobs":null,"finish_reason":"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_usage_comes_last_and_is_null_before(serving: Serving) -> None:
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    async with serving(FakeEngine(say("a", "b", num_cached=5))) as client:
        *chunks, last = read_events(await client.post(PATH, json=body))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 13,
        "completion_tokens": 2,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 5},
    }


async def test_a_whole_answer(serving: Serving) -> None:
    engine = FakeEngine(say("Hel", "lo", finish_reason="length"))
    async with serving(engine) as client:
        answer = await client.post(PATH, json={"messages": HI})
    assert answer.status_code == 200
    assert answer.json() == {
        "id": "chatcmpl-" + answer.headers["x-request-id"],
        "object": "chat.completion",
        "created": CREATED,
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 13,
            "completion_tokens": 2,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert bytes(engine.calls[0].prompt_token_ids) == b"<user>hi<bot>"


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_n_choices_are_counted_alike_plain_and_streamed(serving: Serving, path: str) -> None:
    """H08, H11."""
    body: dict[str, Any] = {"n": 3, **({"messages": HI} if path == PATH else {"prompt": ["hi", "hello"]})}
    async with serving(FakeEngine(say("a", "b"))) as client:
        plain = (await client.post(path, json=body)).json()
        streamed = read_events(
            await client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
        )
    num_choices = 3 if path == PATH else 6
    assert plain["usage"]["completion_tokens"] == 2 * num_choices
    assert streamed[-1]["usage"] == plain["usage"]
    assert [choice["index"] for choice in plain["choices"]] == list(range(num_choices))


async def test_each_choice_of_a_stream_ends_exactly_once(serving: Serving) -> None:
    """H05, H09."""
    async with serving(FakeEngine(say("a", "b"))) as client:
        chunks = read_events(await client.post(PATH, json={"messages": HI, "stream": True, "n": 2}))
    by_index: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        by_index[choice["index"]].append(choice)
    for choices in by_index.values():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "ab"
        assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]


async def test_a_token_without_text_yet_is_an_event_with_an_empty_text(serving: Serving) -> None:
    deltas = [
        CompletionDelta(index=0, token_ids=[143]),
        CompletionDelta(index=0, text="ď", token_ids=[233]),
        CompletionDelta(index=0, token_ids=[2], finish_reason="stop", stop_reason=2, is_final=True),
    ]
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    async with serving(FakeEngine(lambda params: deltas)) as client:
        role, nothing, text, end, usage = read_events(await client.post(PATH, json=body))
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert nothing["choices"][0]["delta"] == {"content": ""}
    assert text["choices"][0]["delta"] == {"content": "ď"}
    assert end["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": 2,
    }
    assert usage["usage"]["completion_tokens"] == 3


async def test_logprobs_are_strict_json_and_the_same_streamed(serving: Serving) -> None:
    """H13, H16: minus infinity is clamped; parts of a character are told apart by their bytes."""
    minus_infinity = float("-inf")

    def script(params: Any) -> list[CompletionDelta]:
        first = TokenLogprobs(0xC4, -0.25, ((0xC4, -0.25), (0x8F, minus_infinity)))
        second = TokenLogprobs(0x8F, minus_infinity, ((65, -0.5), (66, -1.0)))
        return [
            CompletionDelta(index=0, token_ids=[0xC4], logprobs=[first]),
            CompletionDelta(index=0, text="ď", token_ids=[0x8F], logprobs=[second], finish_reason="stop"),
        ]

    body = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    async with serving(FakeEngine(script)) as client:
        plain = await client.post(PATH, json=body)
        chunks = read_events(await client.post(PATH, json={**body, "stream": True}))
    assert b"Infinity" not in plain.content
    content = plain.json()["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "bytes:\\xc4",
        "logprob": -0.25,
        "bytes": [0xC4],
        "top_logprobs": [
            {"token": "bytes:\\xc4", "logprob": -0.25, "bytes": [0xC4]},
            {"token": "bytes:\\x8f", "logprob": -9999.0, "bytes": [0x8F]},
        ],
    }
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "ď"
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for logprobs in streamed if logprobs for entry in logprobs["content"]] == content


async def test_the_fields_reach_the_engine(serving: Serving) -> None:
    """H19: whatever is accepted gets to the sampler."""
    engine = FakeEngine()
    body = {
        "messages": HI,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 123,
        "max_completion_tokens": 7,
        "min_tokens": 2,
        "stop": ["x", "yz"],
        "stop_token_ids": [5],
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "priority": -3,
        "user": "somebody",
        "metadata": {"a": "b"},
        "tools": None,
        "response_format": {"type": "text"},
    }
    async with serving(engine) as client:
        answer = await client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    assert "somebody" not in answer.text
    (call,) = engine.calls
    params = call.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 40, 0.1, 123)
    assert (params.max_tokens, params.min_tokens, params.n, params.ignore_eos) == (7, 2, 2, True)
    assert (params.stop, params.stop_token_ids, params.logprobs) == (("x", "yz"), (5,), None)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.5)
    assert call.priority == -3


async def test_a_chat_without_max_tokens_may_fill_the_window(serving: Serving) -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        await client.post(PATH, json={"messages": HI})
    assert engine.calls[0].params.max_tokens is None


async def test_a_fault_inside_a_stream_is_an_error_event(serving: Serving) -> None:
    """H33."""
    for fault, code in (
        (EngineDeadError("The engine process died.", code="engine_dead"), "engine_dead"),
        (CompletionDelta(index=0, finish_reason="error", error="A NaN came out.", is_final=True), None),
        (ZeroDivisionError("a secret of the house"), None),
    ):
        engine = FakeEngine(lambda params, fault=fault: [CompletionDelta(index=0, text="a", token_ids=[1]), fault])
        async with serving(engine) as client:
            events = read_events(await client.post(PATH, json={"messages": HI, "stream": True}))
        assert [event for event in events if "error" in event] == [events[-1]]
        assert events[-1]["error"]["code"] == code
        assert "secret" not in str(events)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_fault_before_the_first_token_has_its_status(serving: Serving, is_streamed: bool) -> None:
    for fault, status in (
        (EngineDeadError("The engine process died."), 503),
        (OverloadedError("The queue is full."), 429),
        (CompletionDelta(index=0, finish_reason="error", error="A NaN came out.", is_final=True), 500),
        (RuntimeError("a secret of the house"), 500),
    ):
        async with serving(FakeEngine(lambda params, fault=fault: [fault])) as client:
            answer = await client.post(PATH, json={"messages": HI, "stream": is_streamed})
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert "secret" not in answer.text
        assert ("retry-after" in answer.headers) == (status in (429, 503))


async def test_fields_that_contradict_each_other_are_the_requests_fault(serving: Serving) -> None:
    """Only while generating does it turn out that no allowed token goes on with the grammar's text."""
    fault = CompletionDelta(index=0, finish_reason="error", error=NO_ALLOWED_TOKEN, is_final=True)
    begun = CompletionDelta(index=0, text="a", token_ids=[1])
    async with serving(FakeEngine(lambda params: [begun, fault])) as client:
        answer = await client.post(PATH, json={"messages": HI})
        events = read_events(await client.post(PATH, json={"messages": HI, "stream": True}))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == NO_ALLOWED_TOKEN
    for error in (answer.json()["error"], events[-1]["error"]):
        assert (error["type"], error["param"]) == ("invalid_request_error", "allowed_token_ids")
        assert error["code"] == "conflicting_constraints"


async def test_an_engine_that_stops_short_is_an_error_not_a_short_answer(serving: Serving) -> None:
    engine = FakeEngine(lambda params: [CompletionDelta(index=0, text="a", token_ids=[1])])
    async with serving(engine) as client:
        assert (await client.post(PATH, json={"messages": HI})).status_code == 500


async def test_a_model_without_a_template_says_where_to_go(serving: Serving) -> None:
    async with serving(FakeEngine(chat_template=None)) as client:
        answer = await client.post(PATH, json={"messages": HI})
    assert answer.status_code == 400
    assert "/v1/completions" in answer.json()["error"]["message"]


async def test_null_content_of_an_assistant_is_an_empty_text(serving: Serving) -> None:
    """H40."""
    engine = FakeEngine()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    async with serving(engine) as client:
        answer = await client.post(PATH, json={"messages": messages})
    assert answer.status_code == 200, answer.text
    told = b'<user>hi<assistant>{"name": "f", "arguments": {"x": 1}}<user>Result of f:\n2<bot>'
    assert bytes(engine.calls[0].prompt_token_ids) == told


async def test_an_overlong_prompt_names_the_window_and_the_field(serving: Serving) -> None:
    """H25."""
    async with serving(FakeEngine(info=FakeInfo(max_model_len=8))) as client:
        error = (await client.post(PATH, json={"messages": HI})).json()["error"]
    assert error["param"] == "messages"
    assert error["code"] == "context_length_exceeded"
    assert "8" in error["message"]
