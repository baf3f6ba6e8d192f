"""/tokenize tells exactly what the model would get, and /detokenize is the way back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Serving
from tests.server.fake_engine import FakeEngine
from tests.server.test_http import check_error

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]


async def test_a_prompt(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        plain = (await client.post("/tokenize", json={"prompt": "aü"})).json()
        shown = (await client.post("/tokenize", json={"prompt": "ab<end>", "return_token_strs": True})).json()
        empty = (await client.post("/tokenize", json={"prompt": "", "model": "also-fake"})).json()
    assert plain == {"count": 3, "max_model_len": 128, "tokens": [97, 0xC3, 0xBC], "token_strs": None}
    assert (shown["tokens"], shown["token_strs"]) == ([97, 98, 256], ["a", "b", "<end>"])
    assert (empty["count"], empty["tokens"]) == (0, [])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a<end>ü"}),
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "a<end>"}, *HI]}),
    ],
)
async def test_the_tokens_are_those_that_the_model_gets(serving: Serving, path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        answer = (await client.post("/tokenize", json=body)).json()
        used = (await client.post(path, json=body)).json()
    assert engine.calls[0].prompt_token_ids == answer["tokens"]
    assert used["usage"]["prompt_tokens"] == answer["count"]


async def test_the_answers_opening_can_be_left_out(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        body = {"messages": HI, "add_generation_prompt": False}
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    assert bytes(tokens) == b"<user>hi"


async def test_a_text_over_the_window_is_counted_all_the_same(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        answer = (await client.post("/tokenize", json={"prompt": "x" * 20_000})).json()
    assert (answer["count"], answer["max_model_len"]) == (20_000, 128)


async def test_there_and_back(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        for text in ("", "a", " a b ", "ďábelské 🌶", "a<end>b"):
            tokens = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
            assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "missing_field"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": ["x"]}, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt", "invalid_value"),
        ("/tokenize", {"prompt": "x", "return_token_str": True}, "return_token_str", "unknown_field"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ("/tokenize", {"prompt": "x", "model": "gpt-4"}, "model", "model_not_found"),
        ("/detokenize", {}, "tokens", "missing_field"),
        ("/detokenize", {"tokens": "x"}, "tokens", "invalid_type"),
        ("/detokenize", {"tokens": [1, "x"]}, "tokens[1]", "invalid_type"),
        ("/detokenize", {"tokens": [1, 257]}, "tokens[1]", "token_id_out_of_range"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "token_id_out_of_range"),
        ("/detokenize", {"tokens": [1], "model": "gpt-4"}, "model", "model_not_found"),
    ],
)
async def test_what_is_wrong_is_named(
    serving: Serving, path: str, body: dict[str, Any], param: str, code: str | None
) -> None:
    async with serving(FakeEngine()) as client:
        error = check_error(await client.post(path, json=body), 404 if code == "model_not_found" else 400)
    assert (error["param"], error["code"]) == (param, code)


async def test_a_model_without_a_template_takes_prompts_only(serving: Serving) -> None:
    async with serving(FakeEngine(chat_template=None)) as client:
        assert check_error(await client.post("/tokenize", json={"messages": HI}), 400)["param"] == "messages"
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
