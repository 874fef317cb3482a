"""The ingest path: check all items, encode, write images and texts, then one transaction, so nothing is half applied.

An invalid item is reported by its index and the others are stored, unless the batch is atomic or no item is valid. An
entry point for each kind of body: `ingest_images`, `ingest_json`, `ingest_array` and `ingest_table`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, cast

from numpy.typing import NDArray
from starlette.datastructures import UploadFile

from index.encoders.encoder import BATCH
from index.encoders.image import Pixels
from index.errors import RegraftError
from index.space import Vectors
from index.version import Origin
from service.errors import InvalidBody, InvalidItem
from service.http.arrow import read_items
from service.http.forms import NO_SUCH_FILE, Form
from service.http.ingest_batch import IngestBatch, ItemDraft, read_batch
from service.http.ingest_store import (
    Destination,
    Ingested,
    IngestOptions,
    refuse_existing,
    store_contents,
    while_current_holds,
)
from service.http.ingest_texts import are_texts, encode_texts, ingest_texts, store_embeddings
from service.http.npy import read_npy
from service.http.parsing import parse_any_json
from service.registry.embedding import errors_at, read_pixels
from service.registry.registry import LoadedVersion
from service.registry.storing import UpdateMode
from service.runtime import Runtime
from service.schemas import check_embeddings, take_object
from service.store.blob_keys import TEXT
from service.store.items import NewItem


def ingest_images(service: Runtime, name: str, form: Form, options: IngestOptions) -> Ingested:
    """Store the images and texts of a form, embedded by the gallery's current version.

    Raises:
        UnknownGallery: there is no such gallery.
        NoCurrentVersion: nothing is deployed yet.
        NoEncoder, NoTextEntrance: the current version does not embed images, or texts.
        InvalidBody: the form is invalid.
        ItemsRefused: no item is valid, or the batch is atomic and one is invalid.
    """

    def attempt(to: Destination) -> Ingested:
        batch = read_batch(_listed(form), "image", service.settings, "text", either=True)
        files = _files(form, batch)
        refuse_existing(to, batch)
        images = _encode_images(to, batch, files)
        texts, text_contents = _encode_texts(to, batch)
        batch.settle(options.atomic)
        contents = chain((_read(files[draft.content]) for draft, _ in images), text_contents)
        kinds = chain(repeat("", len(images)), repeat(TEXT))
        return store_contents(to, to.current, [*images, *texts], contents, kinds, batch)

    return while_current_holds(service, name, options, attempt)


def ingest_json(service: Runtime, name: str, raw: bytes, options: IngestOptions) -> Ingested:
    """Store items in JSON: texts, or embeddings made elsewhere, by the named version, by default the current one.

    Raises:
        UnknownGallery, UnknownVersion: there is no such gallery or version.
        NoCurrentVersion: nothing is deployed yet.
        InvalidBody: the JSON is invalid.
        ItemsRefused: no item is valid, or the batch is atomic and one is invalid.
    """

    def attempt(to: Destination) -> Ingested:
        body = take_object(parse_any_json(raw), {"version", "items"}, "")
        if options.mode is not UpdateMode.UPDATE_ONLY and are_texts(body.get("items")):
            return ingest_texts(to, body)
        return _ingest_embeddings(to, body)

    return while_current_holds(service, name, options, attempt)


def ingest_array(service: Runtime, name: str, form: Form, options: IngestOptions) -> Ingested:
    """Store the items of a form whose embeddings are the rows of an array. Raises as `ingest_json`."""
    assert form.array is not None
    rows, listed = read_npy(_read(form.array), "/embeddings"), _listed(form)
    return _ingest_rows(service, name, form.fields.get("version"), listed, rows, "/embeddings", options)


def ingest_table(service: Runtime, name: str, raw: bytes, version: str | None, options: IngestOptions) -> Ingested:
    """Store the items of a table in Arrow's format, with their embeddings. Raises as `ingest_json`."""
    listed, rows = read_items(raw, service.settings.max_batch)
    return _ingest_rows(service, name, version, listed, rows, "/embedding", options)


def _ingest_rows(
    service: Runtime,
    name: str,
    version: str | None,
    listed: object,
    rows: NDArray[Any],
    pointer: str,
    options: IngestOptions,
) -> Ingested:
    """Store items, `listed` as in JSON but without embeddings, with the embeddings `rows` (N, D)."""

    def attempt(to: Destination) -> Ingested:
        body = {"items": listed} if version is None else {"items": listed, "version": version}
        return _ingest_embeddings(to, body, rows, pointer)

    return while_current_holds(service, name, options, attempt)


def _ingest_embeddings(
    to: Destination, body: dict[str, Any], rows: NDArray[Any] | None = None, pointer: str = ""
) -> Ingested:
    """Store the items of `body`, each with its embedding, or with those of `rows` (N, D), which `pointer` names."""
    version = _version(to.service, body.get("version", to.current.name))
    batch = _embedding_batch(to, body, "embedding" if rows is None else "")
    if rows is not None and rows.shape != (batch.size, version.card.dim):
        needed = f"{batch.size} rows, one per item, of dimension {version.card.dim}, that of {version.name!r}"
        raise InvalidBody(f"embeddings must be {needed}, not {rows.shape}", pointer=pointer)
    items = _check_embeddings(batch, version, to.options.origin, rows)
    return store_embeddings(to, version, items, batch)


