"""INGEST PATH: check everything, encode, write the images, then one transaction; nothing is half applied.

A bad item is reported by its index and the rest is stored, unless the batch is atomic or nothing is left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from numpy.typing import NDArray
from starlette.datastructures import UploadFile

from index.decoding import Decoder
from index.encoder import BATCH
from index.errors import RegraftError
from index.image import Pixels
from index.space import Space, Vectors, space_from_json
from index.version import Origin
from service.backfills.supplied import counting
from service.errors import (
    InvalidBody,
    InvalidItem,
    ItemExists,
    NoCurrentVersion,
)
from service.http.arrow import read_items
from service.http.forms import Form
from service.http.ingest_batch import IngestBatch, ItemDraft, read_batch
from service.http.npy import read_npy
from service.http.parsing import parse_any_json
from service.registry.embedding import pointing, read_pixels
from service.registry.registry import LoadedVersion
from service.registry.storing import StoredItems, UpdateMode, store
from service.runtime import Runtime
from service.schemas import check_embeddings, take_object
from service.store.repository import NewItem, gallery_named, gallery_row, rows_of, take_seq


@dataclass(frozen=True)
class Ingested:
    """What became of a batch."""

    stored: StoredItems
    seq: int
    errors: Sequence[Mapping[str, Any]]
    warnings: Sequence[Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """The response."""
        kinds = ("new", "updated", "replaced")
        counts = {"stored": self.stored.count, **{kind: len(getattr(self.stored, kind)) for kind in kinds}}
        rest = {"failed": len(self.errors), "seq": self.seq, "errors": self.errors, "warnings": self.warnings}
        return {**counts, **rest}


@dataclass(frozen=True)
class IngestOptions:
    """How a batch is stored: all or nothing, what of items that are there, and how its embeddings came about.

    Vectors that a transform made stay known as such where they are brought from another gallery: `reencode` and
    `supplied` backfills put what the version itself says in their place.
    """

    atomic: bool = False
    mode: UpdateMode = UpdateMode.UPSERT
    origin: Origin = Origin.SUPPLIED


class _CurrentChanged(Exception):
    """Another version was deployed while this batch was encoded for the one before."""


def ingest_images(service: Runtime, name: str, form: Form, options: IngestOptions) -> Ingested:
    """Store images, embedded by the gallery's current version; `options` say how.

    Raises:
        UnknownGallery: there is no such gallery.
        NoCurrentVersion: nothing is deployed yet.
        NoEncoder: the current version takes embeddings only.
        InvalidBody: the form is not what this route reads.
        ItemsRefused: no item is good, or the batch is atomic and one is bad.
    """

    def attempt() -> Ingested:
        gallery_id, current = _open(service, name)
        batch = read_batch(parse_any_json(_listed(form)), "image", service.settings)
        files = _files(form, batch)
        _leave_out(service, gallery_id, batch, options)
        items = _encode(batch, files, current, service.decoder)
        batch.settle(options.atomic)
        keys = service.blobs.write(gallery_id, (_read(files[draft.content]) for draft, _ in items))
        stored = [(draft, item._replace(blob=key)) for (draft, item), key in zip(items, keys, strict=True)]
        try:
            return _store(service, gallery_id, current, current, stored, batch, options)
        except (_CurrentChanged, RegraftError):
            service.blobs.remove(keys)
            raise

    return _while_current_holds(attempt)


def ingest_embeddings(service: Runtime, name: str, raw: bytes, options: IngestOptions) -> Ingested:
    """Store embeddings made elsewhere, of the named version or else the gallery's current one.

    Raises:
        UnknownGallery, UnknownVersion: there is no such gallery or version.
        NoCurrentVersion: nothing is deployed yet.
        InvalidBody: the JSON is not what this route reads.
        ItemsRefused: no item is good, or the batch is atomic and one is bad.
    """

    def attempt() -> Ingested:
        gallery_id, current = _open(service, name)
        version, batch = _described(service, raw, current, options)
        items = _check_embeddings(batch, version.card.dim, space_from_json(version.card.space), options.origin)
        batch.settle(options.atomic)
        return _store(service, gallery_id, current, version, items, batch, options)

    return _while_current_holds(attempt)


def ingest_array(service: Runtime, name: str, form: Form, options: IngestOptions) -> Ingested:
    """The same of a form with an array, whose rows are the embeddings of the items."""
    assert form.array is not None
    given, listed = read_npy(_read(form.array), "/embeddings"), parse_any_json(_listed(form))
    return _ingest_rows(service, name, form.fields.get("version"), listed, given, "/embeddings", options)


def ingest_table(service: Runtime, name: str, raw: bytes, version: str | None, options: IngestOptions) -> Ingested:
    """The same of a table in Arrow's format."""
    listed, given = read_items(raw, service.settings.max_batch)
    return _ingest_rows(service, name, version, listed, given, "/embedding", options)


