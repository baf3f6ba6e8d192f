"""Numbers as people write them: 8k, 2G, 512MiB, 16_384."""

from __future__ import annotations

import re

from octavo.errors import ConfigError

# As in vLLM: a small letter counts in thousands, a capital one in 1024s; with "iB" it is 1024s either way.
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_QUANTITY = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<unit>[kmgtKMGT])(?P<binary>iB|ib|i)?)?[bB]?")


def parse_quantity(option: str, text: str | None) -> int | None:
    """Raises ConfigError."""
    if text is None:
        return None
    match = _QUANTITY.fullmatch(text.strip().replace("_", ""))
    if match is None:
        raise ConfigError(f"{option} is {text!r}, but it must be a number such as 4096, 8k or 2GiB.", option=option)
    number, unit = match["number"], match["unit"]
    if unit is None:
        factor = 1
    elif match["binary"] or unit.isupper():
        factor = _BINARY[unit.lower()]
    else:
        factor = _DECIMAL[unit]
    value = float(number) * factor if "." in number else int(number) * factor
    if value != int(value):
        raise ConfigError(f"{option} is {text!r}, which is not a whole number.", option=option)
    return int(value)
