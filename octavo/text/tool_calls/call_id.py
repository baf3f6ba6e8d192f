"""Ids of tool calls, and history's ids in the form that a model's template takes."""

from __future__ import annotations

import hashlib
import re
import secrets
import string

_ALPHABET = string.ascii_letters + string.digits
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


def new_mistral_call_id() -> str:
    """Mistral's templates take nothing but 9 letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def mistral_call_id(call_id: str) -> str:
    """Another server's id as one that Mistral's templates take: always the same one for the same id."""
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest()[:16], "big")
    letters = []
    for _ in range(9):
        number, index = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[index])
    return "".join(letters)