def _ingest_rows(
    service: Runtime,
    name: str,
    version_name: str | None,
    listed: object,
    given: NDArray[Any],
    pointer: str,
    options: IngestOptions,
) -> Ingested:
    """Items `listed` as JSON has them, without embeddings, and those: the rows of `given` (N, D)."""

    def attempt() -> Ingested:
        gallery_id, current = _open(service, name)
        version = _version(service, current.name if version_name is None else version_name)
        batch = _embedded(listed, "", service, options)
        if len(given) != batch.size or given.shape[1] != version.card.dim:
            needed = f"{batch.size} rows of {version.card.dim} numbers, as there are items"
            raise InvalidBody(f"embeddings must be {needed}, not {given.shape}", pointer=pointer)
        items = _check_embeddings(batch, version.card.dim, version.space, options.origin, given)
        batch.settle(options.atomic)
        return _store(service, gallery_id, current, version, items, batch, options)

    return _while_current_holds(attempt)


def _described(
    service: Runtime, raw: bytes, current: LoadedVersion, options: IngestOptions
) -> tuple[LoadedVersion, IngestBatch]:
    """The version of a batch in JSON, and the batch."""
    body = take_object(parse_any_json(raw), {"version", "items"}, "")
    version = _version(service, body.get("version", current.name))
    return version, _embedded(body.get("items"), "embedding", service, options)


def _embedded(listed: object, content: str, service: Runtime, options: IngestOptions) -> IngestBatch:
    """A batch of embeddings. Those that are only to be added to what is there come without metadata."""
    batch = read_batch(listed, content, service.settings)
    if options.mode is UpdateMode.UPDATE_ONLY:
        for draft in (draft for draft in batch.drafts if draft.metadata is not None):
            batch.refuse(
                draft.index, draft.id, InvalidItem("metadata stay as they are: leave them out", pointer="/metadata")
            )
        batch.drafts = [draft for draft in batch.drafts if draft.metadata is None]
    return batch


def _open(service: Runtime, name: str) -> tuple[int, LoadedVersion]:
    """The gallery's id and its current version."""
    with service.database.lookup() as connection:
        row = gallery_named(connection, name)
    if row.current_id is None:
        raise NoCurrentVersion(f"gallery {name!r} has no current version: deploy one first")
    return row.id, service.registry.by_id(row.current_id)


def _version(service: Runtime, name: object) -> LoadedVersion:
    if not isinstance(name, str):
        raise InvalidBody("version must be the name of a registered version", pointer="/version")
    return service.registry.named(name)


def _listed(form: Form) -> str:
    if "items" not in form.fields:
        raise InvalidBody("the form needs the field 'items', a JSON list", pointer="/items")
    return form.fields["items"]


def _files(form: Form, batch: IngestBatch) -> dict[str, UploadFile]:
    """The files by name; items that name none become errors."""
    files = {file.filename or "": file for file in form.files}
    if len(files) < len(form.files):
        raise InvalidBody("two files of the form have the same name", pointer="/images")
    for draft in [d for d in batch.drafts if not isinstance(d.content, str) or d.content not in files]:
        batch.drafts.remove(draft)
        missing = InvalidItem("image must be the file name of one of the form's files", pointer="/image")
        batch.refuse(draft.index, draft.id, missing)
    return files


def _leave_out(service: Runtime, gallery_id: int, batch: IngestBatch, options: IngestOptions) -> None:
    """Refuse the items that are there before they are encoded, where they would be in the end."""
    if options.mode is not UpdateMode.INSERT_ONLY:
        return
    with service.database.read() as connection:
        rows = rows_of(connection, gallery_id, [draft.id for draft in batch.drafts])
    there = {row.external_id for row in rows if not row.deleted}
    for draft in (draft for draft in batch.drafts if draft.id in there):
        batch.refuse(draft.index, draft.id, ItemExists(pointer="/id"))
    batch.drafts = [draft for draft in batch.drafts if draft.id not in there]


