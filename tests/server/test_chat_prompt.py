"""Every field that changes a chat's prompt: the same for the model and for /tokenize, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.text.chat_template import ChatTemplate
from tests.server.chats import ADD, HERMES, HI, PATH
from tests.server.conftest import Serving
from tests.server.fake_engine import FakeEngine, FakeInfo
from tests.server.test_http import check_error

pytestmark = pytest.mark.anyio

ROOM = FakeInfo(max_model_len=4096)
BOT = [*HI, {"role": "assistant", "content": "Good "}]
TALKATIVE = ChatTemplate(
    "{% if mood is defined %}[{{ mood }}]{% endif %}{% for d in documents or [] %}({{ d.text }}){% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
STERN = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system message, please.') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "<user>hi<bot>"),
        ({"add_generation_prompt": False}, "<user>hi"),
        ({"messages": BOT}, "<user>hi<assistant>Good <bot>"),
        ({"messages": BOT, "continue_final_message": True}, "<user>hi<assistant>Good "),
        (
            {"messages": BOT, "continue_final_message": True, "add_generation_prompt": False},
            "<user>hi<assistant>Good ",
        ),
        ({"chat_template_kwargs": {"mood": "glad"}}, "[glad]<user>hi<bot>"),
        ({"documents": [{"title": "A", "text": "One."}, {"text": "Two."}]}, "(One.)(Two.)<user>hi<bot>"),
        ({"messages": [{"role": "developer", "content": "Be brief."}, *HI]}, "<system>Be brief.<user>hi<bot>"),
        ({"chat_template": "{{ messages[0].content }}!"}, "hi!"),
        ({"tools": [ADD], "tool_choice": "none"}, "<user>hi<bot>"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_the_model_gets_what_tokenize_tells(serving: Serving, fields: dict[str, Any], prompt: str) -> None:
    engine = FakeEngine(chat_template=TALKATIVE, info=ROOM)
    body = {"messages": HI, **fields}
    async with serving(engine, trust_request_chat_template=True) as client:
        answer = await client.post(PATH, json=body)
        told = (await client.post("/tokenize", json=body)).json()
    assert answer.status_code == 200, answer.text
    assert bytes(engine.calls[0].prompt_token_ids).decode() == prompt
    assert told["tokens"] == engine.calls[0].prompt_token_ids


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"messages": BOT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            ["add_generation_prompt", "one way only"],
        ),
        (
            {"messages": [{"role": "assistant", "content": ""}], "continue_final_message": True},
            "continue_final_message",
            ["no text"],
        ),
        ({"continue_final_message": "yes"}, "continue_final_message", ["true or false"]),
        ({"chat_template_kwargs": {"mod": 1}}, "chat_template_kwargs.mod", ["reads mood"]),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", ["the server gives"]),
        ({"chat_template_kwargs": {"raise_exception": 1}}, "chat_template_kwargs.raise_exception", ["not read"]),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", ["an object"]),
        ({"documents": [{"text": 5}]}, "documents[0].text", ["a string"]),
        ({"documents": ["x"]}, "documents[0]", ["an object"]),
        ({"chat_template": "{{ messages }}"}, "chat_template", ["--trust-request-chat-template"]),
        ({"reasoning_effort": "low"}, "reasoning_effort", ["no such variable"]),
    ],
    ids=lambda value: str(value)[:50],
)
@pytest.mark.parametrize("path", [PATH, "/tokenize"])
async def test_what_is_wrong_is_named(
    serving: Serving, path: str, fields: dict[str, Any], param: str, words: list[str]
) -> None:
    engine = FakeEngine(chat_template=TALKATIVE, info=ROOM)
    async with serving(engine) as client:
        error = check_error(await client.post(path, json={"messages": HI, **fields}), 400)
    assert error["param"] == param
    assert all(word in error["message"] for word in words), error["message"]
    assert engine.calls == []


async def test_documents_need_a_template_that_takes_them(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        error = check_error(await client.post(PATH, json={"messages": HI, "documents": [{"text": "x"}]}), 400)
    assert (error["param"], error["code"]) == ("documents", "unsupported_field")


async def test_a_template_that_takes_no_system_message_says_so(serving: Serving) -> None:
    async with serving(FakeEngine(chat_template=STERN)) as client:
        body = {"messages": [{"role": "system", "content": "x"}, *HI]}
        error = check_error(await client.post(PATH, json=body), 400)
    assert error["param"] == "messages"
    assert "No system message, please." in error["message"]


async def test_a_request_s_template_that_is_none_is_refused(serving: Serving) -> None:
    async with serving(FakeEngine(), trust_request_chat_template=True) as client:
        for source in ("{% if %}", "x" * 300_000):
            error = check_error(await client.post(PATH, json={"messages": HI, "chat_template": source}), 400)
            assert error["param"] == "chat_template"
            assert error["message"].startswith("chat_template ")


async def test_the_server_s_own_template_goes_before_the_model_s(serving: Serving) -> None:
    for own in (None, HERMES):
        engine = FakeEngine(chat_template=own)
        async with serving(engine, chat_template="{{ messages[0].content }}?") as client:
            await client.post(PATH, json={"messages": HI})
        assert bytes(engine.calls[0].prompt_token_ids) == b"hi?"


async def test_without_any_template_there_is_no_chat(serving: Serving) -> None:
    async with serving(FakeEngine(chat_template=None)) as client:
        for path in (PATH, "/tokenize"):
            error = check_error(await client.post(path, json={"messages": HI}), 400)
            assert (error["param"], error["code"]) == ("messages", "no_chat_template")


async def test_a_prompt_of_tokenize_goes_without_the_fields_of_messages(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        error = check_error(await client.post("/tokenize", json={"prompt": "x", "tools": [ADD]}), 400)
    assert (error["param"], "goes with messages" in error["message"]) == ("tools", True)


async def test_many_tools_are_refused_before_they_are_tokenized(serving: Serving) -> None:
    """Their text counts like any other."""
    big = {"type": "function", "function": {"name": "f", "description": "x" * 20_000}}
    for template in (HERMES, TALKATIVE):
        async with serving(FakeEngine(chat_template=template)) as client:
            error = check_error(await client.post(PATH, json={"messages": HI, "tools": [big]}), 400)
        assert error["code"] == "context_length_exceeded"


async def test_a_lenient_server_tells_what_the_template_does_not_read(serving: Serving) -> None:
    engine = FakeEngine(chat_template=TALKATIVE, info=ROOM)
    body = {"messages": HI, "reasoning_effort": "low", "chat_template_kwargs": {"mood": "glad", "mod": 1}}
    async with serving(engine, is_lenient=True) as client:
        answer = await client.post(PATH, json=body)
        told = await client.post("/tokenize", json=body)
    assert bytes(engine.calls[0].prompt_token_ids) == b"[glad]<user>hi<bot>"
    assert answer.headers["x-octavo-ignored-fields"] == "chat_template_kwargs.mod, reasoning_effort"
    assert told.json()["tokens"] == engine.calls[0].prompt_token_ids
