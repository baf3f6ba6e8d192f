"""Echoed and scored prompts, whole and streamed: echo, prompt_logprobs, max_tokens 0, truncate_prompt_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from octavo.core.interfaces import TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.outputs import CompletionDelta
from octavo.server.logprobs import CompletionLogprobs
from tests.server.conftest import Serving
from tests.server.fake_engine import TOKENIZER, FakeEngine, FakeInfo, Script
from tests.server.sse import read_events

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


def scored(token_ids: Sequence[int], num_top: int = 0) -> list[TokenLogprobs | None]:
    """Every token but the first, likely in the order of its place."""
    top = tuple((98 + rank, -0.25) for rank in range(num_top))
    return [None, *(TokenLogprobs(token_id, -float(place), top) for place, token_id in enumerate(token_ids[1:], 1))]


def score_and_say(prompt: str, text: str, *, order: Sequence[int] = (0,)) -> Script:
    """One token and delta a character of text; order: of the choices, the scores come with the first choice's."""

    def script(params: SamplingParams) -> list[CompletionDelta | Exception | None]:
        deltas: list[CompletionDelta | Exception | None] = []
        for number, character in enumerate(text):
            for index in order:
                token_id = ord(character)
                is_last = number == len(text) - 1
                delta = CompletionDelta(
                    index=index,
                    text=character,
                    token_ids=[token_id],
                    logprobs=[] if params.logprobs is None else [TokenLogprobs(token_id, -0.5, ((token_id, -0.5),))],
                    finish_reason="stop" if is_last else None,
                    is_final=is_last and index == order[-1],
                )
                if number == 0 and index == 0 and params.prompt_logprobs is not None:
                    delta.prompt_logprobs = scored(prompt.encode(), params.prompt_logprobs)
                deltas.append(delta)
        return deltas

    return script


def join_stream(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices that the chunks add up to."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": None})
            choice["text"] += part.pop("text")
            logprobs = part.pop("logprobs")
            if logprobs is not None:
                known = choice["logprobs"] or {
                    name: [] if rest is not None else None for name, rest in logprobs.items()
                }
                choice["logprobs"] = {
                    name: None if entries is None else [*known[name], *entries] for name, entries in logprobs.items()
                }
            for name, value in part.items():
                if name == "token_ids":
                    choice[name] = choice.get(name, []) + value
                elif value is not None:
                    choice[name] = value
    return choices


async def test_the_prompt_comes_before_the_answer(serving: Serving) -> None:
    engine = FakeEngine(score_and_say("ab", "xy"))
    async with serving(engine) as client:
        answer = (await client.post(PATH, json={"prompt": "ab", "echo": True})).json()
    assert answer["choices"][0]["text"] == "abxy"
    assert answer["usage"]["completion_tokens"] == 2
    assert engine.calls[0].params.prompt_logprobs is None  # nobody asked how likely it was


async def test_its_logprobs_come_before_the_answers(serving: Serving) -> None:
    engine = FakeEngine(score_and_say("abc", "x"))
    async with serving(engine) as client:
        answer = (await client.post(PATH, json={"prompt": "abc", "echo": True, "logprobs": 1})).json()
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "c", "x"],
        "token_logprobs": [None, -1.0, -2.0, -0.5],
        "top_logprobs": [None, {"b": -0.25}, {"b": -0.25, "c": -2.0}, {"x": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }


async def test_max_tokens_0_only_scores_the_prompt(serving: Serving) -> None:
    engine = FakeEngine(score_and_say("abc", "x"))
    async with serving(engine) as client:
        body = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
        answer = (await client.post(PATH, json=body)).json()
        streamed = read_events(await client.post(PATH, json={**body, "stream": True}))
    assert engine.calls[0].params.max_tokens == 1
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("abc", "length", [])
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert "stop_reason" not in choice
    assert answer["usage"]["completion_tokens"] == 0
    assert join_stream(streamed) == {0: choice}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["scores first", "scores late"])
async def test_streamed_choices_are_the_whole_ones(serving: Serving, order: tuple[int, int]) -> None:
    """Whichever choice's delta comes first, each begins with the prompt and its logprobs."""
    body = {
        "prompt": "ab",
        "echo": True,
        "logprobs": 2,
        "n": 2,
        "return_token_ids": True,
        "prompt_logprobs": 1,
        "stop": ["zz"],
    }
    async with serving(FakeEngine(score_and_say("ab", "xyz", order=order))) as client:
        answer = (await client.post(PATH, json=body)).json()
        streamed = read_events(await client.post(PATH, json={**body, "stream": True}))
    assert [choice["text"] for choice in answer["choices"]] == ["abxyz", "abxyz"]
    assert join_stream(streamed) == dict(enumerate(answer["choices"]))


