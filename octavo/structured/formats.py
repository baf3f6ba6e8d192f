"""The JSON-schema formats that are enforced, each as the pattern that stands for it.

Stricter than the standard where a pattern cannot be exact: every text that a pattern allows is valid. So no 29th of
February, no leap seconds, no year 0.
"""

from __future__ import annotations

_YEAR = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DATE = _YEAR + (
    r"-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DURATION_TIME = r"T([0-9]{1,6}H([0-9]{1,6}M([0-9]{1,6}S)?)?|[0-9]{1,6}M([0-9]{1,6}S)?|[0-9]{1,6}S)"
_DURATION_DATE = r"([0-9]{1,6}Y([0-9]{1,6}M([0-9]{1,6}D)?)?|[0-9]{1,6}M([0-9]{1,6}D)?|[0-9]{1,6}D)"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
_GROUP = r"[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [rf"({_GROUP}:){{7}}{_GROUP}"]
    # "::" stands for two groups or more, so at most six are written.
    + [
        rf"({_GROUP}(:{_GROUP}){{{before - 1}}})?::({_GROUP}(:{_GROUP}){{0,{5 - before}}})?"
        if before
        else rf"::({_GROUP}(:{_GROUP}){{0,5}})?"
        for before in range(6)
    ]
    + [rf"{_GROUP}(:{_GROUP}){{5}}::"]
)
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
# Four labels of 63 and their dots stay below the 253 characters of a host name; the last is no number.
_HOSTNAME = rf"({_LABEL}\.){{0,2}}[a-zA-Z]([a-zA-Z0-9-]{{0,61}}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_URI_CHARACTER = r"([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": rf"P({_DURATION_DATE}({_DURATION_TIME})?|{_DURATION_TIME}|[0-9]{{1,6}}W)",
    "email": rf"{_ATOM}(\.{_ATOM}){{0,2}}@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]{{1,20}}:(//{_HOSTNAME}(:[0-9]{{1,4}})?(/{_URI_CHARACTER}*)*|{_URI_CHARACTER}+)"
    rf"(\?({_URI_CHARACTER}|[/?])*)?(#({_URI_CHARACTER}|[/?])*)?",
    "byte": r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
}

# OpenAPI's hints on what a string is for, which restrict nothing.
HINTS = frozenset({"password", "path", "file-path", "directory-path", "textarea", "markdown", "html"})

# OpenAPI's number formats: inclusive bounds, or None where the type restricts nothing.
NUMBER_BOUNDS: dict[str, tuple[int, int] | None] = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": None,
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**53 - 1),
    "float": None,
    "double": None,
}
