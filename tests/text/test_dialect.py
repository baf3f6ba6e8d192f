"""A model's template tells how it calls and thinks; a model that knows no tools is told of them in words."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.text.chat_template import ChatTemplate, encode_chat
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.dialect import Dialect
from octavo.text.pipeline import ChatMessage
from octavo.text.tokenizer import tokenizer_from_gguf
from octavo.text.tool_calls.formats import detect_tool_format, find_marker_ids
from octavo.text.tool_calls.tools import check_tool_choice, check_tools
from tests.text.vocabularies import CHATML, CONTROL, NORMAL, byte_characters, byte_level_metadata

# In the manner of Qwen's and Hermes' templates, written for this test.
HERMES = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    "Answer with <tool_call> and </tool_call> around.<|im_end|>\n{% endif %}" + CHATML
)
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TOOLS = check_tools(
    [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "now"}},
    ]
)
AUTO = check_tool_choice("auto", TOOLS)
TOKENIZER = tokenizer_from_gguf(byte_level_metadata())


def dialect(source: str, **names: Any) -> Dialect:
    return Dialect(TOKENIZER, ChatTemplate(source), **names)


@pytest.mark.parametrize(
    ("source", "special", "name"),
    [
        (None, (), "json"),
        (CHATML, (), "json"),
        (HERMES, (), "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ '[TOOL_CALLS]' }}", (), "mistral"),
        ("{% if tools %}{{ '<|python_tag|>' }}{% endif %}", (), "llama3_json"),
        ("{% if tools %}write [name1(arg1=value1, arg2=value2)]{% endif %}", (), "pythonic"),
        ("{{ tools | tojson }}", ("[TOOL_CALLS]",), "mistral"),
        ("{{ messages }}", ("[TOOL_CALLS]",), "json"),
    ],
)
def test_the_template_tells_the_format(source: str | None, special: tuple[str, ...], name: str) -> None:
    assert detect_tool_format(source, special) == name


def test_names_overrule_the_template() -> None:
    assert dialect(HERMES).tool_format == "hermes"
    assert dialect(HERMES, tool_call_parser="qwen3").tool_format == "hermes"
    assert dialect(CHATML, tool_call_parser="mistral").tool_format == "mistral"
    assert dialect(THINKING).reasoning is not None
    assert dialect(THINKING, reasoning_parser="none").reasoning is None
    assert dialect(CHATML, reasoning_parser="deepseek_r1").reasoning is not None
    with pytest.raises(ConfigError, match="no tool call parser"):
        dialect(CHATML, tool_call_parser="x")


def test_a_template_that_takes_tools_gets_them() -> None:
    model = dialect(HERMES)
    messages = [{"role": "user", "content": "hi"}]
    assert model.takes_tools
    assert model.prepare(messages, AUTO) == messages
    tools = model.template_tools(AUTO)
    assert tools is not None
    assert [tool["function"]["name"] for tool in tools] == ["add", "now"]
    assert model.template_tools(check_tool_choice("none", TOOLS)) is None


def test_a_model_without_tools_is_told_in_a_system_message() -> None:
    model = dialect(CHATML)
    (system, user) = model.prepare([{"role": "user", "content": "1 + 1?"}], AUTO)
    assert user == {"role": "user", "content": "1 + 1?"}
    assert system["role"] == "system"
    assert '{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}' in system["content"]
    assert "answer in plain words" in system["content"]
    assert model.template_tools(AUTO) is None
    must = model.prepare([{"role": "system", "content": "Be kind."}], check_tool_choice("required", TOOLS), False)
    assert len(must) == 1
    assert must[0]["content"].startswith("Be kind.\n\nYou can call")
    assert must[0]["content"].endswith("Call at most one function.\nYou must call a function now.")
    assert model.prepare([user], check_tool_choice("none", TOOLS)) == [user]


@pytest.mark.parametrize("of_system", ["raise_exception('no system')", "''"])
def test_a_template_that_takes_no_system_message_gets_the_tools_with_the_first_question(of_system: str) -> None:
    source = "{% for m in messages %}{% if m.role == 'system' %}{{ X }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    model = dialect(source.replace("X", of_system))
    (message,) = model.prepare([{"role": "user", "content": "1 + 1?"}], AUTO)
    assert message["role"] == "user"
    assert message["content"].startswith("You can call these functions.")
    assert message["content"].endswith("in plain words.\n\n1 + 1?")
    first, second = model.prepare([{"role": "assistant", "content": "Hi"}], AUTO)
    assert (first["role"], second["content"]) == ("user", "Hi")


def test_h40_calls_and_results_of_earlier_turns_become_plain_messages() -> None:
    def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call("1", "add", '{"a": 1}'), call("2", "now", "")]},
        {"role": "tool", "tool_call_id": "2", "content": "noon"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "7"}]},
    ]
    prepared = dialect(CHATML).prepare(messages, check_tool_choice(None, ()))
    assert prepared[1:] == [
        {
            "role": "assistant",
            "content": '{"name": "add", "arguments": {"a": 1}}\n{"name": "now", "arguments": {}}',
        },
        {"role": "user", "content": "Result of now:\nnoon\n\nResult of add:\n7"},
    ]
    assert ChatTemplate(CHATML).render(prepared).count("<|im_start|>") == 4


def test_a_prompt_that_opens_the_thinking_starts_inside() -> None:
    model, messages = dialect(THINKING), [{"role": "user", "content": "hi"}]
    prompt = encode_chat(TOKENIZER, ChatTemplate(THINKING), messages)
    assert model.starts_inside(prompt)
    pipeline, message = model.pipeline(AUTO, model.starts_inside(prompt)), ChatMessage()
    message.add(pipeline.push('so\n</think>\n\n{"name": "now", "arguments": {}}'))
    _, reason = pipeline.finish("stop")
    assert (message.reasoning_content, message.content, reason) == ("so", "", "tool_calls")
    assert not model.starts_inside(encode_chat(TOKENIZER, ChatTemplate(CHATML), messages))


def test_tool_choice_none_leaves_calls_in_the_text() -> None:
    pipeline, message = dialect(CHATML).pipeline(check_tool_choice("none", TOOLS)), ChatMessage()
    message.add(pipeline.push('{"name": "now", "arguments": {}}'))
    assert pipeline.finish("stop") == ([], "stop")
    assert message.content == '{"name": "now", "arguments": {}}'


def test_markers_that_are_special_tokens_reach_the_parser() -> None:
    tokens = ["<|endoftext|>", "[TOOL_CALLS]", "<|im_end|>", *byte_characters()]
    metadata = byte_level_metadata(tokens=tokens, token_type=[CONTROL] * 3 + [NORMAL] * 256, merges=[])
    tokenizer = tokenizer_from_gguf(metadata)
    model = Dialect(tokenizer, ChatTemplate("{{ tools }}{{ '[TOOL_CALLS]' }}"))
    assert model.shown_token_ids == find_marker_ids("mistral", tokenizer.special_tokens) == {1}
    token_ids = [1, *tokenizer.encode_plain('[{"name": "now", "arguments": {}}]'), 2]
    assert IncrementalDetokenizer(tokenizer).push(token_ids).startswith("[{")
    text = IncrementalDetokenizer(tokenizer, shown_token_ids=model.shown_token_ids).push(token_ids)
    assert text == '[TOOL_CALLS][{"name": "now", "arguments": {}}]'
    # Text cannot be the token: the grammar names it by its id.
    strict = check_tool_choice("auto", check_tools([{"type": "function", "function": {"name": "f", "strict": True}}]))
    grammar = model.grammar(strict)
    assert grammar is not None
    assert "<[1]>" in grammar[1]
    assert model.grammar(check_tool_choice("required", TOOLS)) is not None
