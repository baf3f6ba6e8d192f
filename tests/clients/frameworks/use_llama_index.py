"""llama-index-llms-openai-like: a chat, a stream, a tool call. Run with the server's /v1 address and its key."""

# ruff: noqa: T201

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

url, key = sys.argv[1:]
llm = OpenAILike(
    model="smollm2",
    api_base=url,
    api_key=key,
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0,
    max_tokens=100,
    max_retries=0,
    context_window=2048,
)
messages = [ChatMessage(role="user", content="What is the capital of Italy?")]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


answer = llm.chat(messages).message.content
assert answer
print("chat:", answer)
streamed = "".join(part.delta for part in llm.stream_chat(messages))
assert streamed == answer, (streamed, answer)
print("stream:", streamed)
tool = FunctionTool.from_defaults(add)
response = llm.chat_with_tools([tool], user_msg="Add 1 and 2.", tool_required=True)
[call, *_] = llm.get_tool_calls_from_response(response)
assert call.tool_name == "add"
assert set(call.tool_kwargs) == {"a", "b"}, call
print("tool call:", call.tool_name, call.tool_kwargs)
completed = OpenAILike(model="smollm2", api_base=url, api_key=key, is_chat_model=False, max_tokens=4, temperature=0)
text = completed.complete("The capital of France is").text
assert text
print("completion:", text)
