"""The API's own description agrees with what the server does."""

from __future__ import annotations

import html.parser
from typing import Any

import jsonschema
import msgspec
import pytest

from octavo.server import answer_types, openapi
from octavo.server.app import make_routes
from octavo.server.http_metrics import HttpMetrics
from octavo.server.openapi import OPERATIONS, make_openapi
from octavo.server.protocol import ChatRequest, CompletionRequest
from octavo.server.settings import ServerSettings
from tests.server.conftest import Serving
from tests.server.fake_engine import FakeEngine
from tests.server.sse import read_events

pytestmark = pytest.mark.anyio

DOCUMENT = make_openapi(ServerSettings(), "9.9.9")
HI = [{"role": "user", "content": "hi"}]


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**DOCUMENT, "$ref": f"#/components/schemas/{name}"})


async def test_every_route_is_described() -> None:
    routes = make_routes(FakeEngine(), ServerSettings(), "9.9.9", HttpMetrics())
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {(method, path) for method, path, _ in routes}


async def test_every_request_field_is_described() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for kind in (ChatRequest, CompletionRequest):
        properties = schemas[kind.__name__]["properties"]
        assert set(kind.__struct_fields__) <= set(properties)
        undescribed = [name for name in kind.__struct_fields__ if len(properties[name]) == 0]
        assert undescribed == []


async def test_every_reference_leads_somewhere() -> None:
    def check(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                assert node["$ref"].rpartition("/")[2] in DOCUMENT["components"]["schemas"]
            for value in node.values():
                check(value)
        elif isinstance(node, list):
            for value in node:
                check(value)

    check(DOCUMENT)
    for name in DOCUMENT["components"]["schemas"]:
        jsonschema.Draft202012Validator.check_schema(DOCUMENT["components"]["schemas"][name])


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.method == "POST"], ids=lambda one: one.path)
async def test_the_examples_are_right_and_get_such_answers(serving: Serving, operation: openapi.Operation) -> None:
    assert operation.request is not None
    validator(operation.request.__name__).validate(operation.request_example)
    validator(operation.answer.__name__).validate(operation.answer_example)  # type: ignore[union-attr]
    body = operation.request_example
    if operation.path == "/detokenize":
        body = {"tokens": [97, 98]}  # the example's tokens are beyond the test's vocabulary
    async with serving(FakeEngine()) as client:
        answer = await client.post(operation.path, json=body)
    assert answer.status_code == 200, answer.text
    validator(operation.answer.__name__).validate(answer.json())  # type: ignore[union-attr]


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.method == "GET"], ids=lambda one: one.path)
async def test_what_is_read_is_as_described(serving: Serving, operation: openapi.Operation) -> None:
    async with serving(FakeEngine()) as client:
        answer = await client.get(operation.path.replace("{model}", "fake"))
    assert answer.status_code == 200
    assert answer.headers["content-type"].split(";")[0] == operation.media_type
    if operation.answer is not None and operation.answer is not answer_types.AnyObject:
        validator(operation.answer.__name__).validate(answer.json())
        validator(operation.answer.__name__).validate(operation.answer_example)


@pytest.mark.parametrize(
    ("path", "body", "chunk"),
    [
        (
            "/v1/chat/completions",
            {"messages": HI, "logprobs": True, "top_logprobs": 1},
            answer_types.ChatCompletionChunk,
        ),
        ("/v1/completions", {"prompt": "x", "logprobs": 1}, answer_types.Completion),
    ],
)
async def test_answers_with_everything_have_the_described_shape(
    serving: Serving, path: str, body: dict[str, Any], chunk: type
) -> None:
    body |= {"n": 2, "stop": ["zz"]}
    async with serving(FakeEngine()) as client:
        whole = await client.post(path, json=body)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await client.post(path, json={**body, **options})
        refused = await client.post(path, json={**body, "temperature": 9})
    name = next(one.answer.__name__ for one in OPERATIONS if one.path == path)  # type: ignore[union-attr]
    validator(name).validate(whole.json())
    msgspec.convert(whole.json(), getattr(answer_types, name))
    for event in read_events(streamed):
        validator(chunk.__name__).validate(event)
    validator("Error").validate(refused.json())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "x", "user": "me"}, 200),
        ({"prompt": "x", "best_of": 1}, 200),
        ({"prompt": "x", "seed": None}, 200),
        ({"prompt": "x", "temperature": 3}, 400),
        ({"prompt": "x", "colour": "red"}, 400),
        ({"prompt": 5}, 400),
        ({}, 400),
    ],
)
async def test_the_schema_accepts_what_the_server_accepts(serving: Serving, body: dict[str, Any], status: int) -> None:
    async with serving(FakeEngine()) as client:
        assert (await client.post("/v1/completions", json=body)).status_code == status
    assert validator("CompletionRequest").is_valid(body) is (status == 200)


async def test_keys_are_part_of_the_description() -> None:
    document = make_openapi(ServerSettings(api_keys=("secret",), root_path="/llm"), "9.9.9")
    assert document["security"] == [{"key": []}]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "secret" not in msgspec.json.encode(document).decode()
    assert "security" not in DOCUMENT


class _Page(html.parser.HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        if href := values.get("href"):
            self.links.append(href)
        if anchor := values.get("id"):
            self.ids.add(anchor)


async def test_the_page_shows_every_route_and_fetches_nothing(serving: Serving) -> None:
    async with serving(FakeEngine()) as client:
        answer = await client.get("/docs")
    page = _Page(answer.text)
    for operation in OPERATIONS:
        assert f"<code>{operation.path}</code>" in answer.text
        assert operation.name in page.ids
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    assert all(link == "openapi.json" or link[1:] in page.ids for link in page.links)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
