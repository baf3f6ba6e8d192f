"""The `octavo` command. Each command is a file; what a command needs is imported when it runs, so help is instant."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from octavo import __version__
from octavo.cli.arguments import prepare_arguments
from octavo.cli.bench import bench
from octavo.cli.chat import chat
from octavo.cli.failure import EXIT_USAGE, explained_failures
from octavo.cli.generate import generate
from octavo.cli.help_page import make_help_page, wants_help
from octavo.cli.serve import serve
from octavo.cli.version import version

app = typer.Typer(
    name="octavo",
    help="Octavo serves language models: paged attention, continuous batching, an OpenAI-compatible server.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(help=serve.__doc__)(serve)
app.command(help=generate.__doc__)(generate)
app.command(help=chat.__doc__)(chat)
app.add_typer(bench)
app.command(help=version.__doc__)(version)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    is_asked: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """arguments: without the program's name; by default those of this process. Ends the process."""
    with explained_failures():
        command: Any = typer.main.get_command(app)
        typed = list(sys.argv[1:] if arguments is None else arguments)
        is_unfinished = not typed or (len(typed) == 1 and hasattr(command.commands.get(typed[0]), "commands"))
        if is_unfinished or wants_help(typed):
            _print_help(command, typed)
            sys.exit(EXIT_USAGE if is_unfinished else 0)
        command(prepare_arguments(command, typed), prog_name="octavo")


def _print_help(command: Any, typed: Sequence[str]) -> None:
    """Of the command that was named, or of all; `octavo bench serve --help` names a command of a command."""
    name = "octavo"
    for word in typed:
        if word in getattr(command, "commands", {}):
            command, name = command.commands[word], f"{name} {word}"
    page = make_help_page(command, name, is_terminal=sys.stdout.isatty())
    sys.stdout.write(page)


if __name__ == "__main__":
    main()
