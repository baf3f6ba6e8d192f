"""The pages say what the code does: links, options, fields, metrics, routes and environment variables exist, and the
tables leave none out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from octavo.cli.arguments import read_options
from octavo.cli.main import app
from octavo.errors import InvalidRequestError
from octavo.foreign_options import FOREIGN_OPTIONS
from octavo.metrics import Metrics
from octavo.server import messages
from octavo.server.fields import LABEL_FIELDS, UNSUPPORTED_FIELDS, is_among
from octavo.server.http_metrics import HttpMetrics
from octavo.server.openapi import make_openapi
from octavo.server.protocol import ChatRequest, CompletionRequest, decode_chat_request, decode_completion_request
from octavo.server.settings import ServerSettings
from octavo.server.tokenize import DetokenizeRequest, TokenizeRequest
from octavo.structured.formats import HINTS, NUMBER_BOUNDS, PATTERNS
from octavo.structured.schema import _READERS, _REFUSED

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(ROOT.glob("docs/**/*.md"))]
COMMAND: Any = typer.main.get_command(app)
ROUTES = make_openapi(ServerSettings(), "0")["paths"]

# Options of other programs that the pages use: curl, pip, pytest, cmake, llama.cpp's tools and the like.
OTHER_OPTIONS = frozenset({"--no-kv-unified"})


def read(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def read_rows(text: str) -> Iterator[list[str]]:
    """The rows of all tables whose first cell is code; cells stripped."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def section(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


# --- links, options, names ------------------------------------------------------------------------------------------


def make_anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", without_code(path.read_text(encoding="utf-8")), re.MULTILINE)
            assert anchor in map(make_anchor, headings), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_output_is_missing(page: Path) -> None:
    assert not re.search(r"^```\w*\n```$", page.read_text(encoding="utf-8"), re.MULTILINE), "run docs/print_outputs.py"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
            waiting += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert set(PAGES) - reached == set()


def our_options() -> set[str]:
    commands = [*COMMAND.commands.values(), *COMMAND.commands["bench"].commands.values()]
    return {flag for command in commands for flag in read_options(command.params)} | {"--version", "--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_that_pages_name_exist(page: Path) -> None:
    known = our_options() | OTHER_OPTIONS | {flag for option in FOREIGN_OPTIONS for flag in option.flags}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page.read_text(encoding="utf-8")))
    assert named - known == set(), page.name


