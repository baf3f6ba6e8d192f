"""The OpenAPI document as a page: plain HTML, nothing fetched, no script."""

from __future__ import annotations

import json
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h2 { margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; font-size: 1.2rem }
code, pre { font: 14px/1.45 ui-monospace, monospace } pre { background: #f5f5f5; padding: .7rem; overflow-x: auto }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top; padding: .25rem .6rem }
tr { border-top: 1px solid #eee } .method { color: #fff; background: #456; padding: .1rem .5rem; border-radius: .3rem }
.required { color: #a30 } summary { cursor: pointer; margin: .5rem 0 }
@media (prefers-color-scheme: dark) {
  body { background: #1b1b1b; color: #ddd } pre { background: #262626 } tr, h2 { border-color: #333 } }
"""


def make_docs_page(document: dict[str, Any]) -> str:
    info = document["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<title>{escape(info['title'])} {escape(info['version'])}</title><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>",
        '<p>For programs: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += _operation(path, method, operation)
    parts.append("<h2>Types</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts += [f"<details id={escape(name)}><summary><code>{escape(name)}</code></summary>", _fields(schema)]
        parts.append("</details>")
    return "\n".join(parts) + "</html>\n"


def _operation(path: str, method: str, operation: dict[str, Any]) -> list[str]:
    parts = [
        f"<h2 id={escape(operation['operationId'])}><span class=method>{escape(method.upper())}</span> "
        f"<code>{escape(path)}</code></h2><p>{escape(operation['summary'])}</p>"
    ]
    if body := operation.get("requestBody"):
        content = body["content"]["application/json"]
        parts += [f"<p>Body: {_type(content['schema'])}</p>", _example(content["example"])]
    for status, answer in operation["responses"].items():
        if status == "200":
            for media_type, content in answer["content"].items():
                note = escape(content["schema"].get("description", ""))
                parts.append(f"<p>200, <code>{escape(media_type)}</code>: {note or _type(content['schema'])}</p>")
                if "example" in content:
                    parts.append(_example(content["example"]))
    errors = [(status, answer) for status, answer in operation["responses"].items() if status != "200"]
    rows = [f"<tr><td>{escape(status)}<td>{escape(answer['description'])}" for status, answer in errors]
    return [*parts, f"<details><summary>Errors</summary><table>{''.join(rows)}</table></details>"]


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = []
    for name, field in schema.get("properties", {}).items():
        mark = " <span class=required>required</span>" if name in required else ""
        default = f" Default {escape(json.dumps(field['default']))}." if field.get("default") is not None else ""
        note = escape(field.get("description", "")) + default
        rows.append(f"<tr><td><code>{escape(name)}</code>{mark}<td>{_type(field)}<td>{note}")
    return f"<p>{escape(schema.get('description', ''))}</p><table>{''.join(rows)}</table>"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array" or (isinstance(kind, list) and "array" in kind):
        return f"list of {_type(schema.get('items', {}))}"
    return escape(" or ".join(kind) if isinstance(kind, list) else kind)


def _example(example: Any) -> str:
    text = example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False)
    return f"<pre>{escape(text)}</pre>"
