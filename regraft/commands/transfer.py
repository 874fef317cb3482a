"""`regraft import` and `regraft gallery export`: items with vectors from files and other databases, and to files."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from index.errors import InvalidArgument
from regraft.client import Client
from regraft.commands.galleries import gallery
from regraft.sources.base import Wanted
from regraft.terminal.answers import answer, err, out
from regraft.terminal.extras import needs
from regraft.terminal.options import Gallery
from regraft.terminal.printing import progress
from regraft.transfer.exports import export_gallery
from regraft.transfer.import_state import ImportProgress, read_progress
from regraft.transfer.imports import PAGE, import_gallery

SKIPPED = 3
"""Exit code of an import that skipped rows."""


@gallery.command("export")
def export(
    client: Client,
    name: Gallery,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Parquet file to write.")],
) -> None:
    """Export all items to a Parquet file: id, metadata, text, and one column of vectors per version.

    Example: regraft gallery export photos photos.parquet
    """
    if file.suffix != ".parquet":
        raise InvalidArgument(f"the export file {file} must end with .parquet")
    if not file.parent.is_dir():
        raise InvalidArgument(f"the folder {file.parent} does not exist")
    with needs("arrow"), progress() as bar:
        task = bar.add_task(f"exporting {name}", total=client.gallery(name).items)
        done = export_gallery(client, name, file, lambda rows: bar.advance(task, rows))
        rows = int(bar.tasks[0].completed)
    if done.changed:
        err.print(f"warning: {name} changed during the export, so the file is not a snapshot")
    if done.damaged:
        err.print(f"warning: {done.damaged} damaged embeddings were left out; `regraft doctor` lists them")
    answer({"gallery": name, "file": file, "items": rows, **asdict(done)})
    out.print(f"wrote {rows} items of {name} to {file}")


def import_(
    client: Client,
    name: Gallery,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A file (Parquet, Arrow, .npy, .fvecs, .fbin, FAISS), or KIND:ADDRESS#COLLECTION of another database: "
            "pgvector, qdrant, chroma, lancedb, milvus, weaviate, opensearch.",
        ),
    ],
    vector: Annotated[
        list[str] | None,
        typer.Option("--vector", metavar="COLUMN[=VERSION]", help="Column of vectors; may be repeated."),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--id", metavar="COLUMN", help="Column of ids.", show_default=False)
    ] = None,
    metadata: Annotated[
        str | None,
        typer.Option(
            "--metadata", metavar="COLUMNS", help="Columns of metadata, separated by commas; default: all others."
        ),
    ] = None,
    flatten: Annotated[
        list[str] | None,
        typer.Option(
            "--flatten",
            metavar="COLUMN",
            help="Column of objects whose fields become metadata; may be repeated.",
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--version", help="Version of the vectors; default: the current version.", show_default=False),
    ] = None,
    ids: Annotated[
        Path | None,
        typer.Option(
            "--ids",
            help="File of ids for a file of vectors: one per line, or .npy; default: the row numbers.",
            show_default=False,
        ),
    ] = None,
    update_only: Annotated[bool, typer.Option("--update-only", help="Only add embeddings to existing items.")] = False,
    ignore_metric: Annotated[
        bool, typer.Option("--ignore-metric", help="Import even if the source uses another metric.")
    ] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, max=10_000, help="Rows per request.")] = PAGE,
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="COLUMN", help="Column or field of texts.", show_default=False),
    ] = None,
    state: Annotated[
        Path | None, typer.Option("--state", help="File that keeps the position of the import.", show_default=False)
    ] = None,
    source_key: Annotated[
        str | None,
        typer.Option("--source-key", envvar="REGRAFT_SOURCE_KEY", help="API key of the source.", show_default=False),
    ] = None,
) -> None:
    """Import a file or another database; a rerun continues after an interruption.

    Example: regraft import photos photos.parquet --vector clip=clip-v1 --metadata name,city
    """
    from regraft.sources.database import DatabaseSource
    from regraft.sources.opening import extra_of, open_source

    named = None if metadata is None else [one for one in metadata.split(",") if one]
    if update_only and (unused := "--metadata" if named else "--text" if text else "--flatten" if flatten else None):
        raise InvalidArgument(f"{unused} cannot be used with --update-only, which adds embeddings alone")
    with needs(extra_of(source)):
        # The version that is current now, even if another one is deployed during the import.
        made_by = version or client.gallery(name).current
        wanted = Wanted(key, _vectors(vector, made_by), named, made_by, text, tuple(flatten or ()))
        space_of = None if ignore_metric else partial(_space, client)
        opened = open_source(source, wanted, ids=ids, key=source_key, space_of=space_of)
        if isinstance(opened, DatabaseSource) and opened.note:
            err.print(f"warning: {opened.note}")
        kept = state or _beside(source, name)
        before = read_progress(client, name, opened, kept, update_only=update_only)
        if before.read:
            err.print(f"continuing after {before.read} rows, according to {kept}")
        with progress() as bar:
            bar.add_task(f"importing into {name}", total=opened.count, completed=before.read)
            done = import_gallery(
                client,
                name,
                opened,
                kept,
                size=batch,
                update_only=update_only,
                metadata=named or (),
                on_batch=partial(_advance, bar),
            )
    _print(done)


def _advance(bar: Progress, now: ImportProgress) -> None:
    """Show the progress; after the first of several batches, also the fields that no row has, as the end may be far."""
    (task,) = bar.tasks
    if not task.completed and now.read != task.total:
        _warn_of_fields(now, "of the first ")
    bar.update(task.id, completed=now.read)


def _warn_of_fields(done: ImportProgress, which: str = "of ") -> None:
    for name in (name for name, count in done.fields.items() if not count and done.read):
        err.print(f"warning: none {which}{done.read} rows has a value of the metadata field {name!r}")


def _space(client: Client, version: str | None) -> str:
    return "" if version is None else str(client.version(version).space["kind"])


def _vectors(given: list[str] | None, version: str | None) -> dict[str, str | None]:
    """Column -> version of `--vector COLUMN[=VERSION]`."""
    pairs = [one.partition("=") for one in given or ()]
    found = {column: named or version for column, _, named in pairs}
    if len(found) < len(pairs) or "" in found:
        raise InvalidArgument("--vector must name each column once: COLUMN or COLUMN=VERSION")
    return found


def _beside(source: str, name: str) -> Path:
    """The file of an import's progress: next to the source file, or for a database in the working directory."""
    path = Path(source)
    return path.with_name(f"{path.name}.{name}.import") if path.is_file() else Path(f"{name}.import")


def _print(done: ImportProgress) -> None:
    skipped = sum(done.skipped.values())
    kept = ("cursor", "service", "created", "update_only", "versions", "ids_bytes")
    answer({name: value for name, value in asdict(done).items() if name not in kept})
    counted = f"{done.stored} items ({done.new} new, {done.stored - done.new} existing)"
    out.print(f"stored {counted} of {done.read} rows in {done.gallery}, {skipped} skipped")
    for why, count in sorted(done.skipped.items(), key=lambda one: -one[1]):
        err.print(f"skipped {count}: {why}" + (f", for example {done.examples[why]}" if why in done.examples else ""))
    _warn_of_fields(done)
    if skipped:
        raise typer.Exit(SKIPPED)
