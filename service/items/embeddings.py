"""Embeddings made elsewhere as items, or added to existing items, with the texts that some of them embed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import repeat
from typing import Any, cast

from numpy.typing import NDArray

from index.errors import RegraftError
from index.space import Vectors
from index.version import Origin
from service.errors import InvalidBody, InvalidItem
from service.items.batch import IngestBatch, ItemDraft, read_batch
from service.items.texts import read_text
from service.items.transaction import Destination, Ingested, store_batch, store_contents
from service.registry.loaded_version import LoadedVersion
from service.registry.storing import UpdateMode
from service.runtime import Runtime
from service.schemas import check_embeddings
from service.store.galleries.items import NewItem
from service.store.image_store.keys import TEXT


def ingest_embeddings(
    to: Destination, body: dict[str, Any], rows: NDArray[Any] | None = None, pointer: str = ""
) -> Ingested:
    """Store the items of `body`, each with its embedding, or with those of `rows` (N, D), which `pointer` names.

    Raises:
        UnknownVersion: the body names one that is not registered.
        InvalidBody: there is no list of items, or not a row for each.
        ItemsRefused: no item is valid, or the batch is atomic and one is invalid.
        CurrentChanged: another version is current by now.
    """
    version = _version(to.service, body.get("version", to.current.name))
    batch = _embedding_batch(to, body, "embedding" if rows is None else "")
    if rows is not None and rows.shape != (batch.size, version.card.dim):
        if rows.ndim == 2 and len(rows) == batch.size:
            wrong = f"an embedding by {version.name!r} must have {version.card.dim} numbers, not {rows.shape[1]}"
            raise InvalidBody(wrong, pointer=pointer)
        needed = f"{batch.size} rows, one per item, of dimension {version.card.dim}, that of {version.name!r}"
        raise InvalidBody(f"embeddings must be {needed}, not {rows.shape}", pointer=pointer)
    items = _check_embeddings(batch, version, to.options.origin, rows)
    return _store(to, version, items, batch)


def _store(
    to: Destination, version: LoadedVersion, items: Sequence[tuple[ItemDraft, NewItem]], batch: IngestBatch
) -> Ingested:
    """Store embeddings by `version`, and the texts that some of them embed. Raises as `store_contents`."""
    bare = [pair for pair in items if pair[0].text is None]
    texts, contents = [], []
    for draft, item in items if len(bare) < len(items) else ():
        if draft.text is None:
            continue
        try:
            contents.append(read_text(draft.text, to.service.settings.max_text_bytes))
            texts.append((draft, item))
        except RegraftError as error:
            batch.refuse(draft.index, draft.id, error)
    batch.settle(to.options.atomic)
    if not texts:
        return store_batch(to, version, bare, batch)
    return store_contents(to, version, texts, contents, repeat(TEXT), batch, bare)


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
