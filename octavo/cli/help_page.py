"""`--help`: options in groups, every name in full, explained beside. Plain text, so that it appears at once.

Made from the parser's own parameters; typer's page would cut long option names at 80 columns.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from typing import Any

_MAX_WIDTH = 110
_NAMES_WIDTH = 34
# On a narrower terminal the help is below the names.
_MIN_WIDTH_BESIDE = 60
_NARROW_INDENT = 6
_OTHER_PANEL = "Options"


def wants_help(arguments: Iterable[str]) -> bool:
    for argument in arguments:
        if argument == "--":
            return False
        if argument in ("--help", "-h"):
            return True
    return False


def make_help_page(command: Any, name: str, *, is_terminal: bool, width: int | None = None) -> str:
    """command: typer's command or group. name: as it was called, such as "octavo serve"."""
    page = _Page(min(width or shutil.get_terminal_size().columns, _MAX_WIDTH), is_terminal)
    positionals = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    commands = getattr(command, "commands", {})
    words = ["COMMAND"] if commands else [_metavar(parameter) for parameter in positionals]
    page.usage(" ".join(["Usage:", name, *words, "[OPTIONS]"]))
    page.paragraph(command.help or "")
    if commands:
        page.heading("Commands")
        for command_name, subcommand in commands.items():
            page.entry(command_name, subcommand.help or "")
    if positionals:
        page.heading("Arguments")
        for parameter in positionals:
            page.entry(_metavar(parameter), parameter.help or "")
    for panel, options in _panels(command.params).items():
        page.heading(panel)
        for option in options:
            page.entry(_option_names(option), _option_help(option))
    if commands:
        page.paragraph(f"`{name} COMMAND --help` explains a command's options.")
    return page.text


class _Page:
    def __init__(self, width: int, is_terminal: bool):
        self._width = width
        self._is_terminal = is_terminal
        self.text = ""

    def line(self, line: str) -> None:
        self.text += line + "\n"

    def usage(self, text: str) -> None:
        self.line(textwrap.fill(text, self._width, subsequent_indent="  "))

    def paragraph(self, text: str) -> None:
        self.text += "\n" + textwrap.fill(text, self._width) + "\n"

    def heading(self, title: str) -> None:
        rule = f"── {title} " + "─" * max(self._width - len(title) - 4, 0)
        self.text += "\n" + (f"\x1b[1m{rule}\x1b[0m" if self._is_terminal else rule) + "\n"

    def entry(self, names: str, help_text: str) -> None:
        """The help beside the names, or below them when they are long."""
        is_narrow = self._width < _MIN_WIDTH_BESIDE
        indent = " " * (_NARROW_INDENT if is_narrow else _NAMES_WIDTH)
        lines = textwrap.wrap(help_text, max(self._width - len(indent), 20)) or [""]
        first = f"  {names}"
        if is_narrow or len(first) >= _NAMES_WIDTH - 1:
            for line in textwrap.wrap(names, max(self._width - 2, 20)):
                self.line(f"  {line}")
        else:
            self.line(f"{first:<{_NAMES_WIDTH}}{lines.pop(0)}".rstrip())
        for line in lines:
            self.line(indent + line)


def _panels(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    """Options by panel, in the order of definition; those without a panel come last."""
    panels: dict[str, list[Any]] = {}
    for parameter in parameters:
        if parameter.param_type_name == "option" and not parameter.hidden:
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or _OTHER_PANEL, []).append(parameter)
    if _OTHER_PANEL in panels:
        panels[_OTHER_PANEL] = panels.pop(_OTHER_PANEL)
    return panels


def _option_names(option: Any) -> str:
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        names += " / " + ", ".join(option.secondary_opts)
    return names if option.is_flag else f"{names} {_metavar(option)}"


def _metavar(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name.upper())
    is_optional = parameter.param_type_name == "argument" and not parameter.required
    return f"[{name}]" if is_optional else name


def _option_help(option: Any) -> str:
    """With the default, as the option's own text or the parser has it."""
    text, default = option.help or "", option.default
    if "[default" in text or option.is_eager:
        return text
    if option.is_flag:
        shown = "on" if default else "off"
    elif isinstance(default, float):
        shown = f"{default:g}"
    else:
        shown = "none" if default in (None, "", (), []) else str(default)
    return f"{text} [default: {shown}]"
