"""INGEST PATH: check everything, encode, write the images, then one transaction; nothing is half applied.

A bad item is reported by its index and the rest is stored, unless the batch is atomic or nothing is left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, cast

from numpy.typing import NDArray
from starlette.datastructures import UploadFile

from index.decoding import Decoder
from index.encoder import BATCH
from index.errors import RegraftError
from index.image import Pixels
from index.item_id import LEGAL_ID, MAX_ID, are_plain_ids, is_item_id
from index.space import Space, Vectors, space_from_json
from service.errors import (
    BodyTooLarge,
    DuplicateId,
    InvalidBody,
    InvalidItem,
    ItemExists,
    ItemsRefused,
    NoCurrentVersion,
)
from service.http.forms import Form
from service.http.npy import read_npy
from service.http.parsing import parse_any_json
from service.http.stored_json import are_surely_stored, why_not_stored
from service.registry.embedding import pointing, read_pixels
from service.registry.registry import LoadedVersion
from service.registry.sight import Sight
from service.registry.storing import StoredItems, store
from service.runtime import Runtime
from service.schemas import check_embeddings, take_object
from service.settings import Settings
from service.store.repository import NewItem, gallery_named, gallery_row, rows_of, take_seq


@dataclass(slots=True)
class ItemDraft:
    """An item as the client described it: `content` is its image's file name or its embedding, still unchecked.

    `metadata` None: none were named.
    """

    index: int
    id: str
    metadata: dict[str, Any] | None
    content: Any


@dataclass
class IngestBatch:
    """What is known about a batch: items that are good so far, the errors of the others, and what was not seen."""

    size: int
    drafts: list[ItemDraft] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    sight: Sight = field(default_factory=Sight)

    def refuse(self, index: int, item_id: object, error: RegraftError) -> None:
        """Note why one item cannot be stored."""
        named = item_id[:MAX_ID] if isinstance(item_id, str) else None
        pointer = f"/items/{index}{error.pointer}"
        self.errors.append(
            {"index": index, "id": named, "code": error.code, "detail": error.message, "pointer": pointer}
        )

    def settle(self, atomic: bool) -> None:
        """Raise ItemsRefused if nothing may be stored."""
        self.errors.sort(key=lambda error: error["index"])
        if len(self.errors) == self.size:
            raise ItemsRefused(f"none of the {self.size} items can be stored", self.errors)
        if atomic and self.errors:
            raise ItemsRefused(
                f"{len(self.errors)} of {self.size} items cannot be stored, and the batch is atomic", self.errors
            )


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


class _CurrentChanged(Exception):
    """Another version was deployed while this batch was encoded for the one before."""


def ingest_images(service: Runtime, name: str, form: Form, atomic: bool, replacing: bool | None = None) -> Ingested:
    """Store images, embedded by the gallery's current version; `replacing` as in `service.registry.storing.store`.

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
        _leave_out(service, gallery_id, batch, replacing)
        items = _encode(batch, files, current, service.decoder)
        batch.settle(atomic)
        keys = service.blobs.write(gallery_id, (_read(files[draft.content]) for draft, _ in items))
        stored = [(draft, item._replace(blob=key)) for (draft, item), key in zip(items, keys, strict=True)]
        try:
            return _store(service, gallery_id, current, current, stored, batch, atomic, replacing)
        except (_CurrentChanged, RegraftError):
            service.blobs.remove(keys)
            raise

    return _while_current_holds(attempt)


def ingest_embeddings(service: Runtime, name: str, raw: bytes, atomic: bool, replacing: bool | None = None) -> Ingested:
    """Store embeddings made elsewhere, of the named version or else the gallery's current one.

    Raises:
        UnknownGallery, UnknownVersion: there is no such gallery or version.
        NoCurrentVersion: nothing is deployed yet.
        InvalidBody: the JSON is not what this route reads.
        ItemsRefused: no item is good, or the batch is atomic and one is bad.
    """

    def attempt() -> Ingested:
        gallery_id, current = _open(service, name)
        version, batch = _described(service, raw, current)
        items = _check_embeddings(batch, version.card.dim, space_from_json(version.card.space))
        batch.settle(atomic)
        return _store(service, gallery_id, current, version, items, batch, atomic, replacing)

    return _while_current_holds(attempt)


def ingest_array(service: Runtime, name: str, form: Form, atomic: bool, replacing: bool | None = None) -> Ingested:
    """The same of a form with an array, whose rows are the embeddings of the items."""
    assert form.array is not None
    given = read_npy(_read(form.array), "/embeddings")

    def attempt() -> Ingested:
        gallery_id, current = _open(service, name)
        version = _version(service, form.fields.get("version", current.name))
        batch = read_batch(parse_any_json(_listed(form)), "", service.settings)
        if len(given) != batch.size or given.shape[1] != version.card.dim:
            needed = f"{batch.size} rows of {version.card.dim} numbers, as there are items"
            raise InvalidBody(f"embeddings must be {needed}, not {given.shape}", pointer="/embeddings")
        items = _check_embeddings(batch, version.card.dim, version.space, given)
        batch.settle(atomic)
        return _store(service, gallery_id, current, version, items, batch, atomic, replacing)

    return _while_current_holds(attempt)


