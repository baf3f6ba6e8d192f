"""Stop strings, UTF-8 and the ends of streams: H01 to H07."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cases.conftest import Api, reasons_of, texts_of
from tests.server.conftest import Serving
from tests.server.fake_engine import FakeEngine, FakeInfo, say
from tests.server.sse import read_events as read_fake_events

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
]


def test_h01_no_chunk_holds_what_could_become_the_stop_string(api: Api) -> None:
    prompt = "Letters in order: ABC"
    whole = api.complete(prompt, max_tokens=24)["choices"][0]["text"]
    stop = "DEFGHIJ" if "DEFGHIJ" in whole else whole[3:10]
    for stops in ([stop], [stop, whole[-3:]], ["never to be said", stop]):
        events = api.stream_completion(prompt, max_tokens=24, stop=stops)
        sent = ""
        for text in texts_of(events):
            sent += text
            assert whole[: whole.index(stop)].startswith(sent)
        assert sent == whole[: whole.index(stop)]
        assert reasons_of(events)[-1] == "stop"
    plain = api.complete(prompt, max_tokens=24, stop=stop)["choices"][0]
    assert (plain["text"], plain["finish_reason"]) == (whole[: whole.index(stop)], "stop")


def test_h01_every_slice_of_a_text_works_as_a_stop_string(api: Api) -> None:
    prompt, options = "Once upon a time, in a small village by the sea,", {"max_tokens": 16}
    whole = api.complete(prompt, **options)["choices"][0]["text"]
    for start in range(0, len(whole) - 6, 9):
        stop = whole[start : start + 6]
        events = api.stream_completion(prompt, stop=stop, **options)
        assert "".join(texts_of(events)) == whole[: whole.index(stop)]


def test_h01_a_stop_string_that_is_kept_ends_the_text(api: Api) -> None:
    prompt, options = "Letters in order: ABC", {"max_tokens": 24}
    whole = api.complete(prompt, **options)["choices"][0]["text"]
    stop = whole[3:9]
    options |= {"stop": [stop], "include_stop_str_in_output": True}
    expected = whole[: whole.index(stop) + len(stop)]
    assert api.complete(prompt, **options)["choices"][0]["text"] == expected
    assert "".join(texts_of(api.stream_completion(prompt, **options))) == expected


def test_h02_a_stop_string_of_several_tokens_matches_the_text(api: Api) -> None:
    prompt = "A B C D E F G H I J K"
    whole = api.complete(prompt, max_tokens=24)["choices"][0]["text"]
    # The report's own stop string, and one of three letters that comes for certain.
    for stop in ("O P Q", whole[5:10]):
        choice = api.complete(prompt, max_tokens=24, stop=[stop])["choices"][0]
        assert choice["text"] == whole.split(stop)[0]
        assert stop not in whole or choice["finish_reason"] == "stop"


@pytest.mark.anyio
@pytest.mark.parametrize("held", ["<tool_", "<tool_call", '{"na'])
async def test_h03_text_that_the_tool_parser_holds_is_sent_when_a_stop_string_ends_the_answer(
    serving: Serving, held: str
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": "auto", "stop": "STOP"}
    async with serving(FakeEngine(say("Fine ", held), info=FakeInfo(max_model_len=4096))) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        plain = answer.json()["choices"][0]
        events = read_fake_events(await client.post("/v1/chat/completions", json={**body, "stream": True}))
    assert plain["message"]["content"] == f"Fine {held}"
    assert plain["finish_reason"] == "stop"
    assert "".join(texts_of(events)) == f"Fine {held}"
    assert reasons_of(events)[-1] == "stop"


@pytest.mark.parametrize("word", ["ďábelské", "日本語", "🌶🌶", "é́", "naïve — “ok”"])
def test_h04_no_chunk_ends_within_a_character(api: Api, word: str) -> None:
    events = api.stream_completion("Say: ", max_tokens=40, structured_outputs={"choice": [word]})
    assert "".join(texts_of(events)) == word
    assert not any("\ufffd" in text for text in texts_of(events))
    chat = api.stream_chat("Say it.", max_tokens=40, structured_outputs={"choice": [word]})
    assert "".join(texts_of(chat)) == word
    assert not any("\ufffd" in text for text in texts_of(chat))


def test_h04_a_character_cut_by_max_tokens_is_the_same_plain_and_streamed(api: Api) -> None:
    for max_tokens in range(1, 5):
        options: dict[str, Any] = {"max_tokens": max_tokens, "structured_outputs": {"choice": ["🌶ď"]}}
        plain = api.complete("Say: ", **options)["choices"][0]["text"]
        assert "".join(texts_of(api.stream_completion("Say: ", **options))) == plain


def test_h05_a_stream_with_tools_has_one_finish_reason_in_its_last_chunk(api: Api) -> None:
    for seed in range(20):
        events = api.stream_chat("Add 1 and 2.", tools=TOOLS, max_tokens=6, temperature=1, seed=seed)
        *others, last = reasons_of(events)
        assert last in ("stop", "length", "tool_calls")
        assert others == [None] * len(others)


def test_h05_each_of_several_choices_has_its_own_finish_reason(api: Api) -> None:
    events = api.stream_chat("Add 1 and 2.", tools=TOOLS, max_tokens=6, n=3, temperature=1, seed=1)
    for index in range(3):
        *others, last = reasons_of(events, index)
        assert last in ("stop", "length", "tool_calls")
        assert others == [None] * len(others)


def test_h06_before_the_end_the_finish_reason_is_null(api: Api) -> None:
    for events in (api.stream_chat("Hi", max_tokens=4), api.stream_completion("Hi", max_tokens=4)):
        assert reasons_of(events)[:-1] == [None] * (len(reasons_of(events)) - 1)
        assert '"finish_reason": ""' not in json.dumps(events)


def test_h07_what_max_tokens_cuts_says_length(api: Api) -> None:
    for ask in (api.complete, api.chat):
        answer = ask("Hi", max_tokens=2, ignore_eos=True)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 2
    events = api.stream_chat("Hi", max_tokens=2, ignore_eos=True)
    assert reasons_of(events)[-1] == "length"


def test_h07_an_end_by_itself_at_max_tokens_says_stop(api: Api) -> None:
    # The end token is the last one that max_tokens allows.
    free = api.chat("What is the capital of Italy?")
    assert free["choices"][0]["finish_reason"] == "stop"
    num_tokens = free["usage"]["completion_tokens"]
    assert api.chat("What is the capital of Italy?", max_tokens=num_tokens)["choices"][0]["finish_reason"] == "stop"
