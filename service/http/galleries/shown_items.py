"""Stored items in responses: their fields, their texts, and the parameters of routes that list them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import Query
from sqlalchemy import select

from index.errors import InvalidArgument, InvalidText
from service.registry.placement import Placement
from service.registry.stored_contents import decode_text
from service.runtime import Runtime
from service.store.image_store.blobs import Blobs
from service.store.image_store.keys import TEXT, is_text
from service.store.rows import ItemRow
from service.store.sql.arrays import key_table
from service.store.tables import item

MAX_PAGE = 1000
"""Most items of a page."""

WithText = Annotated[bool, Query(description="show the texts of items")]


def describe_item(
    service: Runtime,
    placement: Placement,
    row: ItemRow,
    origins: Mapping[int, str],
    texts: Mapping[str | None, str | None],
) -> dict[str, Any]:
    """The fields of `regraft.models.ItemInfo`.

    `origins`: version id -> origin of the item's embedding. `texts`: blob key -> text, if texts are shown.
    """
    return {
        "id": row.external_id,
        "metadata": row.metadata,
        "active": service.registry.by_id(placement.best(origins)).name if origins else None,
        "image": row.blob is not None and not is_text(row.blob),
        "text": texts.get(row.blob),
        "seq": row.seq,
        "created": row.created,
    }


def texts_of(blobs: Blobs, rows: Iterable[ItemRow]) -> dict[str | None, str | None]:
    """Key -> text of the items that are texts. Raises as `_read` does."""
    keys = [row.blob for row in rows if row.blob is not None and is_text(row.blob)]
    return dict(zip(keys, _read(blobs, keys), strict=True))


def _read(blobs: Blobs, keys: Iterable[str]) -> Iterator[str | None]:
    """The texts under blob keys; None for one that is missing or not valid text.

    Raises:
        StoreUnreachable, ImageUnreadable: one cannot be read.
    """
    for content in blobs.fetch_all(keys):
        try:
            yield None if content is None else decode_text(content)
        except InvalidText:
            yield None


def add_texts(service: Runtime, keys: Iterable[Iterable[int]], rows: Iterable[Sequence[dict[str, Any]]]) -> None:
    """Add the field `text` to matches; `keys`: their items' keys, query by query.

    Raises:
        InvalidArgument: the texts together are too long for a response.
        StoreUnreachable, ImageUnreadable: one cannot be read.
    """
    pairs = [
        (key, match) for row, matches in zip(keys, rows, strict=True) for key, match in zip(row, matches, strict=True)
    ]
    with service.database.read() as connection:
        condition = item.c.id.in_(key_table(connection, sorted({key for key, _ in pairs})).keys)
        statement = select(item.c.id, item.c.blob).where(condition, item.c.blob.like(f"%{TEXT}"))
        blobs = {row.id: row.blob for row in connection.execute(statement)}
    times_shown, bytes_left = Counter(key for key, _ in pairs), service.settings.max_body_bytes
    texts: dict[int, str | None] = {}
    for key, text in zip(blobs, _read(service.blobs, blobs.values()), strict=True):
        texts[key] = text
        if (bytes_left := bytes_left - times_shown[key] * len(text or "")) < 0:
            raise too_long("texts", service.settings.max_body_bytes, "no texts")
    for key, match in pairs:
        match["text"] = texts.get(key)


def too_long(what: str, most: int, instead: str) -> InvalidArgument:
    """The error of matches that would show more than a response may hold."""
    told = f"the {what} of all matches exceed {most} characters: request fewer matches, or {instead}"
    return InvalidArgument(told, pointer="/k")