def test_environment_variables_that_pages_name_are_read_somewhere() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in [*ROOT.glob("octavo/**/*.py"), *ROOT.glob("docs/*.py")])
    for page in PAGES:
        for name in set(re.findall(r"\bOCTAVO_[A-Z_]+\b", page.read_text(encoding="utf-8"))):
            assert name in code or name in (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"), (page.name, name)


def test_every_option_of_the_http_server_is_on_the_page_about_it() -> None:
    page = read("server.md")
    for parameter in COMMAND.commands["serve"].params:
        if getattr(parameter, "rich_help_panel", None) in ("Server", "Chat", "Access"):
            assert parameter.opts[0] in page or any(option in page for option in parameter.opts), parameter.opts


# --- the tables -----------------------------------------------------------------------------------------------------

FIELD_ROWS = [row for row in read_rows(read("compatibility.md")) if len(row) == 5]
REFUSED_ROWS = list(read_rows(section(read("compatibility.md"), "Refused, each by its name")))


def test_every_field_is_in_the_table_with_its_endpoint() -> None:
    chat, completion = set(ChatRequest.__struct_fields__), set(CompletionRequest.__struct_fields__)
    expected = {
        name: "both" if name in chat & completion else "chat" if name in chat else "completions"
        for name in chat | completion
    }
    assert len(FIELD_ROWS) == len(expected)
    assert {row[0].strip("`"): row[1] for row in FIELD_ROWS} == expected
    assert all(row[4].startswith("accepted") for row in FIELD_ROWS)


def test_every_refused_field_is_in_the_table_with_what_is_let_through() -> None:
    for name, _, _, octavo in REFUSED_ROWS:
        accepted = UNSUPPORTED_FIELDS[name.strip("`")].accepted
        assert octavo.startswith("refused"), name
        shown = octavo.partition("unless ")[2]
        values = [json.loads(value) for value in shown.split(" or ")] if shown else []
        assert all(is_among(value, accepted) for value in values), name
        assert all(is_among(value, tuple(values)) for value in accepted), name
    # In chats; it is accepted in completions and stands in their row.
    assert {row[0].strip("`") for row in REFUSED_ROWS} == set(UNSUPPORTED_FIELDS) - {"echo"}


def test_every_label_is_in_the_table() -> None:
    rows = read_rows(section(read("compatibility.md"), "The sender's own words"))
    assert [row[0].strip("`") for row in rows] == list(LABEL_FIELDS)


def test_every_field_of_a_message_is_in_the_table() -> None:
    rows = read_rows(section(read("compatibility.md"), "In a message"))
    assert {row[0].strip("`") for row in rows} == set(messages._FIELDS)


def decode(row: list[str], **fields: object) -> None:
    if row[1] == "completions":
        request: Any = decode_completion_request(json.dumps({"prompt": "x", **fields}).encode())
    else:
        chat = {"messages": [{"role": "user", "content": "x"}], **fields}
        request = decode_chat_request(json.dumps(chat).encode())
    assert request.sampling_params


BOUNDED_ROWS = [row for row in FIELD_ROWS if re.search(r"^accepted, -?[\d.]+ to ", row[4])]


@pytest.mark.parametrize("row", BOUNDED_ROWS, ids=lambda row: row[0])
def test_the_bounds_in_the_table_are_those_of_the_code(row: list[str]) -> None:
    name = row[0].strip("`")
    match = re.search(r"^accepted, (-?[\d.]+) to (-?[\d.]+)", row[4])
    assert match
    low, high = (json.loads(number) for number in match.groups())
    more: dict[str, Any] = {"logprobs": True} if name == "top_logprobs" else {}
    wrap = (lambda value: {"5": value}) if name == "logit_bias" else (lambda value: value)
    for value in (low, high):
        decode(row, **{name: wrap(value)}, **more)
    for value in (low - 1, high + 1):
        with pytest.raises(InvalidRequestError) as caught:
            decode(row, **{name: wrap(value)}, **more)
        assert str(caught.value.param).startswith(name)


def test_the_bounds_are_found() -> None:
    assert len(BOUNDED_ROWS) >= 9


def test_every_route_is_in_the_table_and_on_a_page() -> None:
    rows = list(read_rows(section(read("compatibility.md"), "Endpoints")))
    listed = {row[0].strip("`"): row[3] for row in rows}
    assert set(listed) == {f"{method.upper()} {path}" for path, methods in ROUTES.items() for method in methods}
    for route, cell in listed.items():
        link = re.search(r"\((endpoints/[\w-]+\.md)\)", cell)
        assert link is not None, route
        assert route.split()[1].partition("{")[0] in read(link[1]), route


@pytest.mark.parametrize("kind", [TokenizeRequest, DetokenizeRequest])
def test_every_field_of_tokenizing_is_on_its_page(kind: Any) -> None:
    for name in kind.__struct_fields__:
        assert f"`{name}`" in read("endpoints/tokenize.md"), name


def test_every_metric_is_in_the_table_with_its_kind() -> None:
    metrics, http = Metrics("m", 100), HttpMetrics()
    metrics.push_cache_config({"block_size": "16"})
    http.push_request("/health", "GET", 200, 0.1)
    text = (metrics.render() + http.render()).decode()
    printed = dict(re.findall(r"^# TYPE (?:octavo:)?(\S+) (\w+)$", text, re.MULTILINE))
    rows = read_rows(section(read("server.md"), "Metrics"))
    assert {row[0].strip("`"): row[1] for row in rows} == printed


def test_every_error_status_is_in_the_table() -> None:
    named = {row.split("|")[1].strip() for row in read("endpoints/errors.md").splitlines() if re.match(r"\| \d", row)}
    described = {
        status
        for methods in ROUTES.values()
        for operation in methods.values()
        for status in operation["responses"]
        if int(status) >= 400
    }
    assert described - named == set()


def test_the_keywords_of_schemas_are_those_of_the_code() -> None:
    page = read("structured-outputs.md")

    def listed(after: str) -> set[str]:
        return set(re.findall(r"`([^`]+)`", page.partition(after)[2].partition("\n- ")[0].partition("\n\n")[0]))

    assert listed("- **Enforced**:") == set(_READERS)
    assert listed("- **Refused**:") == set(_REFUSED)
    assert listed("- **Formats enforced**:") == {*PATTERNS, *NUMBER_BOUNDS, *HINTS}