def _described(service: Runtime, raw: bytes, current: LoadedVersion) -> tuple[LoadedVersion, IngestBatch]:
    """The version of a batch in JSON, and the batch."""
    body = take_object(parse_any_json(raw), {"version", "items"}, "")
    version = _version(service, body.get("version", current.name))
    return version, read_batch(body.get("items"), "embedding", service.settings)


def read_batch(listed: object, content: str, settings: Settings) -> IngestBatch:
    """Check the shape of a batch's items, whose content is in the field `content`, if any; bad ones become errors.

    Raises:
        InvalidBody: it is no list, or an empty one.
        BodyTooLarge: more than `settings.max_batch` items.
    """
    max_batch = settings.max_batch
    if not isinstance(listed, list) or not listed:
        raise InvalidBody("items must be a JSON list of at least one item", pointer="/items")
    if len(listed) > max_batch:
        raise BodyTooLarge(f"items holds {len(listed)} items; at most {max_batch} in one request", pointer="/items")
    batch = IngestBatch(len(listed))
    if (drafts := _plain_drafts(listed, content, settings.max_metadata_bytes)) is not None:
        batch.drafts = drafts
        return batch
    seen: set[str] = set()
    for index, value in enumerate(listed):
        try:
            draft = _draft(index, value, content, settings.max_metadata_bytes)
            if draft.id in seen:
                raise DuplicateId(f"an earlier item of this batch has the id {draft.id!r}", pointer="/id")
        except RegraftError as error:
            batch.refuse(index, value.get("id") if isinstance(value, dict) else None, error)
        else:
            batch.drafts.append(draft)
            seen.add(draft.id)
    return batch


def _plain_drafts(listed: list[Any], content: str, max_metadata: int) -> list[ItemDraft] | None:
    """Items of which all is good, as is the rule, checked all at once; None: look at each."""
    if set(map(type, listed)) != {dict} or not ({"id", "metadata", content} - {""}).issuperset(
        chain.from_iterable(listed)
    ):
        return None
    ids, metadata = [one.get("id") for one in listed], [one["metadata"] for one in listed if "metadata" in one]
    contents = [one[content] for one in listed if content in one] if content else [None] * len(listed)
    if len(contents) < len(listed) or not are_plain_ids(ids) or len(set(ids)) < len(ids):
        return None
    if not {dict}.issuperset(map(type, metadata)) or not are_surely_stored(metadata, max_metadata):
        return None
    return list(map(ItemDraft, count(), ids, (one.get("metadata") for one in listed), contents))


def _draft(index: int, value: object, content: str, max_metadata: int) -> ItemDraft:
    fields = take_object(value, {"id", "metadata", content} - {""}, "")
    given = fields.get("id")
    if not is_item_id(given):
        raise InvalidItem(f"id must be {LEGAL_ID}", pointer="/id")
    if content and content not in fields:
        raise InvalidItem(f"{content} is missing", pointer=f"/{content}")
    metadata = fields.get("metadata", {})
    if not isinstance(metadata, dict):
        raise InvalidItem("metadata must be a JSON object", pointer="/metadata")
    if why := why_not_stored(metadata, max_metadata):
        raise InvalidItem(f"metadata {why}", pointer="/metadata")
    return ItemDraft(index, given, fields.get("metadata"), fields.get(content))


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


def _leave_out(service: Runtime, gallery_id: int, batch: IngestBatch, replacing: bool | None) -> None:
    """Refuse the items that are there before they are encoded, where they would be in the end."""
    if replacing is not False:
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
    batch: IngestBatch, dim: int, space: Space, rows: NDArray[Any] | None = None
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
            NewItem(draft.id, draft.metadata, "supplied", vector),
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
    atomic: bool,
    replacing: bool | None,
) -> Ingested:
    with service.database.write() as connection:
        first = take_seq(connection, gallery_id, len(items))
        row = gallery_row(connection, gallery_id)
        if row is None or row.current_id != current.id:
            raise _CurrentChanged
        new = [item for _, item in items]
        stored = store(connection, service.registry, gallery_id, current, version, new, first, replacing=replacing)
        for draft, _ in items:
            if draft.id in stored.refused:
                batch.refuse(draft.index, draft.id, stored.refused[draft.id])
        batch.settle(atomic)
    service.blobs.remove(stored.orphans)
    service.replica.refresh(gallery_id)
    return Ingested(stored, first + stored.count - 1, batch.errors, batch.sight.as_json())


def _while_current_holds(attempt: Callable[[], Ingested]) -> Ingested:
    while True:
        try:
            return attempt()
        except _CurrentChanged:
            continue
