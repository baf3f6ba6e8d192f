"""The request's `tools` and `tool_choice`, checked: what is wrong is named as the API spells it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from octavo.errors import InvalidRequestError

MAX_TOOLS = 128  # OpenAI's limit
MAX_SCHEMA_DEPTH = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """parameters: a JSON schema for an object. is_strict: the arguments must follow it."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    is_strict: bool = False

    def as_dict(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """mode: "none", "auto", "required" or "named". tools: those that may be called; one if named, none if "none"."""

    mode: str
    tools: tuple[Tool, ...] = ()

    @property
    def may_call(self) -> bool:
        return bool(self.tools)

    @property
    def must_call(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def tool_names(self) -> list[str]:
        return [tool.name for tool in self.tools]


def check_tools(tools: Any, param: str = "tools") -> tuple[Tool, ...]:
    """None and an empty list are no tools. Raises InvalidRequestError with a param such as `tools[1].function.name`."""
    if tools is None:
        return ()
    if not isinstance(tools, (list, tuple)):
        _refuse(param, f"{param} must be a list of tools.")
    if len(tools) > MAX_TOOLS:
        _refuse(param, f"{param} has {len(tools)} entries; at most {MAX_TOOLS} are taken.")
    checked: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        one = _check_tool(tool, f"{param}[{index}]")
        if one.name in checked:
            path = f"{param}[{index}].function.name"
            _refuse(path, f"{path} is {one.name!r}, a name that an earlier tool has; each needs one of its own.")
        checked[one.name] = one
    return tuple(checked.values())


def check_tool_choice(choice: Any, tools: Sequence[Tool], param: str = "tool_choice") -> ToolChoice:
    """None is "auto" with tools and "none" without."""
    tools = tuple(tools)
    if choice is None:
        choice = "auto" if tools else "none"
    if isinstance(choice, str):
        if choice not in _MODES:
            _refuse(
                param, f"{param} is {choice[:64]!r}, but it must be one of {', '.join(_MODES)}, or name a function."
            )
        if choice == "required" and not tools:
            _refuse(param, f"{param} is 'required', but there are no tools to call.")
        return ToolChoice(choice, () if choice == "none" else tools)
    if not isinstance(choice, Mapping):
        _refuse(param, f"{param} must be one of {', '.join(_MODES)}, or an object that names a function.")
    kind = choice.get("type")
    if kind == "function":
        _check_fields(choice, ("type", "function"), param)
        return ToolChoice("named", (_find_tool(choice.get("function"), tools, f"{param}.function"),))
    if kind == "allowed_tools":
        _check_fields(choice, ("type", "allowed_tools"), param)
        return _check_allowed(choice.get("allowed_tools"), tools, f"{param}.allowed_tools")
    return _refuse(f"{param}.type", f"{param}.type is {_show(kind)}, but it must be 'function' or 'allowed_tools'.")


def check_schema(schema: Any, param: str, depth: int = 0) -> None:
    """Whether this can be a JSON schema at all; what its keywords forbid is not our matter here."""
    if isinstance(schema, bool) and depth:
        return
    if not isinstance(schema, Mapping):
        _refuse(param, f"{param} must be a JSON schema, an object, but it is {_show(schema)}.")
    if depth > MAX_SCHEMA_DEPTH:
        _refuse(param, f"{param} is nested more than {MAX_SCHEMA_DEPTH} levels deep.")
    _check_type_keyword(schema, param)
    for name in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
        if name in schema:
            if not isinstance(schema[name], Mapping):
                _refuse(f"{param}.{name}", f"{param}.{name} must be an object of schemas.")
            for key, part in schema[name].items():
                check_schema(part, f"{param}.{name}.{key}", depth + 1)
    for name in ("additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"):
        if name in schema:
            check_schema(schema[name], f"{param}.{name}", depth + 1)
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if name in schema:
            _check_schemas(schema[name], f"{param}.{name}", depth)
    items = schema.get("items")
    if isinstance(items, (list, tuple)):
        _check_schemas(items, f"{param}.items", depth)
    elif "items" in schema:
        check_schema(items, f"{param}.items", depth + 1)
    required = schema.get("required", [])
    if not isinstance(required, (list, tuple)) or not all(isinstance(name, str) for name in required):
        _refuse(f"{param}.required", f"{param}.required must be a list of property names.")
    if not isinstance(schema.get("enum", []), (list, tuple)):
        _refuse(f"{param}.enum", f"{param}.enum must be a list of values.")
    if not isinstance(schema.get("$ref", ""), str):
        _refuse(f"{param}.$ref", f"{param}.$ref must be a string.")


def _check_tool(tool: Any, path: str) -> Tool:
    if not isinstance(tool, Mapping):
        _refuse(path, f'{path} must be an object such as {{"type": "function", "function": {{"name": "..."}}}}.')
    if tool.get("type", "function") != "function":
        _refuse(f"{path}.type", f"{path}.type is {_show(tool['type'])}, but only functions can be tools here.")
    _check_fields(tool, ("type", "function"), path)
    function = tool.get("function")
    here = f"{path}.function"
    if not isinstance(function, Mapping):
        _refuse(here, f"{here} must be an object with a name.")
    _check_fields(function, ("name", "description", "parameters", "strict"), here)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse(
            f"{here}.name",
            f"{here}.name is {_show(name)}, but it must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -.",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        _refuse(f"{here}.description", f"{here}.description must be a string.")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        _refuse(f"{here}.strict", f"{here}.strict must be true or false.")
    return Tool(name, description, _check_parameters(function.get("parameters"), f"{here}.parameters"), bool(strict))


def _check_parameters(parameters: Any, path: str) -> Mapping[str, Any]:
    if parameters is None:  # OpenAI's rule: no parameters is an empty list of them
        return {"type": "object", "properties": {}, "additionalProperties": False}
    check_schema(parameters, path)
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, (list, tuple)) and "object" in kind):
        _refuse(f"{path}.type", f"{path}.type is {_show(kind)}, but a function's arguments are an 'object'.")
    return {**parameters, "type": "object"}


def _check_type_keyword(schema: Mapping[str, Any], param: str) -> None:
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, (list, tuple)) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            _refuse(
                f"{param}.type", f"{param}.type is {_show(kind)}, but a type is one of {', '.join(sorted(_TYPES))}."
            )


