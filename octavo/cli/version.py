"""`octavo version`."""

from __future__ import annotations

import typer

from octavo import __version__


def version() -> None:
    """Print the version."""
    typer.echo(f"octavo {__version__}")
