"""Import sources into galleries (`import_gallery`) and export galleries to files (`export_gallery`), page by page.

After each batch that the service has acknowledged, an import writes its progress to a small file (`Progress`) and the
stored ids to another (`StoredIds`), so that it can be resumed after a kill. The unfinished batch is sent again, with
the same result.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from index.errors import InvalidArgument
from regraft.client import Client, TextItem
from regraft.ingest_batch import ingest_in_halves
from regraft.models import IngestResult, ItemError
from regraft.sources.base import Batch, Column, ItemSource, display_address

PAGE = 1000
NO_ROUTE, DUPLICATE_ID = "no_route", "duplicate_id"
T = TypeVar("T")


@dataclass
class Progress:
    """The progress of an import: rows read, items `stored`, of these `new`, and the rows skipped by reason.

    `cursor` is the position in the source; `examples` names one skipped item per reason. `source` to `update_only`
    identify the import; `created` is the gallery's time of creation, which tells it from a later one of its name.
    `versions` are the version numbers in the file of `StoredIds`, and `ids_bytes` is its valid length. `fields` are the
    wanted metadata fields, with the number of rows that have a value of each.
    """

    source: str
    service: str
    gallery: str
    created: float
    update_only: bool
    cursor: Any = None
    read: int = 0
    stored: int = 0
    new: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    versions: list[str | None] = field(default_factory=list)
    ids_bytes: int = 0
    fields: dict[str, int] = field(default_factory=dict)

    def skip(self, why: str, count: int = 1, example: str | None = None) -> None:
        """Count skipped rows."""
        self.skipped[why] = self.skipped.get(why, 0) + count
        if example is not None:
            self.examples.setdefault(why, example)

    def count_fields(self, metadata: Sequence[Mapping[str, Any] | None]) -> None:
        """Count the rows that have a value of each wanted field."""
        for name in self.fields:
            self.fields[name] += sum(one is not None and name in one for one in metadata)


IDENTITY_FIELDS = ("source", "service", "gallery", "created", "update_only")
"""The fields that identify an import."""


def resume(client: Client, gallery: str, source: ItemSource, state: Path, *, update_only: bool) -> Progress:
    """The progress of an interrupted import, or of a new one.

    Raises:
        InvalidArgument: the file `state` is of another import or an earlier release, or the source or gallery changed.
    """
    created = client.gallery(gallery).created
    begun = Progress(source.identity, display_address(client.url), gallery, created, update_only)
    if not state.exists():
        return begun
    try:
        progress = Progress(**json.loads(state.read_text()))
    except (ValueError, TypeError) as error:
        why = f"{state} is not the state of an import, or is of an earlier release: delete it to start over"
        raise InvalidArgument(why) from error
    there, here = ({name: getattr(one, name) for name in IDENTITY_FIELDS} for one in (progress, begun))
    if there != here:
        changed = "; ".join(
            f"{name} was {there[name]}, is {here[name]}" for name in IDENTITY_FIELDS if there[name] != here[name]
        )
        raise InvalidArgument(f"{state} is of another import ({changed}): delete it to start over")
    ids = ids_file(state)
    if progress.ids_bytes > (ids.stat().st_size if ids.exists() else 0):
        raise InvalidArgument(f"{ids} does not match {state}: delete both to start over")
    return progress


def ids_file(state: Path) -> Path:
    """The file of `StoredIds` of an import."""
    return state.with_name(f"{state.name}.ids")


def import_gallery(
    client: Client,
    gallery: str,
    source: ItemSource,
    state: Path,
    *,
    size: int = PAGE,
    update_only: bool = False,
    metadata: Sequence[str] = (),
    on_batch: Callable[[Progress], object] | None = None,
) -> Progress:
    """Store the rows of a source, batch by batch; resumes from the file `state` if it exists. Returns the progress.

    `update_only`: store only embeddings of existing items and keep their metadata. `metadata`: the fields that
    `Progress.fields` counts. `on_batch`: called after each batch.

    Raises:
        InvalidArgument: the state cannot be written, so nothing was stored; or as `resume`.
        Problem, Unreachable: the service refuses a batch or is unreachable; the import can be resumed.
    """
    progress = resume(client, gallery, source, state, update_only=update_only)
    progress.fields = dict.fromkeys(metadata, 0) | progress.fields
    # It was killed after the last batch of a source whose last cursor is null: nothing is left to read.
    ended = progress.read > 0 and progress.cursor is None
    ids = StoredIds(ids_file(state), progress)
    _check_writable(state)
    for batch in () if ended else source.batches(size, progress.cursor):
        progress.read += batch.read
        progress.count_fields(batch.metadata)
        for reason, count in batch.skipped.items():
            progress.skip(reason, count)
        for part in _split_duplicates(batch):
            _send(client, gallery, part, ids, progress)
        progress.cursor = batch.cursor
        ids.save()
        _write(state, json.dumps(asdict(progress)))
        if on_batch is not None:
            on_batch(progress)
    state.unlink(missing_ok=True)
    ids.forget()
    return progress


def _check_writable(state: Path) -> None:
    """Check, before anything is stored, that progress can be kept. Raises InvalidArgument."""
    try:
        (beside := state.with_name(f"{state.name}.new")).touch()
        beside.unlink()
    except OSError as error:
        why = f"the position of the import cannot be kept in {state} ({error.strerror}): --state FILE names another"
        raise InvalidArgument(why, pointer="/state") from error


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text)
    beside.replace(path)


DIGEST = 16
"""Bytes of an id's digest; in memory each takes a hundred bytes, however long the id."""
TEXT = 255
"""Stands for a version's number: a text, which the service embeds."""


