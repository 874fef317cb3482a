"""The command line of a benchmark: Typer makes it of the parameters of its `main`, and `--help` of its docstring."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import typer

from index.errors import RegraftError

Count = Annotated[int, typer.Option(min=1)]
Counts = Annotated[list[int], typer.Option(min=1, help="May be repeated.")]
Seconds = Annotated[float, typer.Option(min=0.1)]
Root = Annotated[Path | None, typer.Option(exists=True, help="Folder of the data set.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="[PART.]FIELD=VALUE", help="Change a field of the recipes; may be repeated."),
]
Document = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, metavar="FILE", help="Put the table into a document.")
]


def choice_of(names: Collection[str]) -> Callable[[str], str]:
    """A parser for Typer, of names that no type lists."""

    def parse(text: str) -> str:
        if text not in names:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, names))}")
        return text

    return parse


def run_main(main: Callable[..., None]) -> None:
    """Call `main` with the arguments of the command line; exits with 2 where they or their values are refused."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    paragraphs = main.__globals__["__doc__"].split("\n\n")
    app.command(help="\n\n".join(f"\b\n{paragraph}" for paragraph in paragraphs))(main)  # \b keeps its lines
    try:
        app()
    except RegraftError as error:
        print(f"Error: {error.message}", file=sys.stderr)
        sys.exit(2)