async def test_a_truncated_prompt_is_echoed_as_it_was_used(serving: Serving) -> None:
    engine = FakeEngine(score_and_say("cd", "x"))
    async with serving(engine) as client:
        body = {"prompt": "abcd", "echo": True, "logprobs": 0, "truncate_prompt_tokens": 2}
        answer = (await client.post(PATH, json=body)).json()
    assert engine.calls[0].prompt_token_ids == [99, 100]
    assert answer["choices"][0]["text"] == "cdx"
    assert answer["usage"]["prompt_tokens"] == 2


async def test_minus_one_truncates_to_what_there_is_room_for(serving: Serving) -> None:
    engine = FakeEngine(info=FakeInfo(max_model_len=20))
    async with serving(engine) as client:
        too_long = await client.post(PATH, json={"prompt": "a" * 90, "max_tokens": 5})
        answer = await client.post(PATH, json={"prompt": "a" * 90, "max_tokens": 5, "truncate_prompt_tokens": -1})
        beyond = await client.post(PATH, json={"prompt": "a", "max_tokens": 5, "truncate_prompt_tokens": 20})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["usage"]["prompt_tokens"] == 15
    assert beyond.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_token_ids_are_echoed_as_text(serving: Serving) -> None:
    engine = FakeEngine(score_and_say("\u00e9a", "x"))
    async with serving(engine) as client:
        body = {"prompt": [256, 0xC3, 0xA9, 97], "echo": True}
        plain = (await client.post(PATH, json=body)).json()
        with_special = (await client.post(PATH, json={**body, "skip_special_tokens": False})).json()
    assert plain["choices"][0]["text"] == "éax"
    assert with_special["choices"][0]["text"] == "<end>éax"


async def test_prompt_logprobs_have_vllms_shape(serving: Serving) -> None:
    engine = FakeEngine(score_and_say("ab", "x"))
    async with serving(engine) as client:
        answer = (await client.post(PATH, json={"prompt": "ab", "prompt_logprobs": 1})).json()
    assert answer["choices"][0]["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}},
    ]
    assert answer["choices"][0]["logprobs"] is None


async def test_a_chat_tells_its_prompt_beside_the_choices(serving: Serving) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0, "return_token_ids": True}
    prompt = "<user>hi<bot>"
    async with serving(FakeEngine(score_and_say(prompt, "xy"))) as client:
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        streamed = read_events(await client.post("/v1/chat/completions", json={**body, "stream": True}))
    assert answer["prompt_token_ids"] == list(prompt.encode())
    assert len(answer["prompt_logprobs"]) == len(prompt)
    assert answer["prompt_logprobs"][2] == {"115": {"logprob": -2.0, "rank": None, "decoded_token": "s"}}
    assert answer["choices"][0]["token_ids"] == [120, 121]
    first, *others = streamed
    assert (first["prompt_token_ids"], first["prompt_logprobs"]) == (
        answer["prompt_token_ids"],
        answer["prompt_logprobs"],
    )
    assert all("prompt_token_ids" not in event and "prompt_logprobs" not in event for event in others)
    assert [event["choices"][0].get("token_ids") for event in streamed] == [None, [120], [121]]


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_scoring_goes_with_n_and_with_a_failure(serving: Serving, path: str) -> None:
    def script(params: SamplingParams) -> list[CompletionDelta | Exception | None]:
        failed = [CompletionDelta(index=index, finish_reason="error", error="It broke.") for index in range(params.n)]
        return [*failed]

    body = {"prompt": "ab", "messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0, "n": 2}
    del body["messages" if path == PATH else "prompt"]
    async with serving(FakeEngine(script)) as client:
        answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "It broke.")


def test_offsets_are_places_in_the_text() -> None:
    """A BOS that the text does not show has no width, a marker that was written has; parts of a character share it."""
    logprobs = CompletionLogprobs(TOKENIZER, 0)
    prompt = [256, *"é".encode(), 256, 97]
    assert logprobs.add_prompt(prompt, scored(prompt), "é<end>a")["text_offset"] == [0, 0, 0, 1, 6]
    generated = [TokenLogprobs(token_id, -1.0) for token_id in (98, 256, 99)]
    assert logprobs.add(generated)["text_offset"] == [7, 8, 8]
    shown = CompletionLogprobs(TOKENIZER, 0, skips_special_tokens=False)
    assert shown.add(generated)["text_offset"] == [0, 1, 6]
