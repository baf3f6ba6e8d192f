"""`--config FILE.yaml`: flag names as keys, with dashes or underscores; a list for a flag that may be repeated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml

from octavo.errors import ConfigError
from octavo.foreign_options import describe_unknown_option, find_foreign_option


class FileOption(Protocol):
    @property
    def flag(self) -> str: ...
    @property
    def negative_flag(self) -> str | None: ...
    @property
    def takes_value(self) -> bool: ...
    @property
    def is_list(self) -> bool: ...


OptionT = TypeVar("OptionT", bound=FileOption)

_NOT_IN_A_FILE = frozenset({"--config", "--help"})


def read_config_file(path: Path, options: Iterable[OptionT]) -> list[tuple[OptionT, list[str]]]:
    """Each setting as (option, its command-line arguments), in the file's order. Raises ConfigError."""
    by_key = {option.flag[2:]: option for option in options if option.flag not in _NOT_IN_A_FILE}
    settings: list[tuple[OptionT, list[str]]] = []
    seen: dict[str, str] = {}
    for key, value in _load(path).items():
        name = str(key).lstrip("-").replace("_", "-")
        is_negative = name.startswith("no-") and name[3:] in by_key
        option = by_key.get(name[3:] if is_negative else name)
        if option is None:
            raise ConfigError(f"{path}: there is no option {key}; {_explain(name, by_key)}", option="--config")
        if option.flag in seen:
            raise ConfigError(
                f"{path}: {seen[option.flag]} and {key} are the same option; keep one.", option="--config"
            )
        seen[option.flag] = str(key)
        if is_negative:
            if not isinstance(value, bool):
                raise ConfigError(f"{path}: {key} must be true or false, but is {value!r}.", option="--config")
            value = not value
        if value is not None:
            settings.append((option, _as_arguments(path, str(key), option, value)))
    return settings


def _load(path: Path) -> dict[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror}.", option="--config") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config: {path} is not a text file in UTF-8.", option="--config") from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        place = f" at line {where.line + 1}" if where is not None else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise ConfigError(f"--config: {path} is not valid YAML{place}: {problem}.", option="--config") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config: {path} must hold settings such as `port: 8000`, but holds a {type(content).__name__}.",
            option="--config",
        )
    return content


def _as_arguments(path: Path, key: str, option: FileOption, value: Any) -> list[str]:
    if not option.takes_value:
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {key} must be true or false, but is {value!r}.", option="--config")
        if value:
            return [option.flag]
        return [option.negative_flag] if option.negative_flag else []
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not option.is_list:
        raise ConfigError(f"{path}: {key} takes one value, but is a list of {len(value)}.", option="--config")
    for item in values:
        if isinstance(item, bool) or not isinstance(item, (str, int, float)):
            raise ConfigError(f"{path}: {key} must be a text or a number, but is {item!r}.", option="--config")
    # Joined with "=", so that a value that begins with a dash stays a value.
    return [f"{option.flag}={item}" for item in values]


def _explain(name: str, by_key: Mapping[str, FileOption]) -> str:
    """What to write in place of a key that is none."""
    foreign = find_foreign_option(f"--{name}")
    ours = by_key.get((foreign.ours or "").lstrip("-")) if foreign is not None else None
    if ours is not None:
        return f"here it is {ours.flag[2:]}."
    remark = describe_unknown_option(f"--{name}", None, {f"--{key}" for key in by_key})
    if not remark:
        return "`octavo serve --help` lists them."
    return remark.replace("--", "") if remark.endswith("?") else f"{remark}."