class StoredIds:
    """The ids that an import has stored so far, by version.

    The file has a record for each: the version's number in `Progress.versions`, or TEXT, and the id's digest.
    """

    def __init__(self, file: Path, progress: Progress) -> None:
        self._file, self._progress = file, progress
        self._held: defaultdict[int, set[bytes]] = defaultdict(set)
        self._unsaved = bytearray()
        kept = file.read_bytes() if progress.ids_bytes else b""
        for start in range(0, progress.ids_bytes, 1 + DIGEST):
            self._held[kept[start]].add(kept[start + 1 : start + 1 + DIGEST])

    def add(self, key: str, version: str | None) -> None:
        """Record a stored embedding."""
        if version not in self._progress.versions:
            self._progress.versions.append(version)
        self._add(self._progress.versions.index(version), key)

    def add_text(self, key: str) -> None:
        """Record a stored text."""
        self._add(TEXT, key)

    def holds(self, key: str, version: str | None) -> bool:
        """Whether the item has an embedding of this version, or a text; then a further row is a duplicate."""
        numbers = [TEXT, *(number for number, name in enumerate(self._progress.versions) if name == version)]
        digest = _digest(key)
        return any(digest in self._held[number] for number in numbers)

    def __contains__(self, key: str) -> bool:
        digest = _digest(key)
        return any(digest in held for held in self._held.values())

    def save(self) -> None:
        """Append the new records; overwrites what a killed process wrote beyond `Progress.ids_bytes`."""
        with self._file.open("r+b" if self._progress.ids_bytes else "wb") as file:
            file.seek(self._progress.ids_bytes)
            file.write(self._unsaved)
            file.truncate()
        self._progress.ids_bytes += len(self._unsaved)
        self._unsaved.clear()

    def forget(self) -> None:
        """Remove the file."""
        self._file.unlink(missing_ok=True)

    def _add(self, number: int, key: str) -> None:
        digest = _digest(key)
        self._held[number].add(digest)
        self._unsaved += bytes([number]) + digest


def _digest(key: str) -> bytes:
    return blake2b(key.encode(errors="surrogatepass"), digest_size=DIGEST).digest()


def _split_duplicates(batch: Batch) -> Iterator[Batch]:
    """Split a batch so that each part has an id once: the result of a row is known before its id is sent again."""
    met: Counter[str] = Counter()
    turns: dict[int, list[int]] = {}
    for row, key in enumerate(batch.ids):
        turns.setdefault(met[key], []).append(row)
        met[key] += 1
    yield from map(batch.take, turns.values()) if len(turns) > 1 else (batch,)


def _send(client: Client, gallery: str, batch: Batch, ids: StoredIds, progress: Progress) -> None:
    """Send the vectors of a batch by version. An item's first one must be reachable: refused ones are sent again."""
    known = {row for row, key in enumerate(batch.ids) if key in ids}
    stored: set[int] = set()
    waiting = sorted(batch.columns, key=lambda column: column.origin == "transformed")
    why: dict[tuple[int, str | None], ItemError] = {}
    while waiting:
        late: list[Column] = []
        before = len(stored)
        for column in (_finite(one, batch, progress) for one in waiting):
            again = [row for row in column.rows.tolist() if ids.holds(batch.ids[row], column.version)]
            fresh = column.take(np.flatnonzero(~np.isin(column.rows, again)))
            errors = {row: _duplicate(batch.ids[row]) for row in again}
            errors |= _store(client, gallery, batch, fresh, known | stored, progress)
            for row in column.rows.tolist():
                why.pop((row, column.version), None)
                if row not in errors:
                    stored.add(row)
                    ids.add(batch.ids[row], column.version)
            why.update({(row, column.version): error for row, error in errors.items()})
            codes = [errors[row].code if row in errors else "" for row in column.rows.tolist()]
            unreached = [n for n, code in enumerate(codes) if code == NO_ROUTE]
            if unreached:
                late.append(column.take(unreached))
        waiting = late if len(stored) > before else []
    stored |= _send_texts(client, gallery, batch, ids, progress)
    progress.stored += len(stored - known)
    # A row counts once per reason, however many versions it has.
    reasons = {
        (row, f"{error.code}, of {version} alone" if row in stored else error.code): error
        for (row, version), error in why.items()
    }
    for (row, reason), error in reasons.items():
        progress.skip(reason, example=f"{batch.ids[row]}: {error.detail}")


