"""litellm: a chat, a stream, a tool call. Run with the server's /v1 address and its key."""

# ruff: noqa: T201, PT017

import json
import sys

import litellm

litellm.suppress_debug_info = True

url, key = sys.argv[1:]
where = {"model": "openai/smollm2", "api_base": url, "api_key": key, "num_retries": 0}
options = {**where, "temperature": 0, "max_tokens": 40, "messages": [{"role": "user", "content": "Capital of Italy?"}]}
tools = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]

answer = litellm.completion(**options)
text = answer.choices[0].message.content
assert text, answer
assert answer.usage.completion_tokens > 0
print("chat:", text)
chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert streamed == text, (streamed, text)
print("stream:", streamed)
options |= {"messages": [{"role": "user", "content": "Add 1 and 2."}], "max_tokens": 100, "tools": tools}
options["tool_choice"] = {"type": "function", "function": {"name": "add"}}
call = litellm.completion(**options).choices[0].message.tool_calls[0]
assert set(json.loads(call.function.arguments)) >= {"a", "b"}, call
print("tool call:", call.function.name, call.function.arguments)
chunks = list(litellm.completion(**options, stream=True))
rebuilt = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
assert rebuilt.function.arguments == call.function.arguments, rebuilt
completion = litellm.text_completion(
    **{**where, "model": "text-completion-openai/smollm2"}, prompt="The capital of France is", max_tokens=4
)
assert completion.choices[0].text
print("completion:", completion.choices[0].text)
try:
    litellm.completion(**{**options, "temperature": 3})
except litellm.BadRequestError as error:
    assert "temperature" in str(error)
else:
    raise AssertionError("a temperature of 3 was taken")
