"""Which of a request's fields constrains the text, as a grammar and the field's name for errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from octavo.core.interfaces import GrammarSpec
from octavo.errors import InvalidRequestError
from octavo.server.sampling_fields import SamplingFields
from octavo.structured.json_text import read_json
from octavo.structured.request import (
    GUIDED_FIELDS,
    spec_from_guided,
    spec_from_response_format,
    spec_from_schema,
    spec_from_structured_outputs,
)


@dataclass(frozen=True, slots=True)
class Constraint:
    """param: the field whose text was wrong, if the grammar cannot be compiled"""

    spec: GrammarSpec
    param: str


def find_constraint(request: SamplingFields) -> Constraint | None:
    """The one constraint that the request asks for. Raises InvalidRequestError, also when there are two."""
    found = {
        "response_format": spec_from_response_format(request.response_format),
        "structured_outputs": spec_from_structured_outputs(request.structured_outputs),
        **{name: spec_from_guided(name, getattr(request, name)) for name in GUIDED_FIELDS},
        "grammar": _spec_from_gbnf(request.grammar),
        "json_schema": _spec_from_bare_schema(request.json_schema),
    }
    asked = {name: spec for name, spec in found.items() if spec is not None}
    if len(asked) > 1:
        _refuse(f"{' and '.join(asked)} each constrain the answer; send one of them.", [*asked][1])
    for name, spec in asked.items():
        return Constraint(spec, _find_param(name, request))
    return None


def _find_param(name: str, request: SamplingFields) -> str:
    """Where the schema, regex or grammar itself stands."""
    if name == "response_format" and request.response_format["type"] == "json_schema":
        return "response_format.json_schema.schema"
    if name == "structured_outputs":
        kinds = ("json", "regex", "choice", "grammar")
        return f"{name}.{next((kind for kind in kinds if request.structured_outputs.get(kind)), 'json_object')}"
    return name


def _spec_from_gbnf(value: Any) -> GrammarSpec | None:
    """llama.cpp's `grammar`. Its GBNF is read by the same door as Lark; "" is none."""
    if value is None or value == "":
        return None
    return spec_from_guided("guided_grammar", value) if isinstance(value, str) else _refuse_type("grammar", "a string")


def _spec_from_bare_schema(value: Any) -> GrammarSpec | None:
    """llama.cpp's `json_schema`: the schema itself; {} is none, as there."""
    if value is None or value == {}:
        return None
    if isinstance(value, str):
        value = read_json(value, "json_schema", "json_schema")
    return spec_from_schema(value, "json_schema")


def _refuse_type(param: str, expected: str) -> NoReturn:
    raise InvalidRequestError(f"{param} must be {expected}.", param=param, code="invalid_type")


def _refuse(message: str, param: str) -> NoReturn:
    raise InvalidRequestError(message, param=param, code="invalid_grammar")
