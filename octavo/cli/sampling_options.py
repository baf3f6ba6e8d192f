"""How a command's answers are sampled: the options of `generate` and `chat`, with the names of the API."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli.model_options import MaybeInt

_PANEL = "Sampling"

TemperatureOption = Annotated[
    float, typer.Option(metavar="X", help="0 always takes the likeliest token.", rich_help_panel=_PANEL)
]
TopPOption = Annotated[
    float,
    typer.Option(
        metavar="X", help="Draw from the likeliest tokens that make up this share; 1 is off.", rich_help_panel=_PANEL
    ),
]
TopKOption = Annotated[
    int,
    typer.Option(metavar="N", help="Draw from this many of the likeliest tokens; 0 is off.", rich_help_panel=_PANEL),
]
MinPOption = Annotated[
    float,
    typer.Option(
        metavar="X", help="Leave out tokens below this share of the likeliest one; 0 is off.", rich_help_panel=_PANEL
    ),
]
RequestSeedOption = Annotated[
    MaybeInt,
    typer.Option(
        "--seed",
        metavar="N",
        help="The same seed gives the same answer. [default: a new one each time]",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
StopOption = Annotated[
    list[str],
    typer.Option(
        help="A text that ends the answer; may be repeated. [default: none]",
        metavar="TEXT",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
