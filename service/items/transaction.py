"""Store a batch of any kind in one transaction, provided that the version it was encoded for is still current.

All items are checked and encoded, and images and texts written, before the transaction, so nothing is half applied. An
invalid item is reported by its index and the others are stored, unless the batch is atomic or no item is valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from index.errors import RegraftError
from index.version import Origin
from service.backfills.supplied import tracking_supplied
from service.errors import ItemExists, UnknownGallery
from service.items.batch import IngestBatch, ItemDraft
from service.registry.loaded_version import LoadedVersion
from service.registry.storing import StoredItems, UpdateMode, store
from service.runtime import Runtime
from service.store.galleries import partitions
from service.store.galleries.gallery import gallery_named, gallery_row, take_seq
from service.store.galleries.items import NewItem, rows_of
from service.store.image_store.blobs import StoreUnreachable


@dataclass(frozen=True)
class Ingested:
    """The outcome of a batch."""

    stored: StoredItems
    seq: int
    errors: Sequence[Mapping[str, Any]]
    warnings: Sequence[Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """The response's body."""
        kinds = ("new", "updated", "replaced")
        counts = {"stored": self.stored.count, **{kind: len(getattr(self.stored, kind)) for kind in kinds}}
        others = {"failed": len(self.errors), "seq": self.seq, "errors": self.errors, "warnings": self.warnings}
        return {**counts, **others}


@dataclass(frozen=True)
class IngestOptions:
    """How a batch is stored: atomically or not, what happens to existing items, and the origin of its embeddings.

    Transformed vectors that are copied from another gallery keep this origin, so that `reencode` and `supplied`
    backfills replace them by the version's own.
    """

    atomic: bool = False
    mode: UpdateMode = UpdateMode.UPSERT
    origin: Origin = Origin.SUPPLIED


@dataclass(frozen=True)
class Destination:
    """The gallery of a batch; its current version must still be `current` when the batch is written."""

    service: Runtime
    gallery_id: int
    current: LoadedVersion
    options: IngestOptions


class CurrentChanged(Exception):
    """Another version became current while this batch was encoded."""


def refuse_existing(to: Destination, batch: IngestBatch) -> None:
    """With `INSERT_ONLY`, refuse items that exist already before they are encoded."""
    if to.options.mode is not UpdateMode.INSERT_ONLY:
        return
    with to.service.database.read() as connection:
        rows = rows_of(connection, to.gallery_id, [draft.id for draft in batch.drafts])
    existing = {row.external_id for row in rows if not row.deleted}
    for draft in (draft for draft in batch.drafts if draft.id in existing):
        batch.refuse(draft.index, draft.id, ItemExists(pointer="/id"))
    batch.drafts = [draft for draft in batch.drafts if draft.id not in existing]


def store_batch(
    to: Destination,
    version: LoadedVersion,
    items: Sequence[tuple[ItemDraft, NewItem]],
    batch: IngestBatch,
    files: Sequence[str] = (),
) -> Ingested:
    """Write the valid items, each with an embedding by `version`; if that fails by one of these errors, remove `files`.

    Raises:
        CurrentChanged: another version is current by now; nothing is written.
        ItemsRefused: no item is valid, or the batch is atomic and one is invalid.
    """
    service, gallery_id, current = to.service, to.gallery_id, to.current
    with _removed_if_refused(service, files):
        partitions.make(service.database, gallery_id, version.id)
        with service.database.write() as connection:
            first = take_seq(connection, gallery_id, len(items))
            row = gallery_row(connection, gallery_id)
            if row is None or row.current_id != current.id:
                raise CurrentChanged
            new = [item for _, item in items]
            with tracking_supplied(connection, gallery_id, [item.external_id for item in new]):
                mode = to.options.mode
                stored = store(connection, service.registry, gallery_id, current, version, new, first, mode=mode)
            for draft, _ in items:
                if draft.id in stored.refused:
                    batch.refuse(draft.index, draft.id, stored.refused[draft.id])
            batch.settle(to.options.atomic)
    service.blobs.remove(stored.orphans)
    service.replica.apply_added(gallery_id, stored.added)
    return Ingested(stored, first + stored.count - 1, batch.errors, batch.image_losses.as_json())


@contextmanager
def _removed_if_refused(service: Runtime, files: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except (CurrentChanged, RegraftError):
        service.blobs.remove(files)
        raise


def store_contents(
    to: Destination,
    version: LoadedVersion,
    items: Sequence[tuple[ItemDraft, NewItem]],
    contents: Iterable[bytes],
    kinds: Iterable[str],
    batch: IngestBatch,
    others: Sequence[tuple[ItemDraft, NewItem]] = (),
) -> Ingested:
    """Write the files of images or texts, then store their items, and `others` that have none.

    `kinds`: as `Blobs.write` takes them. Raises as `store_batch` and `write_contents`.
    """
    keys = write_contents(to.service, to.gallery_id, contents, kinds)
    with_blobs = [(draft, item._replace(blob=key)) for (draft, item), key in zip(items, keys, strict=True)]
    return store_batch(to, version, [*with_blobs, *others], batch, keys)


def write_contents(service: Runtime, gallery_id: int, contents: Iterable[bytes], kinds: Iterable[str]) -> list[str]:
    """Write images or texts of a gallery, as `Blobs.write`. Raises UnknownGallery if the gallery was deleted."""
    try:
        return service.blobs.write(gallery_id, contents, kinds)
    except StoreUnreachable:
        # Deleting a gallery removes its folder while others may write there.
        with service.database.lookup() as connection:
            if gallery_row(connection, gallery_id) is None:
                raise UnknownGallery("the gallery was deleted") from None
        raise


def while_current_holds(
    service: Runtime, name: str, options: IngestOptions, attempt: Callable[[Destination], Ingested]
) -> Ingested:
    """Run `attempt` with the gallery's current version; repeat it if another became current meanwhile."""
    while True:
        try:
            return attempt(Destination(service, *_destination(service, name), options))
        except CurrentChanged:
            continue


def _destination(service: Runtime, name: str) -> tuple[int, LoadedVersion]:
    with service.database.lookup() as connection:
        row = gallery_named(connection, name)
    return row.id, service.registry.current_of(row)
