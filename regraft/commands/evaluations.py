"""`regraft evaluation ...`: labelled sets for gates to measure on."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from index.errors import InvalidArgument, InvalidImage
from regraft import given
from regraft.commands.answers import Commands, answer, out
from regraft.commands.galleries import IMAGE_SUFFIXES
from regraft.commands.options import URL, ApiKey, DryRun, Gallery, Url, connect, print_table, would
from regraft.connection import Problem

evaluation = Commands(no_args_is_help=True, help="Keep labelled sets for gates to measure on.")
Number = Annotated[int, typer.Argument(metavar="EVALUATION", help="Number of the evaluation set.")]
COLUMNS = ["id", "name", "kind", "size", "labelled", "versions"]


@evaluation.command("add")
def add(
    name: Gallery,
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Images; the folder each lies in is its label.")
    ] = None,
    title: Annotated[str, typer.Option("--name", help="What to call the set.")] = "",
    embeddings: Annotated[
        list[Path] | None,
        typer.Option("--embeddings", metavar="FILE", help="Instead: .npy, .npz or .json, once for each version."),
    ] = None,
    version: Annotated[
        list[str] | None, typer.Option("--version", metavar="NAME", help="Whose embeddings, in the same order.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option("--labels", metavar="FILE", help="Of embeddings: a JSON list, a label each.")
    ] = None,
    dry_run: DryRun = False,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Upload a folder of labelled images, or embeddings by each version that will be compared.

    Example: regraft evaluation add photos labelled-images/ --name holdout
    """
    if (folder is None) == (not embeddings):
        raise typer.BadParameter("give either a folder of images or embeddings", param_hint="FOLDER or --embeddings")
    if folder is not None and (version or labels):
        raise typer.BadParameter("these go with --embeddings", param_hint="--version, --labels")
    with connect(url, api_key) as client:
        if folder is None:
            held = read_sets(embeddings or [], version or [])
            entries = read_labels(labels, len(next(iter(held.values()))))
            added = client.add_evaluation(name, entries, embeddings=held, name=title, dry_run=dry_run)
        else:
            images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
            if not images:
                raise typer.BadParameter(f"no images below {folder}", param_hint="FOLDER")
            entries = [{"label": path.parent.name} for path in images]
            with _naming(images):
                files = [path.read_bytes() for path in images]
                added = client.add_evaluation(name, entries, images=files, name=title, dry_run=dry_run)
    answer(added)
    number = "(dry run)" if added.id is None else added.id
    out.print(f"{name}: evaluation set {number} of {added.size} {'images' if folder else 'embeddings'}")


@evaluation.command("list")
def list_evaluations(name: Gallery, url: Url = URL, api_key: ApiKey = None) -> None:
    """List a gallery's evaluation sets."""
    with connect(url, api_key) as client:
        found = client.evaluations(name)
    answer(found)
    print_table(COLUMNS, [[getattr(one, column) for column in COLUMNS] for one in found])


@evaluation.command("delete")
def delete(name: Gallery, number: Number, dry_run: DryRun = False, url: Url = URL, api_key: ApiKey = None) -> None:
    """Delete one; reports measured on it stay."""
    with connect(url, api_key) as client:
        client.delete_evaluation(name, number, dry_run=dry_run)
    answer({"gallery": name, "evaluation": number, "deleted": not dry_run, "dry_run": dry_run})
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


def read_sets(files: Sequence[Path], versions: Sequence[str]) -> dict[str, list[Any]]:
    """Embeddings by version, each of one file, as lists of numbers.

    Raises:
        typer.BadParameter: not one version for each file, or files of different lengths.
        InvalidArgument: a file that cannot be read as embeddings.
    """
    if len(files) != len(versions) or len(set(versions)) < len(versions):
        why = (
            f"{len(files)} files of embeddings need as many versions, each once; given: {', '.join(versions) or 'none'}"
        )
        raise typer.BadParameter(why, param_hint="--version")
    held = {version: _read_embeddings(path, version) for path, version in zip(files, versions, strict=True)}
    if len({len(rows) for rows in held.values()}) > 1:
        counts = ", ".join(f"{version}: {len(rows)}" for version, rows in held.items())
        raise typer.BadParameter(f"each file needs one embedding for each entry ({counts})", param_hint="--embeddings")
    return held


def read_labels(path: Path | None, count: int) -> list[dict[str, Any]]:
    """An entry for each of `count` embeddings, with its label of a JSON list. Raises InvalidArgument."""
    if path is None:
        return [{} for _ in range(count)]
    labels = _json(path, "labels")
    if not isinstance(labels, list) or len(labels) != count:
        found = f"a list of {len(labels)}" if isinstance(labels, list) else f"of type {type(labels).__name__}"
        raise InvalidArgument(f"{path} must be a JSON list of {count} labels, one for each embedding; it is {found}")
    return [{"label": label} for label in labels]


def _read_embeddings(path: Path, version: str) -> list[Any]:
    """The rows (N, dim) of a file; of an .npz those of the array that has the version's name, or of its only one."""
    if path.suffix.lower() == ".json":
        rows = _json(path, "embeddings")
    elif path.suffix.lower() in {".npy", ".npz"}:
        rows = _array(path, version)
    else:
        raise InvalidArgument(f"{path}: embeddings are read from .npy, .npz or .json files")
    checked: list[Any] = given.vectors(rows, str(path))
    if not checked:
        raise InvalidArgument(f"{path} holds no embeddings")
    return checked


def _array(path: Path, version: str) -> Any:
    import numpy as np

    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            name = loaded.files[0] if len(loaded.files) == 1 else version
            if name not in loaded.files:
                raise InvalidArgument(f"{path} holds no array {version!r}; it has: {', '.join(loaded.files)}")
            return loaded[name]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidArgument(f"{path} cannot be read as embeddings: {error}") from error


def _json(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} cannot be read as {what}: {error}") from error
