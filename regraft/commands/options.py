"""Helpers of commands: options, confirmations, tables, progress bars, and imports of optional packages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from index.errors import InvalidArgument, RegraftError
from regraft.client import Client
from regraft.commands.answers import answer, err, out
from regraft.commands.console import Description, visible
from regraft.models import ImageWarning, ScoreInterval
from regraft.models.base import ApiModel
from regraft.own_packages import OWN, check_not_shadowed

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, but change nothing.")]
Gallery = Annotated[str, typer.Argument(metavar="GALLERY", help="Name of the gallery.")]
Newest = Annotated[
    int | None,
    typer.Option("--limit", min=1, max=1000, help="Number of the newest to list; default: all.", show_default=False),
]


class MissingExtra(RegraftError):
    """An optional part of Regraft is not installed."""

    code = "missing_extra"


def delete_named(client: Client, what: str, name: str, rest: str, *, yes: bool, dry_run: bool) -> None:
    """Delete a gallery or a version and report it; asks first, unless `yes`. `rest`: what is deleted with it."""
    confirm_deleting(f"{what} {name} and {rest}", yes=yes or dry_run)
    delete = {"gallery": client.delete_gallery, "version": client.delete_version}[what]
    delete(name, dry_run=dry_run)
    answer({what: name, "deleted": not dry_run, "dry_run": dry_run})
    out.print(f"{would(dry_run, 'deleted', 'delete')} {what} {name}")


def confirm_deleting(what: str, *, yes: bool) -> None:
    """Ask to confirm a deletion unless `yes`. Raises InvalidArgument if there is no terminal to ask on."""
    if yes:
        return
    if answer.requested:
        raise InvalidArgument(f"--json asks no questions: add --yes to delete {what}", pointer="/yes")
    typer.confirm(f"Delete {visible(what)}?", abort=True)


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Convert errors of imports within the block to one that says what to install.

    Raises:
        MissingExtra: a package of `extra` is missing, or another module shadows one of Regraft's packages.
        ModuleNotFoundError: a module of Regraft itself is missing, which no extra brings.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        _check_not_shadowed(package)
        if package in (*OWN, "regraft"):
            raise
        raise MissingExtra(
            f"{error.name} is not installed; this command needs: pip install 'regraft[{extra}]'"
        ) from error


def _check_not_shadowed(name: str) -> None:
    if name in OWN:
        try:
            check_not_shadowed(name)
        except ImportError as error:
            raise MissingExtra(str(error)) from error


def read_filter(text: str) -> dict[str, Any]:
    """Parse `--filter`. Raises InvalidArgument if it is not a JSON object."""
    return read_object(text, "filter", {"field": "city", "eq": "Bern"})


def read_object(text: str, option: str, example: Mapping[str, Any]) -> dict[str, Any]:
    """Parse an option that must be a JSON object. Raises InvalidArgument."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        told = f"--{option} must be JSON, such as {json.dumps(example)}: {error}"
        raise InvalidArgument(told, pointer=f"/{option}") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"--{option} must be a JSON object", pointer=f"/{option}")
    return found


def progress() -> Progress:
    """A progress bar on standard error."""
    columns = (Description(), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err)


def print_table(columns: list[str], rows: list[list[Any]]) -> None:
    """Print rows under a header. Long cells are folded on a terminal; elsewhere each row is one line, for programs."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    out.print(table)


def print_fields(found: Sequence[ApiModel], fields: list[str]) -> None:
    """Answer with models of one type, and print these fields of each as a row."""
    answer(found)
    print_table(fields, [[getattr(one, field) for field in fields] for one in found])


def would(dry_run: bool, done: str, infinitive: str) -> str:
    """The verb in the report of a change: done, or a dry run."""
    return f"would {infinitive}" if dry_run else done


def score(value: ScoreInterval) -> str:
    """A measured score in per cent with its interval."""
    return f"{value.value:.1%} [{value.low:.1%}, {value.high:.1%}]"


def print_warnings(warnings: Iterable[ImageWarning]) -> None:
    """Print warnings about the parts of images that a version does not see."""
    for warning in warnings:
        images = "1 image" if warning.count == 1 else f"{warning.count} images"
        err.print(f"warning: {images}: {warning.detail}")
