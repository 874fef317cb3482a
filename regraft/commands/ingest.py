"""`regraft ingest`: store images and texts from files in a gallery."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import httpx
import typer

from index.errors import InvalidArgument
from index.paths import IMAGE_SUFFIXES, READABLE, files_below
from regraft.client import Client, ImageItem, InvalidInput
from regraft.commands.item_files import below, by_id, label_of
from regraft.commands.texts import are_texts, batches_of_texts, find_texts
from regraft.connection import Problem, Unreachable
from regraft.ingest_batch import ingest_in_halves, nothing_stored
from regraft.models import ImageWarning, IngestResult, ItemError
from regraft.terminal.answers import answer, err, out
from regraft.terminal.options import Gallery
from regraft.terminal.printing import print_warnings, progress

MAX_BATCH_BYTES = 32 << 20
SERVER_ERROR = 500


def ingest(
    client: Client,
    name: Gallery,
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER|FILES", help="Images, or folders of them; .txt and .jsonl files are texts."),
    ],
    texts: Annotated[
        bool, typer.Option("--texts", help="Read the .txt files of folders, one text each, instead of images.")
    ] = False,
    prefix: Annotated[str, typer.Option(help="Prefix of each id, to tell folders apart.", show_default=False)] = "",
    replace: Annotated[
        bool | None,
        typer.Option(
            "--replace/--no-replace",
            help="If an item exists: replace it entirely, or refuse it.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images or texts per request.")] = 64,
) -> None:
    """Store images or texts; metadata `label` is the item's folder.

    A line of a .jsonl file is {"id": "a", "text": "...", "metadata": {...}}. The current version embeds the items.

    Example: regraft ingest photos my-images/

    Example: regraft ingest notes notes.jsonl
    """
    if texts or are_texts(paths):
        _ingest_texts(client, name, paths, prefix, replace, batch)
        return
    files = [(prefix + key, path) for key, path in find_images(paths).items()]
    counts: Counter[str] = Counter()
    warnings: dict[tuple[str, str], ImageWarning] = {}
    errors: list[dict[str, object]] = []
    with progress() as bar, _saying_how_to_continue("images", counts):
        task = bar.add_task(f"ingest into {name}", total=len(files))
        for chunk in batches(files, batch):
            done = _store(client, name, chunk, replace)
            _merge_warnings(warnings, done.warnings)
            for error in done.errors:
                err.print(f"{chunk[error.index][1]}: {error.detail}")
                errors.append({"file": chunk[error.index][1], "code": error.code, "detail": error.detail})
            counts.update({kind: getattr(done, kind) for kind in ("stored", "new", "replaced", "failed")})
            bar.advance(task, len(chunk))
    _report(name, "images", counts, errors, list(warnings.values()), left_out(paths))


def _ingest_texts(
    client: Client, name: str, paths: Sequence[Path], prefix: str, replace: bool | None, batch: int
) -> None:
    """Store texts in a gallery, batch by batch, and report; exits with 1 if one failed."""
    counts: Counter[str] = Counter()
    errors: list[dict[str, str | None]] = []

    def refuse(error: InvalidArgument) -> None:
        err.print(str(error))
        errors.append({"item": None, "code": error.code, "detail": str(error)})
        counts["failed"] += 1

    items = find_texts(paths, prefix, refuse)
    with progress() as bar, _saying_how_to_continue("texts", counts):
        task = bar.add_task(f"ingest into {name}", total=None)
        for chunk in batches_of_texts(items, batch):
            done = ingest_in_halves(partial(client.ingest_texts, name, replace=replace), chunk)
            for error in done.errors:
                err.print(f"{chunk[error.index].id}: {error.detail}")
                errors.append({"item": chunk[error.index].id, "code": error.code, "detail": error.detail})
            counts.update({kind: getattr(done, kind) for kind in ("stored", "new", "replaced", "failed")})
            bar.advance(task, len(chunk))
    _report(name, "texts", counts, errors, [], {})


@contextmanager
def _saying_how_to_continue(what: str, counts: Mapping[str, int]) -> Iterator[None]:
    """If the service, or a proxy before it, does not answer any more, say what is stored and how to store the rest."""
    try:
        yield
    except (Unreachable, Problem) as error:
        stored = counts.get("stored", 0)
        refused = isinstance(error, Problem)
        if refused and error.status < SERVER_ERROR:
            raise  # and would be again
        if not stored and (refused or isinstance(error.__cause__, httpx.ConnectError)):
            raise  # nothing is half done
        err.print(
            f"until the service was lost, {stored} {what} were stored, and perhaps some of the last batch. Run the "
            "command again to continue: what is stored is replaced by the same, or with --no-replace counted as failed"
        )
        raise


def _report(
    name: str,
    what: str,
    counts: Counter[str],
    errors: Sequence[Mapping[str, object]],
    warnings: Sequence[ImageWarning],
    others: Mapping[str, int],
) -> None:
    """Report the result of all batches; exits with 1 if an item failed. `others`: see `left_out`."""
    kinds = {kind: counts[kind] for kind in ("stored", "new", "replaced", "failed")}
    answer({"gallery": name, **kinds, "errors": errors, "warnings": warnings, "left_out": others})
    counted = f"{counts['failed']} failed ({counts['new']} new, {counts['replaced']} replaced)"
    out.print(f"stored {counts['stored']} {what} in {name}, {counted}")
    print_warnings(warnings)
    if others:
        listed = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in sorted(others.items()))
        err.print(f"left out files without the suffix of an image: {listed}")
    if counts["failed"]:
        raise typer.Exit(1)


def find_images(paths: Sequence[Path]) -> dict[str, Path]:
    """Id -> image file. The id is the path relative to a given folder, else the given path without its `..`.

    Raises:
        InvalidArgument: a path does not exist, there are no images, or two files have the same id.
    """
    found = by_id(
        ((file.relative_to(path) if path.is_dir() else _without_climbing(file)).as_posix(), file)
        for path in paths
        for file in below(path, IMAGE_SUFFIXES)
    )
    if not found:
        raise InvalidArgument(f"no image files found; suffixes: {', '.join(sorted(READABLE))}")
    return found


def left_out(paths: Sequence[Path]) -> Counter[str]:
    """The number of files in the given folders that are no images by their names, by suffix in lower case."""
    found = (file.suffix.lower() for path in paths if path.is_dir() for file in files_below(path, None))
    return Counter(suffix for suffix in found if suffix not in IMAGE_SUFFIXES)


def _without_climbing(file: Path) -> Path:
    """A path without `..`, which ids must not contain."""
    return Path(*(part for part in Path(os.path.normpath(file)).parts if part != ".."))


def batches(files: Sequence[tuple[str, Path]], size: int) -> Iterator[list[tuple[str, Path]]]:
    """Split files into batches of at most `size` files and about 32 MB."""
    chunk: list[tuple[str, Path]] = []
    total = 0
    for name, path in files:
        weight = _size(path)
        if chunk and (len(chunk) == size or total + weight > MAX_BATCH_BYTES):
            yield chunk
            chunk, total = [], 0
        chunk.append((name, path))
        total += weight
    if chunk:
        yield chunk


def _size(path: Path) -> int:
    """Bytes of a file; 0 if it cannot be read, which is reported when it is sent."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _store(client: Client, name: str, chunk: Sequence[tuple[str, Path]], replace: bool | None) -> IngestResult:
    """Send the readable files; the others are added to the errors of the result."""
    items: dict[int, ImageItem] = {}
    unsent: dict[int, tuple[str, str]] = {}
    for index, (key, path) in enumerate(chunk):
        try:
            items[index] = _item(key, path)
        except InvalidInput as error:
            unsent[index] = error.code, error.message
        except OSError as error:
            unsent[index] = "os_error", error.strerror or str(error)
    errors = [ItemError(index=n, id=None, code=code, detail=why, pointer="") for n, (code, why) in unsent.items()]
    if not items:
        return nothing_stored(errors)
    done = ingest_in_halves(partial(client.ingest, name, replace=replace), list(items.values()))
    sent = list(items)
    errors += [error.model_copy(update={"index": sent[error.index]}) for error in done.errors]
    return done.model_copy(update={"failed": len(errors), "errors": sorted(errors, key=lambda error: error.index)})


def _item(key: str, path: Path) -> ImageItem:
    """The item of a file. Raises InvalidInput or OSError."""
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("the file name is not UTF-8") from error
    if not (content := path.read_bytes()):
        raise InvalidInput("the file is empty")
    return ImageItem(key, content, {"label": label_of(path)})


def _merge_warnings(warnings: dict[tuple[str, str], ImageWarning], added: Sequence[ImageWarning]) -> None:
    """Add the warnings of a batch to those of earlier batches, so that each is printed once."""
    for warning in added:
        kind = (warning.code, warning.version)
        before = warnings[kind].count if kind in warnings else 0
        warnings[kind] = warning.model_copy(update={"count": before + warning.count})
