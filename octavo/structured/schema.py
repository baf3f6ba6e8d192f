"""Reads a JSON schema (draft 2020-12) and writes it anew with only what the compiler enforces exactly.

The compiler of llguidance lets keywords through that it does not know, takes a schema's own word for its options and
may run for ever on a hostile number. So nothing reaches it that was not understood here: every keyword is enforced, an
annotation, or refused by name and path.

Known departures, all of them stricter than the standard, so that what is generated is valid: properties come in the
schema's order, formats are enforced (see `formats`), and what stands beside a $ref holds as well.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, NoReturn

from octavo.errors import InvalidRequestError
from octavo.structured.formats import HINTS, NUMBER_BOUNDS, PATTERNS
from octavo.structured.json_text import MAX_DEPTH

# The limits keep compiling and each step's mask within some ten milliseconds.
MAX_SCHEMAS = 3000  # schemas within the schema
MAX_PROPERTIES = 500  # of one object
MAX_ENUM_VALUES = 4000  # in all enums together
MAX_REFERENCES = 200  # different targets of $ref
MAX_PATTERN_LENGTH = 2000
MAX_COUNT = 100_000  # minLength, maxItems and the like
MAX_MULTIPLE_DIGITS = 4  # of multipleOf, before the point and after it
MAX_MULTIPLE = 4096  # of multipleOf without its point; the automaton has a state for every remainder
MAX_EXACT_INTEGER = 2**53 - 1

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

ANNOTATIONS = frozenset(
    {
        "$schema", "$id", "id", "$comment", "$anchor", "$vocabulary", "title", "description", "default", "example",
        "examples", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema",
        "discriminator", "externalDocs", "xml",
    }
)  # fmt: skip

# What to do instead, for keywords that are refused.
_REFUSED = {
    "not": "", "if": "", "then": "", "else": "", "contains": "", "minContains": "", "maxContains": "",
    "uniqueItems": "", "propertyNames": "use patternProperties with additionalProperties false",
    "dependentRequired": "use anyOf", "dependentSchemas": "use anyOf", "dependencies": "use anyOf",
    "unevaluatedProperties": "use additionalProperties", "unevaluatedItems": "use items",
    "$dynamicRef": "use $ref", "$dynamicAnchor": "use $defs", "$recursiveRef": "use $ref",
    "$recursiveAnchor": "use $defs",
}  # fmt: skip


def normalize_schema(schema: Any, param: str, *, is_lenient: bool = False) -> dict[str, Any]:
    """The schema with enforced keywords only. Raises InvalidRequestError(code="invalid_grammar").

    is_lenient: keywords and formats that cannot be enforced are left out, not refused: the text follows the rest
    """
    reader = _SchemaReader(param, is_lenient)
    found = reader.read(schema, "#", 0)
    reader.check_references(schema)
    # The compiler wants an object at the top.
    return found if isinstance(found, dict) else ({} if found else {"enum": []})


class _SchemaReader:
    def __init__(self, param: str, is_lenient: bool):
        self._param = param
        self._is_lenient = is_lenient
        self._num_schemas = 0
        self._num_enum_values = 0
        self._references: dict[str, str] = {}  # target to the first place that names it
        self._multiples: set[Any] = set()
        self._schema_paths: set[str] = set()

    def read(self, schema: Any, path: str, depth: int) -> Any:
        if isinstance(schema, bool):
            self._schema_paths.add(path)
            return schema
        if not isinstance(schema, dict):
            self._refuse(path, f"a schema is an object, true or false, but here is {_describe(schema)}")
        if depth > MAX_DEPTH:
            self._refuse(path, f"the schema nests deeper than {MAX_DEPTH} levels")
        self._schema_paths.add(path)
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            self._refuse(path, f"there are more than {MAX_SCHEMAS} schemas within the schema")

        found: dict[str, Any] = {}
        extra: list[dict[str, Any]] = []  # what has to hold beside `found`
        if isinstance(schema.get("items"), list):
            schema = self._modernize_items(schema, path)
        for keyword, value in schema.items():
            read = _READERS.get(keyword)
            if read is not None:
                found[keyword] = read(self, value, f"{path}/{keyword}", depth + 1)
            elif keyword == "format":
                self._read_format(value, f"{path}/format", schema, extra)
            else:
                self._check_unknown(keyword, value, path)
        self._check_counts(found, path)
        self._bound_numbers(found, path)
        self._bound_multiples(found)
        if extra:
            found["allOf"] = [*found.get("allOf", []), *extra]
        return found

    def check_references(self, root: Any) -> None:
        for target, path in self._references.items():
            if target not in self._schema_paths:
                self._refuse(path, f"{target!r} is no schema in this schema; write '#/$defs/name' and define it there")
        if len(self._references) > MAX_REFERENCES:
            self._refuse("#", f"$ref names {len(self._references)} different schemas; the limit is {MAX_REFERENCES}")

    def _modernize_items(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """items as a list, which drafts before 2020-12 had, is prefixItems today, and additionalItems is items."""
        if "prefixItems" in schema:
            self._refuse(f"{path}/items", "a list here and prefixItems exclude each other")
        others = {key: value for key, value in schema.items() if key not in ("items", "additionalItems")}
        rest = {"items": schema["additionalItems"]} if "additionalItems" in schema else {}
        return {**others, "prefixItems": schema["items"], **rest}

    def _check_unknown(self, keyword: str, value: Any, path: str) -> None:
        if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
            return
        if keyword == "additionalItems" or (keyword in ("uniqueItems", "nullable") and value is False):
            return  # says nothing: there is no list of items; uniqueness or null is not asked for
        if self._is_lenient:
            return
        where = f"{path}/{keyword}"
        if keyword == "nullable":
            self._refuse(where, 'the keyword is not supported; write "type": [..., "null"]')
        if keyword in _REFUSED:
            way_out = _REFUSED[keyword]
            self._refuse(where, "the keyword is not supported" + (f"; {way_out}" if way_out else ""))
        near = difflib.get_close_matches(keyword, [*_READERS, "format", *ANNOTATIONS], n=1)
        self._refuse(where, "the keyword is not known" + (f"; did you mean {near[0]!r}?" if near else ""))

    # Readers of keywords: (value, path, depth) to what the compiler gets.

    def _read_map(self, value: Any, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._refuse(path, f"it must be an object of schemas, not {_describe(value)}")
        if len(value) > MAX_PROPERTIES:
            self._refuse(path, f"it has {len(value)} entries; the limit is {MAX_PROPERTIES}")
        return {name: self.read(schema, f"{path}/{_escape(name)}", depth) for name, schema in value.items()}

    def _read_pattern_map(self, value: Any, path: str, depth: int) -> dict[str, Any]:
        found = self._read_map(value, path, depth)
        for pattern in found:
            self._read_pattern(pattern, f"{path}/{_escape(pattern)}", depth)
        return found

    def _read_list(self, value: Any, path: str, depth: int) -> list[Any]:
        if not isinstance(value, list) or not value:
            self._refuse(path, f"it must be a list of schemas that is not empty, not {_describe(value)}")
        return [self.read(schema, f"{path}/{index}", depth) for index, schema in enumerate(value)]

    def _read_prefix_items(self, value: Any, path: str, depth: int) -> list[Any]:
        return self._read_list(value, path, depth) if value != [] else []

    def _read_reference(self, value: Any, path: str, depth: int) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            self._refuse(path, f"{value!r} is not supported; a reference is '#' or begins with '#/'")
        self._references.setdefault(value, path)
        return value

    def _read_type(self, value: Any, path: str, depth: int) -> Any:
        types = value if isinstance(value, list) else [value]
        for name in types:
            if not isinstance(name, str) or name not in TYPES:
                self._refuse(path, f"{name!r} is no type; types are {', '.join(sorted(TYPES))}")
        if not types:
            self._refuse(path, "the list of types is empty")
        return value

    def _read_enum(self, value: Any, path: str, depth: int) -> list[Any]:
        if not isinstance(value, list) or not value:
            self._refuse(path, f"it must be a list that is not empty, not {_describe(value)}")
        self._num_enum_values += len(value)
        if self._num_enum_values > MAX_ENUM_VALUES:
            self._refuse(path, f"there are more than {MAX_ENUM_VALUES} enum values in the schema")
        for index, entry in enumerate(value):
            self._check_value(entry, f"{path}/{index}", depth)
        return value

    def _read_const(self, value: Any, path: str, depth: int) -> Any:
        self._check_value(value, path, depth)
        return value

    def _read_required(self, value: Any, path: str, depth: int) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._refuse(path, f"it must be a list of names, not {_describe(value)}")
        if len(value) > MAX_PROPERTIES:
            self._refuse(path, f"it has {len(value)} names; the limit is {MAX_PROPERTIES}")
        return list(dict.fromkeys(value))

    def _read_count(self, value: Any, path: str, depth: int) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self._refuse(path, f"{value!r} is no count; it must be an integer of at least 0")
        if value > MAX_COUNT:
            self._refuse(path, f"it is {value}; the limit is {MAX_COUNT}")
        return value

    def _read_number(self, value: Any, path: str, depth: int) -> int | float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self._refuse(path, f"it must be a number, not {_describe(value)}")
        if not math.isfinite(value):
            self._refuse(path, "the number is too large")
        return value

    def _read_multiple(self, value: Any, path: str, depth: int) -> int | float:
        value = self._read_number(value, path, depth)
        # As many digits as the compiler's arithmetic takes, whatever is multiplied; it would not end on 1e-300.
        digits = Decimal(repr(value)).normalize().as_tuple()
        exponent = int(digits.exponent)
        if value <= 0:
            self._refuse(path, f"it is {value}; it must be above 0")
        coefficient = int("".join(map(str, digits.digits)))
        if max(len(digits.digits) + max(exponent, 0), -exponent) > MAX_MULTIPLE_DIGITS or coefficient > MAX_MULTIPLE:
            self._refuse(
                path, f"it is {value}; supported are {MAX_MULTIPLE_DIGITS} digits that make at most {MAX_MULTIPLE}"
            )
        self._multiples.add(value)
        if len(self._multiples) > 1 and any(left % right for left in self._multiples for right in self._multiples):
            # Where two meet in one number, the compiler multiplies them in 32 bits.
            self._check_multiples(path)
        return value

    def _check_multiples(self, path: str) -> None:
        product = math.prod(int(Decimal(repr(value)).scaleb(MAX_MULTIPLE_DIGITS)) for value in self._multiples)
        if product >= 2**32:
            self._refuse(path, f"the multiples {sorted(self._multiples)} are too many different ones for one schema")

    def _read_pattern(self, value: Any, path: str, depth: int) -> str:
        if not isinstance(value, str):
            self._refuse(path, f"it must be a string, not {_describe(value)}")
        if len(value) > MAX_PATTERN_LENGTH:
            self._refuse(path, f"the pattern has {len(value)} characters; the limit is {MAX_PATTERN_LENGTH}")
        return value

    def _read_format(self, value: Any, path: str, schema: Mapping[str, Any], extra: list[dict[str, Any]]) -> None:
        if not isinstance(value, str):
            self._refuse(path, f"it must be a string, not {_describe(value)}")
        if value in PATTERNS:
            extra.append({"anyOf": [{"type": "string", "pattern": f"^({PATTERNS[value]})$"}, _NO_STRING]})
            if schema.get("type") == "string":
                extra[-1] = {"pattern": f"^({PATTERNS[value]})$"}
        elif value in NUMBER_BOUNDS:
            bounds = NUMBER_BOUNDS[value]
            if bounds is not None and schema.get("type") in ("integer", "number"):
                extra.append({"minimum": bounds[0], "maximum": bounds[1]})
        elif value not in HINTS and not self._is_lenient:
            known = ", ".join(sorted(PATTERNS))
            self._refuse(
                path, f"the format {value!r} is not supported; enforced are {known}; a pattern can take its place"
            )

    # Checks of a whole schema.

    def _check_value(self, value: Any, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            self._refuse(path, f"the value nests deeper than {MAX_DEPTH} levels")
        if isinstance(value, float) and not math.isfinite(value):
            self._refuse(path, "the number is too large")
        if isinstance(value, int) and abs(value) > MAX_EXACT_INTEGER:
            # The compiler reads numbers as doubles and would write another one.
            self._refuse(path, f"{value} is beyond the exact integers; the limit is {MAX_EXACT_INTEGER}")
        if isinstance(value, list):
            for index, entry in enumerate(value):
                self._check_value(entry, f"{path}/{index}", depth + 1)
        elif isinstance(value, dict):
            for name, entry in value.items():
                self._check_value(entry, f"{path}/{_escape(name)}", depth + 1)

    def _check_counts(self, found: dict[str, Any], path: str) -> None:
        num_required = len(found.get("required", ()))
        if found.get("minProperties", 0) > num_required + 1:
            # The grammar cannot tell that two free names differ, and a name that comes twice counts once.
            self._refuse(
                f"{path}/minProperties",
                f"it is {found['minProperties']}, but only {num_required} properties are required; supported is at "
                "most one more than that",
            )

    def _bound_numbers(self, found: dict[str, Any], path: str) -> None:
        """A bound beyond the exact integers becomes the largest of them; the compiler's arithmetic would overflow."""
        for keyword, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
            if keyword in found and abs(found[keyword]) > MAX_EXACT_INTEGER:
                if found[keyword] * sign < 0:
                    self._refuse(
                        f"{path}/{keyword}", f"it is {found[keyword]}; the limit is {-sign * MAX_EXACT_INTEGER}"
                    )
                found[keyword] = sign * MAX_EXACT_INTEGER

    def _bound_multiples(self, found: dict[str, Any]) -> None:
        """A multiple of 997 is met once in a thousand digits: without a bound, a number might not end."""
        if "multipleOf" not in found or found.get("type") not in ("integer", "number"):
            return
        if "minimum" not in found and "exclusiveMinimum" not in found:
            found["minimum"] = -_MAX_MULTIPLE
        if "maximum" not in found and "exclusiveMaximum" not in found:
            found["maximum"] = _MAX_MULTIPLE

    def _refuse(self, path: str, rule: str) -> NoReturn:
        raise InvalidRequestError(
            f"The JSON schema cannot be used: at {path}, {rule}.", param=self._param, code="invalid_grammar"
        )