def _embedding_batch(to: Destination, body: dict[str, Any], content: str) -> IngestBatch:
    """A batch of embeddings, with texts if any. Embeddings added to existing items have no metadata and text.

    Removes the items from `body`, so that their lists of numbers are freed once they are read.
    """
    adds = to.options.mode is UpdateMode.UPDATE_ONLY
    batch = read_batch(body.pop("items", None), content, to.service.settings, "" if adds else "text")
    if adds:
        for draft in (draft for draft in batch.drafts if draft.metadata is not None):
            batch.refuse(
                draft.index, draft.id, InvalidItem("metadata cannot be changed here: omit it", pointer="/metadata")
            )
        batch.drafts = [draft for draft in batch.drafts if draft.metadata is None]
    return batch


def _version(service: Runtime, name: object) -> LoadedVersion:
    if not isinstance(name, str):
        raise InvalidBody("version must be the name of a registered version", pointer="/version")
    return service.registry.named(name)


def _listed(form: Form) -> Any:
    if "items" not in form.fields:
        raise InvalidBody("the form must have the field 'items', a JSON list", pointer="/items")
    with errors_at("/items"):
        return parse_any_json(form.fields["items"])


def _files(form: Form, batch: IngestBatch) -> dict[str, UploadFile]:
    """The files by name; an item whose image is not the name of a file becomes an error."""
    files = form.files_by_name()
    images = [draft for draft in batch.drafts if draft.text is None]
    for draft in [d for d in images if not isinstance(d.content, str) or d.content not in files]:
        batch.drafts.remove(draft)
        batch.refuse(draft.index, draft.id, InvalidItem(NO_SUCH_FILE, pointer="/image"))
    return files


def _encode_images(
    to: Destination, batch: IngestBatch, files: Mapping[str, UploadFile]
) -> list[tuple[ItemDraft, NewItem]]:
    """Decode and embed images in blocks, so that memory holds only one block of encoder inputs."""
    images = [draft for draft in batch.drafts if draft.text is None]
    blocks = (images[start : start + BATCH] for start in range(0, len(images), BATCH))
    return [item for block in blocks for item in _encode_block(to, batch, block, files)]


def _encode_texts(to: Destination, batch: IngestBatch) -> tuple[list[tuple[ItemDraft, NewItem]], list[bytes]]:
    """Embed the items of a form that are texts; returns the items and their texts."""
    drafts = [replace(draft, content=draft.text) for draft in batch.drafts if draft.text is not None]
    if not drafts:
        return [], []
    to.service.registry.check_reads_texts(to.current, f"/items/{drafts[0].index}/text")
    return encode_texts(to, batch, drafts)


def _encode_block(
    to: Destination, batch: IngestBatch, block: Sequence[ItemDraft], files: Mapping[str, UploadFile]
) -> list[tuple[ItemDraft, NewItem]]:
    images = to.current.images()
    spec = images.encoder.spec
    readable: list[tuple[ItemDraft, Pixels]] = []
    for draft in block:
        try:
            with errors_at("/image"):
                note = functools.partial(batch.image_losses.note, to.current.name, spec, f"/items/{draft.index}/image")
                readable.append((draft, read_pixels(files[draft.content].file, spec, to.service.decoder, note)))
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
    batch: IngestBatch, version: LoadedVersion, origin: Origin, rows: NDArray[Any] | None = None
) -> list[tuple[ItemDraft, NewItem]]:
    """Check all embeddings at once; if one is invalid, check them one by one, to report the invalid ones.

    `rows`: embeddings by the items' numbers; None: each is its item's content, which is then dropped, because Python's
    garbage collector would visit each of a million numbers while all requests wait.
    """
    drafts, vectors = batch.drafts, None
    values = [draft.content for draft in drafts] if rows is None else rows[[draft.index for draft in drafts]]
    batch.drafts = []
    with suppress(RegraftError):
        vectors = check_embeddings(values, version.card.dim, version.space, "", version.name)
    if vectors is None:
        valid = [
            (draft, _check_embedding(batch, draft, values[number : number + 1], version))
            for number, draft in enumerate(drafts)
        ]
    else:
        valid = list(zip(drafts, vectors, strict=True))
    made_by = origin.value
    return [
        (
            draft if rows is not None else replace(draft, content=None),
            NewItem(draft.id, draft.metadata, made_by, vector),
        )
        for draft, vector in valid
        if vector is not None
    ]


def _check_embedding(batch: IngestBatch, draft: ItemDraft, value: object, version: LoadedVersion) -> Vectors | None:
    try:
        (vector,) = check_embeddings(value, version.card.dim, version.space, "/embedding", version.name)
    except RegraftError as error:
        error.pointer = "/embedding"
        batch.refuse(draft.index, draft.id, error)
        return None
    else:
        return cast(Vectors, vector)