def _check_schemas(schemas: Any, param: str, depth: int) -> None:
    if not isinstance(schemas, (list, tuple)) or not schemas:
        _refuse(param, f"{param} must be a list of at least one schema.")
    for index, part in enumerate(schemas):
        check_schema(part, f"{param}[{index}]", depth + 1)


def _find_tool(function: Any, tools: tuple[Tool, ...], path: str) -> Tool:
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        _refuse(path, f"{path} must be an object with the name of one of the tools.")
    for tool in tools:
        if tool.name == name:
            return tool
    known = ", ".join(tool.name for tool in tools) or "none were sent"
    return _refuse(f"{path}.name", f"{path}.name is {name[:64]!r}, which is none of the tools ({known}).")


def _check_allowed(allowed: Any, tools: tuple[Tool, ...], path: str) -> ToolChoice:
    if not isinstance(allowed, Mapping) or allowed.get("mode") not in ("auto", "required"):
        _refuse(path, f"{path} must be an object with a mode, 'auto' or 'required', and tools.")
    chosen = allowed.get("tools")
    if not isinstance(chosen, (list, tuple)) or not chosen:
        _refuse(f"{path}.tools", f"{path}.tools must be a list of at least one of the tools.")
    found = {
        tool.name: tool
        for index, entry in enumerate(chosen)
        for tool in [
            _find_tool(
                entry.get("function") if isinstance(entry, Mapping) else None, tools, f"{path}.tools[{index}].function"
            )
        ]
    }
    return ToolChoice(allowed["mode"], tuple(found.values()))


def _check_fields(value: Mapping[str, Any], known: Sequence[str], path: str) -> None:
    for name in value:
        if name not in known:
            where = f"{path}.{str(name)[:64]}"
            raise InvalidRequestError(
                f"There is no field {where}; known here: {', '.join(known)}.", param=where, code="unknown_field"
            )


def _show(value: Any) -> str:
    if isinstance(value, (Mapping, list, tuple)):
        return "an object" if isinstance(value, Mapping) else "a list"
    return (
        {None: "missing", True: "true", False: "false"}[value]
        if value is None or value is True or value is False
        else repr(value)[:80]
    )


def _refuse(param: str, sentence: str) -> NoReturn:
    raise InvalidRequestError(sentence, param=param, code="invalid_value")