_MAX_MULTIPLE = 999_999_999
_NO_STRING = {"type": ["null", "boolean", "number", "array", "object"]}

_READERS: dict[str, Callable[[_SchemaReader, Any, str, int], Any]] = {
    "$defs": _SchemaReader._read_map,
    "definitions": _SchemaReader._read_map,
    "properties": _SchemaReader._read_map,
    "patternProperties": _SchemaReader._read_pattern_map,
    "additionalProperties": _SchemaReader.read,
    "items": _SchemaReader.read,
    "prefixItems": _SchemaReader._read_prefix_items,
    "anyOf": _SchemaReader._read_list,
    "oneOf": _SchemaReader._read_list,
    "allOf": _SchemaReader._read_list,
    "$ref": _SchemaReader._read_reference,
    "type": _SchemaReader._read_type,
    "enum": _SchemaReader._read_enum,
    "const": _SchemaReader._read_const,
    "required": _SchemaReader._read_required,
    "minLength": _SchemaReader._read_count,
    "maxLength": _SchemaReader._read_count,
    "minItems": _SchemaReader._read_count,
    "maxItems": _SchemaReader._read_count,
    "minProperties": _SchemaReader._read_count,
    "maxProperties": _SchemaReader._read_count,
    "minimum": _SchemaReader._read_number,
    "maximum": _SchemaReader._read_number,
    "exclusiveMinimum": _SchemaReader._read_number,
    "exclusiveMaximum": _SchemaReader._read_number,
    "multipleOf": _SchemaReader._read_multiple,
    "pattern": _SchemaReader._read_pattern,
}


def _escape(name: str) -> str:
    """A name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _describe(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"the number {value!r}"
    if isinstance(value, str):
        return f"the string {value[:40]!r}"
    return "an empty list" if value == [] else "a list" if isinstance(value, list) else "an object"
