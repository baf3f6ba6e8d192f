"""What users of other servers type, made into what our parser takes. Pure functions over the list of arguments.

--max_model_len 512              ->  --max-model-len 512
--served-model-name a b          ->  --served-model-name a --served-model-name b
--config FILE                    ->  the file's settings, before whatever was typed

What no parser of ours would take is refused here, all of it at once, with what it is called or why it is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.foreign_options import FOREIGN_COMMANDS, describe_unknown_option, find_foreign_option


@dataclass(frozen=True, slots=True)
class Option:
    """takes_value: the next argument is its value. is_list: it may be given several times."""

    flag: str
    negative_flag: str | None
    takes_value: bool
    is_list: bool


def prepare_arguments(command: Any, arguments: Sequence[str], name: str = "octavo") -> list[str]:
    """command: typer's group, which may hold groups. Only what follows a known command's name is changed.

    name: as it was called. Raises ConfigError.
    """
    for position, argument in enumerate(arguments):
        if not argument.startswith("-"):
            name = f"{name} {argument}"
            if argument not in command.commands:
                _refuse_command(name, argument)
                break
            if hasattr(command.commands[argument], "commands"):
                rest = prepare_arguments(command.commands[argument], arguments[position + 1 :], name)
                return [*arguments[: position + 1], *rest]
            options = read_options(command.commands[argument].params)
            rest = normalize(arguments[position + 1 :], options)
            refuse_unknown_options(rest, options, name)
            if any(option.flag == "--config" for option in options.values()):
                rest = apply_config_file(rest, options)
            return [*arguments[: position + 1], *rest]
    return list(arguments)


def read_options(parameters: Iterable[Any]) -> dict[str, Option]:
    """Every spelling of a flag, to its option; an option's own name is a long one."""
    options: dict[str, Option] = {}
    for parameter in parameters:
        flags = sorted((flag for flag in parameter.opts if flag.startswith("-")), key=lambda flag: flag[:2] != "--")
        if not flags:
            continue
        negative = next((flag for flag in parameter.secondary_opts if flag.startswith("--")), None)
        is_flag = bool(getattr(parameter, "is_flag", False))
        option = Option(flags[0], negative, not is_flag, bool(getattr(parameter, "multiple", False)))
        for flag in (*flags, *([negative] if negative else [])):
            options[flag] = option
    options["--help"] = Option("--help", None, False, False)
    return options


def normalize(arguments: Sequence[str], options: dict[str, Option]) -> list[str]:
    """Dashes for underscores in flags, and one flag for each value of a list."""
    result: list[str] = []
    has_positional = False
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if argument == "--":
            return [*result, "--", *arguments[position:]]
        if not argument.startswith("-"):
            has_positional = True
            result.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        dashed = flag.replace("_", "-")
        if dashed not in options:
            result.append(argument)
            continue
        result.append(dashed + equals + value)
        option = options[dashed]
        if not option.takes_value or equals or position >= len(arguments):
            continue
        result.append(arguments[position])
        position += 1
        # `serve MODEL --served-model-name a b` has two names; in `serve --served-model-name a MODEL` the second word
        # must be the model, or a typed model would silently become a name.
        while option.is_list and has_positional and position < len(arguments) and arguments[position][:1] != "-":
            result += [dashed, arguments[position]]
            position += 1
    return result


def refuse_unknown_options(arguments: Sequence[str], options: dict[str, Option], name: str) -> None:
    """Raises ConfigError, for all of them at once: a command line from another server has several."""
    unknown: list[tuple[str, str | None]] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if argument == "--":
            break
        if len(argument) < 2 or argument[0] != "-":
            continue
        flag, equals, typed = argument.partition("=")
        if flag in options:
            position += options[flag].takes_value and not equals
        elif argument[:2] == "--" or argument[:2] not in options:  # -qint8 is -q int8
            # Whether it takes a value is not known; a model's name after it is not told from one, but does no harm.
            has_value = not equals and position < len(arguments) and arguments[position][:1] != "-"
            unknown.append((flag, arguments[position] if has_value else typed if equals else None))
            position += has_value
    if not unknown:
        return
    page = f"`{name} --help` lists all options."
    sentences = []
    for flag, value in unknown:
        foreign = find_foreign_option(flag)
        ours = options.get(foreign.ours) if foreign is not None and foreign.ours is not None else None
        remark = describe_unknown_option(flag, value if ours is None or ours.takes_value else None, options)
        end = "" if remark.endswith("?") else "."
        sentences.append(f"There is no option {flag}" + (f": {remark}{end}" if remark else "."))
    message = f"{sentences[0]} {page}"
    if len(sentences) > 1:
        message = f"{len(sentences)} options are not known here; {page}\n  " + "\n  ".join(sentences)
    raise ConfigError(message, option=unknown[0][0])


def _refuse_command(name: str, word: str) -> None:
    """Raises ConfigError for another program's command; others are left to the parser."""
    if word in FOREIGN_COMMANDS:
        raise ConfigError(f"There is no `{name}`: {FOREIGN_COMMANDS[word]}. `octavo --help` lists the commands.")


def apply_config_file(arguments: Sequence[str], options: dict[str, Option]) -> list[str]:
    """Put the settings of --config FILE before the arguments; what was typed wins, lists are not mixed."""
    typed: dict[str, list[str]] = {}
    has_positional = False
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        flag, equals, value = argument.partition("=")
        if flag in options:
            if options[flag].takes_value and not equals and position < len(arguments):
                value = arguments[position]
                position += 1
            typed.setdefault(options[flag].flag, []).append(value)
        elif argument[:1] != "-":
            has_positional = True
    if "--config" not in typed:
        return list(arguments)
    from octavo.cli.config_file import read_config_file  # PyYAML takes its time, and few use it

    from_file: list[str] = []
    for option, values in read_config_file(Path(typed["--config"][-1]), options.values()):
        is_typed = option.flag in typed or (option.flag == "--model" and has_positional)
        if not is_typed:
            from_file += values
    return [*from_file, *arguments]
