"""langchain-openai: a chat, a stream, a tool call, a structured answer. Arguments: the address of /v1 and the key."""

# ruff: noqa: T201

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

url, key = sys.argv[1:]
llm = ChatOpenAI(model="smollm2", base_url=url, api_key=key, temperature=0, max_tokens=100, max_retries=0)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class City(BaseModel):
    name: str = Field(max_length=12)
    population: int = Field(ge=0, le=40_000_000)


question = "What is the capital of Italy?"
answer = llm.invoke(question)
assert answer.content, answer
assert answer.usage_metadata["output_tokens"] > 0
print("chat:", answer.content)
text = "".join(chunk.content for chunk in llm.stream(question))
assert text == answer.content, (text, answer.content)
print("stream:", text)
asked = llm.bind_tools([add], tool_choice="add").invoke("Add 1 and 2.")
[call] = asked.tool_calls
assert call["name"] == "add"
assert set(call["args"]) == {"a", "b"}, call
print("tool call:", call["name"], call["args"])
merged = None
for chunk in llm.bind_tools([add], tool_choice="add").stream("Add 1 and 2."):
    merged = chunk if merged is None else merged + chunk
assert merged.tool_calls[0]["args"] == call["args"], merged
history = [HumanMessage("Add 1 and 2."), asked, ToolMessage("3", tool_call_id=call["id"])]
assert llm.bind_tools([add]).invoke(history) is not None
city = llm.with_structured_output(City, method="json_schema").invoke("Tell me about Rome.")
assert isinstance(city, City), city
print("structured:", city)
