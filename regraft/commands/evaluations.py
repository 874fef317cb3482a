"""`regraft evaluation ...`: evaluation sets for gates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from index.errors import InvalidImage
from index.paths import IMAGE_SUFFIXES, files_below
from regraft import inputs
from regraft.client import Client
from regraft.commands.evaluation_files import LINES, read_evaluation, read_lines
from regraft.commands.item_files import label_of
from regraft.connection import Problem
from regraft.terminal.answers import answer, out
from regraft.terminal.command import Commands
from regraft.terminal.deletion import confirm_deleting
from regraft.terminal.options import DryRun, Gallery, Yes
from regraft.terminal.printing import print_fields, would

evaluation = Commands(no_args_is_help=True, help="Add, list and delete evaluation sets for gates.")
Number = Annotated[int, typer.Argument(metavar="EVALUATION", help="Number of the evaluation set.")]


@evaluation.command("add")
def add(
    client: Client,
    name: Gallery,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER", help="Folder of images, one subfolder per label; or a .jsonl file of entries."
        ),
    ] = None,
    title: Annotated[str, typer.Option("--name", help="Name of the set.")] = "",
    embeddings: Annotated[
        list[Path] | None,
        typer.Option(
            "--embeddings",
            metavar="FILE",
            help="Instead of FOLDER: an .npy, .npz or .json per version, or one .npz or .parquet of all.",
        ),
    ] = None,
    version: Annotated[
        list[str] | None, typer.Option("--version", metavar="NAME", help="Versions of the files, in the same order.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option("--labels", metavar="FILE", help="With --embeddings: a JSON list of one label each.")
    ] = None,
    relevant: Annotated[
        Path | None,
        typer.Option(
            "--relevant", metavar="FILE", help="With --embeddings: a JSON list of one list of relevant ids each."
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Add an evaluation set: images, texts, or embeddings by each compared version, with labels or relevant ids.

    Example: regraft evaluation add photos labelled-images/ --name holdout

    Example: regraft evaluation add notes queries.jsonl

    Example: regraft evaluation add docs --embeddings queries.npz
    """
    if (folder is None) == (not embeddings):
        raise typer.BadParameter("give either a folder of images or embeddings", param_hint="FOLDER or --embeddings")
    if folder is not None and (version or labels or relevant):
        raise typer.BadParameter("these require --embeddings", param_hint="--version, --labels, --relevant")
    if folder is None:
        embeddings_by_version, entries = read_evaluation(embeddings or [], version or [], labels, relevant)
        added = client.add_evaluation(name, entries, embeddings=embeddings_by_version, name=title, dry_run=dry_run)
    else:
        entries, images = _entries(folder)
        with _naming_files(images):
            files = [inputs.image(path.read_bytes(), str(path)) for path in images]
            added = client.add_evaluation(name, entries, images=files, name=title, dry_run=dry_run)
    answer(added)
    number = "(dry run)" if added.id is None else added.id
    out.print(f"{name}: evaluation set {number} of {added.size} {added.kind}")


@evaluation.command("list")
def list_evaluations(client: Client, name: Gallery) -> None:
    """List a gallery's evaluation sets."""
    print_fields(client.evaluations(name), ["id", "name", "kind", "size", "labelled", "relevant", "versions"])


@evaluation.command("delete")
def delete(client: Client, name: Gallery, number: Number, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Delete an evaluation set; gate reports measured on it stay."""
    confirm_deleting(f"evaluation set {number} of gallery {name}", yes=yes or dry_run)
    client.delete_evaluation(name, number, dry_run=dry_run)
    answer({"gallery": name, "evaluation": number, "deleted": not dry_run, "dry_run": dry_run})
    out.print(f"{name}: {would(dry_run, 'deleted', 'delete')} evaluation set {number}")


def _entries(place: Path) -> tuple[list[dict[str, Any]], list[Path]]:
    """The entries of a folder of images or of a .jsonl file, and their images."""
    if place.suffix.lower() == LINES:
        return read_lines(place)
    if not place.exists():
        raise typer.BadParameter(f"{place} does not exist", param_hint="FOLDER")
    images = sorted(files_below(place, IMAGE_SUFFIXES)) if place.is_dir() else []
    if not images:
        raise typer.BadParameter(f"{place} has no images", param_hint="FOLDER")
    return [{"label": label_of(path)} for path in images], images


@contextmanager
def _naming_files(images: Sequence[Path]) -> Iterator[None]:
    """Add the name of the file to an error of the service about an entry by number."""
    try:
        yield
    except Problem as problem:
        entry = re.match(r"/entries/(\d+)/image", problem.pointer)
        if entry is None:
            raise
        raise InvalidImage(f"{images[int(entry[1])]}: {problem.detail}") from problem
