"""Templates, tools and answers for tests of chats, and the chunks of a stream made into a message again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.engine.outputs import CompletionDelta
from octavo.text.chat_template import ChatTemplate
from tests.server.fake_engine import Script, make_logprobs

PATH = "/v1/chat/completions"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "add"}}

# In the manner of Hermes and Qwen: the template writes the tools, calls stand between markers.
HERMES = ChatTemplate(
    "{% if tools %}{% for t in tools %}{{ t.function.name }};{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.a }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
# A model that thinks when it is not told otherwise.
THINKING = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{% endif %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "b": 2}'


def cut(text: str, *sizes: int) -> list[str]:
    """The text in pieces of these sizes, over and over."""
    pieces, position, number = [], 0, 0
    while position < len(text):
        size = sizes[number % len(sizes)]
        pieces.append(text[position : position + size])
        position, number = position + size, number + 1
    return pieces


def answer_with(pieces: Iterable[str], finish_reason: str = "stop") -> Script:
    """A delta for each piece, one token each, and the end in a delta of its own, as the end token brings it."""
    told = [*pieces, ""]

    def script(params: SamplingParams) -> list[CompletionDelta | Exception | None]:
        return [
            CompletionDelta(
                index=index,
                text=text,
                token_ids=[number],
                logprobs=make_logprobs(text or "e", params),
                finish_reason=finish_reason if number == len(told) - 1 else None,
                is_final=number == len(told) - 1 and index == params.n - 1,
            )
            for number, text in enumerate(told)
            for index in range(params.n)
        ]

    return script


def join_chunks(chunks: Iterable[dict[str, Any]], index: int = 0) -> tuple[dict[str, Any], str, list[Any]]:
    """The message, the finish reason and the logprobs' tokens of one choice, as a client puts them together.

    Asserts what clients rely on: the role once and first, one finish reason and nothing after it, a call's id and name
    in its first delta and only there, calls in order.
    """
    message: dict[str, Any] = {}
    reason: str | None = None
    tokens: list[Any] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert reason is None, "a chunk after the end"
            delta = choice["delta"]
            assert ("role" in delta) == (not message)
            if choice.get("logprobs"):
                tokens += choice["logprobs"]["content"]
            if "role" in delta:
                message = {"role": delta["role"], "content": delta["content"], "refusal": None}
                assert not delta["content"]
                continue
            for name in ("content", "reasoning_content"):
                if name in delta:
                    assert delta[name] or choice["finish_reason"]
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                else:
                    assert call.keys() == {"index", "function"}
                    assert call["function"].keys() == {"arguments"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            reason = choice["finish_reason"]
    assert reason is not None
    return message, reason, tokens


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": "id"} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls} if calls else message