def _send_texts(client: Client, gallery: str, batch: Batch, ids: StoredIds, progress: Progress) -> set[int]:
    """Send the rows of a batch that are texts without a vector; returns the stored rows."""
    held = {row for column in batch.columns for row in column.rows.tolist()}
    texts = enumerate(() if progress.update_only else batch.texts)
    bare = [row for row, text in texts if text is not None and row not in held]
    errors = {row: _duplicate(batch.ids[row]) for row in bare if batch.ids[row] in ids}
    errors |= _store_texts(client, gallery, batch, [row for row in bare if row not in errors], progress)
    for row, error in errors.items():
        progress.skip(error.code, example=f"{batch.ids[row]}: {error.detail}")
    stored = set(bare) - set(errors)
    for row in stored:
        ids.add_text(batch.ids[row])
    return stored


def _duplicate(key: str) -> ItemError:
    return ItemError(index=0, id=key, code=DUPLICATE_ID, detail="an earlier row with this id is stored", pointer="/id")


def _finite(column: Column, batch: Batch, progress: Progress) -> Column:
    good = np.isfinite(column.vectors).all(axis=1)
    if good.all():
        return column
    bad = column.rows[~good].tolist()
    progress.skip("not finite", len(bad), f"{batch.ids[bad[0]]}: its vector has NaN or infinity")
    return column.take(np.flatnonzero(good))


def _store(
    client: Client, gallery: str, batch: Batch, column: Column, known: set[int], progress: Progress
) -> dict[int, ItemError]:
    """Send a column; returns the refused rows with the reason."""
    update_only = progress.update_only
    rows = column.rows.tolist()
    if not rows:
        return {}
    items: list[dict[str, Any]] = []
    for row, vector in zip(rows, column.vectors, strict=True):
        item: dict[str, Any] = {"id": batch.ids[row], "embedding": vector}
        if not update_only and row not in known and batch.metadata[row] is not None:
            item["metadata"] = batch.metadata[row]
        if not update_only and row not in known and batch.texts and batch.texts[row] is not None:
            item["text"] = batch.texts[row]
        items.append(item)
    send = client.put_embeddings if update_only else client.ingest_embeddings
    return _send_rows(
        rows, items, lambda some: send(gallery, some, version=column.version, origin=column.origin), progress
    )


def _send_rows(
    rows: Sequence[int], items: Sequence[T], send: Callable[[Sequence[T]], IngestResult], progress: Progress
) -> dict[int, ItemError]:
    """Send the items of these rows; returns the refused rows with the reason."""
    done = ingest_in_halves(send, items)
    progress.new += done.new
    return {rows[error.index]: error for error in done.errors}


def _store_texts(
    client: Client, gallery: str, batch: Batch, rows: Sequence[int], progress: Progress
) -> dict[int, ItemError]:
    """Send rows that are texts, which the current version embeds; returns the refused rows with the reason."""
    if not rows:
        return {}
    items = [TextItem(batch.ids[row], batch.texts[row] or "", batch.metadata[row]) for row in rows]
    return _send_rows(rows, items, lambda some: client.ingest_texts(gallery, some), progress)


@dataclass(frozen=True)
class ExportResult:
    """The result of an export. `changed`: the gallery was written to during it, so the file is not one snapshot.

    `damaged`: number of embeddings left out because the service cannot read them.
    """

    changed: bool
    damaged: int


def export_gallery(
    client: Client, gallery: str, path: Path, on_batch: Callable[[int], object] | None = None
) -> ExportResult:
    """Write all items with their vectors to a Parquet file, which is renamed into place at the end. Needs pyarrow."""
    import pyarrow.parquet as pq

    before = client.gallery(gallery)
    pages = _pages(client, gallery)
    first, damaged = next(pages)
    about = {"gallery": gallery, "current": before.current, "seq": before.seq, "items": before.items}
    schema = first.schema.with_metadata({"regraft": json.dumps(about)})
    beside = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        with pq.ParquetWriter(beside, schema) as writer:
            for page, lost in chain([(first, 0)], pages):
                damaged += lost
                writer.write_table(page.cast(schema))
                if on_batch is not None:
                    on_batch(page.num_rows)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return ExportResult(client.gallery(gallery).seq != before.seq, damaged)


def _pages(client: Client, gallery: str) -> Iterator[tuple[Any, int]]:
    """The items of a gallery as tables with equal columns, each with the number of damaged embeddings left out.

    Vectors are variable-size lists, which every reader of Parquet supports.
    """
    import pyarrow as pa

    versions: Sequence[str] = ()
    cursor: str | None = None
    while True:
        raw = client.embeddings_table(gallery, versions=versions, limit=PAGE, cursor=cursor, with_text=True)
        page = pa.ipc.open_stream(io.BytesIO(raw)).read_all()
        metadata: Mapping[bytes, bytes] = page.schema.metadata or {}
        # The first page fixes the columns; versions added later are not exported.
        versions = [name.removeprefix("vector:") for name in page.column_names if name.startswith("vector:")]
        lists = [pa.field(f.name, pa.list_(pa.float32())) if f.name.startswith("vector:") else f for f in page.schema]
        yield page.cast(pa.schema(lists)), len(json.loads(metadata.get(b"damaged", b"[]")))
        cursor = metadata.get(b"next", b"").decode()
        if not cursor:
            return