def _encode(
    batch: IngestBatch, files: Mapping[str, UploadFile], current: LoadedVersion, decoder: Decoder
) -> list[tuple[ItemDraft, NewItem]]:
    """Decode and embed a few images at a time, so that memory holds encoder inputs of one step only."""
    blocks = (batch.drafts[start : start + BATCH] for start in range(0, len(batch.drafts), BATCH))
    return [item for block in blocks for item in _encode_block(batch, block, files, current, decoder)]


def _encode_block(
    batch: IngestBatch,
    block: Sequence[ItemDraft],
    files: Mapping[str, UploadFile],
    current: LoadedVersion,
    decoder: Decoder,
) -> list[tuple[ItemDraft, NewItem]]:
    images = current.images()
    spec = images.encoder.spec
    readable: list[tuple[ItemDraft, Pixels]] = []
    for draft in block:
        try:
            with pointing("/image"):
                note = functools.partial(batch.sight.note, current.name, spec, f"/items/{draft.index}/image")
                readable.append((draft, read_pixels(files[draft.content].file, spec, decoder, note)))
        except RegraftError as error:
            batch.refuse(draft.index, draft.id, error)
    if not readable:
        return []
    rows = images.items(lambda: [pixels for _, pixels in readable])
    return [
        (draft, NewItem(draft.id, draft.metadata, "encoded", vector, side))
        for (draft, _), (vector, side) in zip(readable, rows, strict=True)
    ]


def _read(file: UploadFile) -> bytes:
    file.file.seek(0)
    return file.file.read()


def _check_embeddings(
    batch: IngestBatch, dim: int, space: Space, origin: Origin, rows: NDArray[Any] | None = None
) -> list[tuple[ItemDraft, NewItem]]:
    """All at once when all are good, which is the rule, else one by one to say which are not.

    `rows`: those of an array, by the items' numbers, in place of what the items say.
    The lists of numbers go then: Python's collector of garbage looks at each of a million numbers, and all wait for it.
    """
    drafts, vectors = batch.drafts, None
    given = [draft.content for draft in drafts] if rows is None else rows[[draft.index for draft in drafts]]
    batch.drafts = []
    with suppress(RegraftError):
        vectors = check_embeddings(given, dim, space, "")
    if vectors is None:
        good = [
            (draft, _one_embedding(batch, draft, given[number : number + 1], dim, space))
            for number, draft in enumerate(drafts)
        ]
    else:
        good = list(zip(drafts, vectors, strict=True))
    return [
        (
            draft if rows is not None else replace(draft, content=None),
            NewItem(draft.id, draft.metadata, origin.value, vector),
        )
        for draft, vector in good
        if vector is not None
    ]


def _one_embedding(batch: IngestBatch, draft: ItemDraft, given: object, dim: int, space: Space) -> Vectors | None:
    try:
        (vector,) = check_embeddings(given, dim, space, "/embedding")
    except RegraftError as error:
        error.pointer = "/embedding"
        batch.refuse(draft.index, draft.id, error)
        return None
    else:
        return cast(Vectors, vector)


def _store(
    service: Runtime,
    gallery_id: int,
    current: LoadedVersion,
    version: LoadedVersion,
    items: Sequence[tuple[ItemDraft, NewItem]],
    batch: IngestBatch,
    options: IngestOptions,
) -> Ingested:
    with service.database.write() as connection:
        first = take_seq(connection, gallery_id, len(items))
        row = gallery_row(connection, gallery_id)
        if row is None or row.current_id != current.id:
            raise _CurrentChanged
        new = [item for _, item in items]
        with counting(connection, gallery_id, [item.external_id for item in new]):
            stored = store(connection, service.registry, gallery_id, current, version, new, first, mode=options.mode)
        for draft, _ in items:
            if draft.id in stored.refused:
                batch.refuse(draft.index, draft.id, stored.refused[draft.id])
        batch.settle(options.atomic)
    service.blobs.remove(stored.orphans)
    service.replica.take(gallery_id, stored.added)
    return Ingested(stored, first + stored.count - 1, batch.errors, batch.sight.as_json())


def _while_current_holds(attempt: Callable[[], Ingested]) -> Ingested:
    while True:
        try:
            return attempt()
        except _CurrentChanged:
            continue
