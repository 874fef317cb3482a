"""`regraft evaluation ...`: labelled sets for gates to measure on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from index.errors import InvalidImage
from regraft.commands.galleries import IMAGE_SUFFIXES
from regraft.commands.options import URL, ApiKey, DryRun, Gallery, Url, connect, out, print_table, would
from regraft.connection import Problem

evaluation = typer.Typer(no_args_is_help=True, help="Keep labelled sets for gates to measure on.")
Number = Annotated[int, typer.Argument(metavar="EVALUATION", help="Number of the evaluation set.")]
COLUMNS = ["id", "name", "kind", "size", "labelled", "versions"]


@evaluation.command("add")
def add(
    name: Gallery,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Images; the folder each lies in is its label.")],
    title: Annotated[str, typer.Option("--name", help="What to call the set.")] = "",
    dry_run: DryRun = False,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Upload a folder of labelled images.

    Example: regraft evaluation add photos labelled-images/ --name holdout
    """
    images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    if not images:
        raise typer.BadParameter(f"no images below {folder}", param_hint="FOLDER")
    entries = [{"label": path.parent.name} for path in images]
    with connect(url, api_key) as client, _naming(images):
        files = [path.read_bytes() for path in images]
        added = client.add_evaluation(name, entries, images=files, name=title, dry_run=dry_run)
    number = "(dry run)" if added["id"] is None else added["id"]
    out.print(f"{name}: evaluation set {number} of {added['size']} images")


@evaluation.command("list")
def list_evaluations(name: Gallery, url: Url = URL, api_key: ApiKey = None) -> None:
    """List a gallery's evaluation sets."""
    with connect(url, api_key) as client:
        found = client.evaluations(name)
    print_table(COLUMNS, [[one[column] for column in COLUMNS] for one in found])


@evaluation.command("delete")
def delete(name: Gallery, number: Number, dry_run: DryRun = False, url: Url = URL, api_key: ApiKey = None) -> None:
    """Delete one; reports measured on it stay."""
    with connect(url, api_key) as client:
        client.delete_evaluation(name, number, dry_run=dry_run)
    out.print(f"{name}: {would(dry_run, 'deleted', 'delete')} evaluation set {number}")


@contextmanager
def _naming(images: Sequence[Path]) -> Iterator[None]:
    """The service refuses an entry by its number: say which file that is."""
    try:
        yield
    except Problem as problem:
        entry = re.match(r"/entries/(\d+)/image", problem.pointer)
        if entry is None:
            raise
        raise InvalidImage(f"{images[int(entry[1])]}: {problem.detail}") from problem
