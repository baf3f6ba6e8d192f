"""Reading JSON that a stranger wrote: no NaN, no nesting that exhausts the stack."""

from __future__ import annotations

import json
from typing import Any

from octavo.errors import InvalidRequestError

# How deep schemas and the values in them may nest. The compiler descends on the C stack.
MAX_DEPTH = 64


def read_json(text: str, what: str, param: str) -> Any:
    """Raises InvalidRequestError for what is no JSON. what: the thing's name in the message"""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _invalid(f"{what} nests deeper than {MAX_DEPTH} levels.", param) from None
    except ValueError as error:
        raise _invalid(f"{what} is not JSON: {error}.", param) from error


def write_json(value: Any, what: str, param: str) -> str:
    """Raises InvalidRequestError for what JSON cannot hold."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise _invalid(f"{what} nests deeper than {MAX_DEPTH} levels.", param) from None
    except (TypeError, ValueError) as error:
        raise _invalid(f"{what} cannot be written as JSON: {error}.", param) from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _invalid(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="invalid_grammar")
