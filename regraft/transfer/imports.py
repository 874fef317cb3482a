"""Import a source into a gallery, batch by batch; see `import_gallery`.

An import can be resumed after a kill (`import_state`). The unfinished batch is sent again, with the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from regraft.client import Client, TextItem
from regraft.connection import Problem
from regraft.ingest_batch import ingest_in_halves
from regraft.models import IngestResult, ItemError
from regraft.sources.base import Batch, Column, ItemSource
from regraft.transfer.import_state import ImportProgress, StoredIds, locked_ids, read_progress, save

PAGE = 1000
NO_ROUTE, DUPLICATE_ID, NO_TEXT_ENTRANCE = "no_route", "duplicate_id", "no_text_entrance"
T = TypeVar("T")


def import_gallery(
    client: Client,
    gallery: str,
    source: ItemSource,
    state: Path,
    *,
    size: int = PAGE,
    update_only: bool = False,
    metadata: Sequence[str] = (),
    on_batch: Callable[[ImportProgress], object] | None = None,
) -> ImportProgress:
    """Store the rows of a source, batch by batch; resumes from the file `state` if it exists. Returns the progress.

    `update_only`: store only embeddings of existing items and keep their metadata. `metadata`: the fields that
    `ImportProgress.fields` counts. `on_batch`: called after each batch.

    Raises:
        InvalidArgument: as `locked_ids` and `read_progress`.
        Problem, Unreachable: the service refuses a batch or is unreachable; the import can be resumed.
    """
    with locked_ids(state) as file:
        progress = read_progress(client, gallery, source, state, update_only=update_only)
        progress.fields = dict.fromkeys(metadata, 0) | progress.fields
        # It was killed after the last batch of a source whose last cursor is null: nothing is left to read.
        ended = progress.read > 0 and progress.cursor is None
        ids = StoredIds(file, progress)
        for batch in () if ended else source.batches(size, progress.cursor):
            progress.read += batch.read
            progress.count_fields(batch.metadata)
            for reason, count in batch.skipped.items():
                progress.skip(reason, count)
            for part in _split_duplicates(batch):
                _send(client, gallery, part, ids, progress)
            progress.cursor = batch.cursor
            ids.save()
            save(state, progress)
            if on_batch is not None:
                on_batch(progress)
        state.unlink(missing_ok=True)
        ids.forget()
    return progress


def _split_duplicates(batch: Batch) -> Iterator[Batch]:
    """Split a batch so that each part has an id once: the result of a row is known before its id is sent again."""
    met: Counter[str] = Counter()
    turns: dict[int, list[int]] = {}
    for row, key in enumerate(batch.ids):
        turns.setdefault(met[key], []).append(row)
        met[key] += 1
    yield from map(batch.take, turns.values()) if len(turns) > 1 else (batch,)


def _send(client: Client, gallery: str, batch: Batch, ids: StoredIds, progress: ImportProgress) -> None:
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


def _send_texts(client: Client, gallery: str, batch: Batch, ids: StoredIds, progress: ImportProgress) -> set[int]:
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


def _finite(column: Column, batch: Batch, progress: ImportProgress) -> Column:
    good = np.isfinite(column.vectors).all(axis=1)
    if good.all():
        return column
    bad = column.rows[~good].tolist()
    progress.skip("not finite", len(bad), f"{batch.ids[bad[0]]}: its vector has NaN or infinity")
    return column.take(np.flatnonzero(good))


def _store(
    client: Client, gallery: str, batch: Batch, column: Column, known: set[int], progress: ImportProgress
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
        if not update_only and row not in known and batch.texts and (batch.texts[row] or "").strip():
            item["text"] = batch.texts[row]  # a blank one would be refused, and the vector with it
        items.append(item)
    send = client.put_embeddings if update_only else client.ingest_embeddings
    return _send_rows(
        rows, items, lambda some: send(gallery, some, version=column.version, origin=column.origin), progress
    )


def _send_rows(
    rows: Sequence[int], items: Sequence[T], send: Callable[[Sequence[T]], IngestResult], progress: ImportProgress
) -> dict[int, ItemError]:
    """Send the items of these rows; returns the refused rows with the reason."""
    done = ingest_in_halves(send, items)
    progress.new += done.new
    return {rows[error.index]: error for error in done.errors}


def _store_texts(
    client: Client, gallery: str, batch: Batch, rows: Sequence[int], progress: ImportProgress
) -> dict[int, ItemError]:
    """Send rows that are texts, which the current version embeds; returns the refused rows with the reason."""
    if not rows:
        return {}
    items = [TextItem(batch.ids[row], batch.texts[row] or "", batch.metadata[row]) for row in rows]
    try:
        return _send_rows(rows, items, lambda some: client.ingest_texts(gallery, some), progress)
    except Problem as problem:
        if problem.code != NO_TEXT_ENTRANCE:
            raise
        # Of the batch, not of a row: but rows that lack a vector must not end an import of vectors.
        return {
            row: ItemError(index=0, id=batch.ids[row], code=problem.code, detail=problem.detail, pointer="/text")
            for row in rows
        }
