"""The texts of stored items, as answers show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import select

from index.errors import InvalidArgument, InvalidText
from service.registry.stored_contents import decode_text
from service.runtime import Runtime
from service.store.blob_keys import TEXT, is_text
from service.store.blobs import Blobs, StoreUnreachable
from service.store.sql_arrays import listed
from service.store.tables import item


def text_of(blobs: Blobs, blob: str | None) -> str | None:
    """The text under a key; None where it is of no text, or the text is gone or cannot be read."""
    if blob is None or not is_text(blob):
        return None
    try:
        return decode_text(blobs.read(blob))
    except (OSError, InvalidText, StoreUnreachable):
        return None


def add_texts(service: Runtime, keys: Iterable[Iterable[int]], rows: Iterable[Sequence[dict[str, Any]]]) -> None:
    """Put the field `text` into matches; `keys` are those of their items, query by query.

    Raises:
        InvalidArgument: the texts are longer than an answer may be.
    """
    pairs = [
        (key, match) for row, matches in zip(keys, rows, strict=True) for key, match in zip(row, matches, strict=True)
    ]
    with service.database.read() as connection:
        mine = item.c.id.in_(listed(connection, sorted({key for key, _ in pairs})).keys)
        there = select(item.c.id, item.c.blob).where(mine, item.c.blob.like(f"%{TEXT}"))
        found = {row.id: row.blob for row in connection.execute(there)}
    shown, left = Counter(key for key, _ in pairs), service.settings.max_body_bytes
    texts: dict[int, str | None] = {}
    for key, blob in found.items():
        texts[key] = text_of(service.blobs, blob)
        if (left := left - shown[key] * len(texts[key] or "")) < 0:
            raise too_long("texts", service.settings.max_body_bytes, "none of their texts")
    for key, match in pairs:
        match["text"] = texts.get(key)


def too_long(what: str, most: int, instead: str) -> InvalidArgument:
    """The error of matches that would show more than an answer can hold."""
    told = f"the {what} of all matches are longer than {most} characters: ask for fewer matches, or for {instead}"
    return InvalidArgument(told, pointer="/k")
