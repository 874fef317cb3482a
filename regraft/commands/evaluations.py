"""`regraft evaluation ...`: labelled sets for gates to measure on."""

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
from regraft.commands.answers import answer, out
from regraft.commands.command import Commands
from regraft.commands.evaluation_files import LINES, read_evaluation, read_lines
from regraft.commands.item_files import label_of
from regraft.commands.options import DryRun, Gallery, Yes, confirm_deleting, print_fields, would
from regraft.connection import Problem

evaluation = Commands(no_args_is_help=True, help="Keep labelled sets for gates to measure on.")
Number = Annotated[int, typer.Argument(metavar="EVALUATION", help="Number of the evaluation set.")]


@evaluation.command("add")
def add(
    client: Client,
    name: Gallery,
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="Images; the folder each lies in is its label. Or a .jsonl of entries."),
    ] = None,
    title: Annotated[str, typer.Option("--name", help="What to call the set.")] = "",
    embeddings: Annotated[
        list[Path] | None,
        typer.Option(
            "--embeddings",
            metavar="FILE",
            help="Instead: .npy, .npz or .json, one a version; or an .npz or .parquet of all.",
        ),
    ] = None,
    version: Annotated[
        list[str] | None, typer.Option("--version", metavar="NAME", help="Whose embeddings, in the same order.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option("--labels", metavar="FILE", help="Of embeddings: a JSON list, a label each.")
    ] = None,
    relevant: Annotated[
        Path | None,
        typer.Option("--relevant", metavar="FILE", help="Of embeddings: a JSON list, a list of relevant ids each."),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Upload images, texts, or embeddings by each version that will be compared, with what is right for each.

    Example: regraft evaluation add photos labelled-images/ --name holdout

    Example: regraft evaluation add notes queries.jsonl

    Example: regraft evaluation add docs --embeddings queries.npz
    """
    if (folder is None) == (not embeddings):
        raise typer.BadParameter("give either a folder of images or embeddings", param_hint="FOLDER or --embeddings")
    if folder is not None and (version or labels or relevant):
        raise typer.BadParameter("these go with --embeddings", param_hint="--version, --labels, --relevant")
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
    """Delete one; reports measured on it stay."""
    confirm_deleting(f"evaluation set {number} of gallery {name}", yes=yes or dry_run)
    client.delete_evaluation(name, number, dry_run=dry_run)
    answer({"gallery": name, "evaluation": number, "deleted": not dry_run, "dry_run": dry_run})
    out.print(f"{name}: {would(dry_run, 'deleted', 'delete')} evaluation set {number}")


def _entries(place: Path) -> tuple[list[dict[str, Any]], list[Path]]:
    """The entries of a folder of images, or of a .jsonl file, and the images that they are."""
    if place.suffix.lower() == LINES:
        return read_lines(place)
    if not place.exists():
        raise typer.BadParameter(f"there is no {place}", param_hint="FOLDER")
    images = sorted(files_below(place, IMAGE_SUFFIXES)) if place.is_dir() else []
    if not images:
        raise typer.BadParameter(f"no images below {place}", param_hint="FOLDER")
    return [{"label": label_of(path)} for path in images], images


@contextmanager
def _naming_files(images: Sequence[Path]) -> Iterator[None]:
    """The service refuses an entry by its number: say which file that is."""
    try:
        yield
    except Problem as problem:
        entry = re.match(r"/entries/(\d+)/image", problem.pointer)
        if entry is None:
            raise
        raise InvalidImage(f"{images[int(entry[1])]}: {problem.detail}") from problem
