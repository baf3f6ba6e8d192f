from __future__ import annotations

from typing import Any

import pytest

from octavo.core.interfaces import TokenLogprobs
from octavo.engine.outputs import CompletionDelta
from octavo.errors import EngineDeadError
from tests.server.conftest import CREATED, Serving
from tests.server.fake_engine import FakeEngine, say
from tests.server.sse import read_events

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


async def test_a_stream_has_exactly_these_bytes(serving: Serving) -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    async with serving(FakeEngine(say("a", "b", finish_reason="length"))) as client:
        answer = await client.post(PATH, json=body)
    head = (
        f'data: {{"id":"cmpl-{answer.headers["x-request-id"]}","object":"text_completion","created":{CREATED},'
        '"model":"fake","choices":['
    )
    assert answer.content.decode() == (
        f'{head}{{"index":0,"text":"a","logprobs":null,"finish_reason":null}}],"usage":null}}\n\n'
        f'{head}{{"index":0,"text":"b","logprobs":null,"finish_reason":"length"}}],"usage":null}}\n\n'
        f'{head}],"usage":{{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3,'
        '"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
        "data: [DONE]\n\n"
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_prompts_of_every_form(serving: Serving, prompt: Any, expected: list[list[int]]) -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        answer = (await client.post(PATH, json={"prompt": prompt})).json()
    assert [call.prompt_token_ids for call in engine.calls] == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert engine.calls[0].params.max_tokens == 16


async def test_choice_numbers_go_by_prompt_then_by_n(serving: Serving) -> None:
    """H10."""

    def script(params: Any) -> list[CompletionDelta]:
        return [
            CompletionDelta(index=index, text=f"{number}{index}", token_ids=[1], finish_reason="stop")
            for index in range(params.n)
        ]

    engine = FakeEngine(script)
    number = 0
    async with serving(engine) as client:
        answer = (await client.post(PATH, json={"prompt": ["a", "b"], "n": 2})).json()
        streamed = read_events(await client.post(PATH, json={"prompt": ["a", "b"], "n": 2, "stream": True}))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["00", "01", "00", "01"]
    assert sorted(chunk["choices"][0]["index"] for chunk in streamed) == [0, 1, 2, 3]


async def test_a_fault_of_one_prompt_ends_the_request_and_aborts_the_others(serving: Serving) -> None:
    calls = 0

    def script(params: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        return [None] if calls == 1 else [EngineDeadError("The engine process died.")]

    engine = FakeEngine(script)
    async with serving(engine) as client:
        answer = await client.post(PATH, json={"prompt": ["a", "b"]})
    assert answer.status_code == 503
    assert all(call.is_aborted for call in engine.calls)


async def test_one_bad_prompt_of_many_starts_none(serving: Serving) -> None:
    """H24."""
    engine = FakeEngine()
    async with serving(engine) as client:
        answer = await client.post(PATH, json={"prompt": [[1], [999999]]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt[1]"
    assert engine.calls == []


async def test_logprobs_have_the_older_shape(serving: Serving) -> None:
    """H12, H15: offsets count characters of the text; parts of one share a place."""

    def script(params: Any) -> list[CompletionDelta]:
        def logprobs(*token_ids: int) -> list[TokenLogprobs]:
            return [TokenLogprobs(token_id, -1.0, ((token_id + 1, -0.5),)) for token_id in token_ids]

        return [
            CompletionDelta(index=0, text="a", token_ids=[97], logprobs=logprobs(97)),
            CompletionDelta(index=0, token_ids=[0xC4], logprobs=logprobs(0xC4)),
            CompletionDelta(
                index=0, text="ďb", token_ids=[0x8F, 98], logprobs=logprobs(0x8F, 98), finish_reason="stop"
            ),
        ]

    body = {"prompt": "x", "logprobs": 1}
    async with serving(FakeEngine(script)) as client:
        plain = (await client.post(PATH, json=body)).json()["choices"][0]["logprobs"]
        chunks = read_events(await client.post(PATH, json={**body, "stream": True}))
    assert plain == {
        "tokens": ["a", "bytes:\\xc4", "bytes:\\x8f", "b"],
        "token_logprobs": [-1.0] * 4,
        "top_logprobs": [
            {"b": -0.5, "a": -1.0},
            {"bytes:\\xc5": -0.5, "bytes:\\xc4": -1.0},
            {"bytes:\\x90": -0.5, "bytes:\\x8f": -1.0},
            {"c": -0.5, "b": -1.0},
        ],
        "text_offset": [0, 1, 1, 2],
    }
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for key, values in plain.items():
        assert [value for logprobs in streamed for value in logprobs[key]] == values
