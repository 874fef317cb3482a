"""SQL about items: write, delete and read them. Every function runs in its caller's transaction."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import (
    JSON,
    ColumnElement,
    Connection,
    Text,
    bindparam,
    cast,
    false,
    func,
    insert,
    literal,
    select,
    update,
)

from index.errors import shortened
from index.item_id import is_writable
from index.metadata.metadata import Item
from index.space import Vectors
from service.errors import UnknownItem
from service.store.galleries.embeddings import put_embeddings, put_first_embeddings, remove_embeddings
from service.store.galleries.gallery import take_seq
from service.store.rows import ItemRow, all_of
from service.store.sql.arrays import records, select_columns, select_keys, texts, to_json
from service.store.tables import item


class NewItem(NamedTuple):
    """A checked item to write: `vector` (D,), `side` (S,) or None, `blob` a key or None; `metadata` None: not given."""

    external_id: str
    metadata: Mapping[str, Any] | None
    origin: str
    vector: Vectors
    side: Vectors | None = None
    blob: str | None = None


def store_items(
    connection: Connection,
    gallery_id: int,
    version_id: int,
    new: Sequence[NewItem],
    first_seq: int,
    known: Mapping[str, ItemRow] | None = None,
) -> list[str]:
    """Insert or replace items by their external ids (all different), each with one embedding, by `version_id`.

    `first_seq` is what `take_seq(connection, gallery_id, len(new))` returned. `known`: the rows of these ids, also of
    deleted items, if they were read before. Returns the blobs that nothing refers to any more.
    """
    if known is None:
        known = {row.external_id: row for row in rows_of(connection, gallery_id, [n.external_id for n in new])}
    added = [n for n in new if n.external_id not in known]
    replaced = [(known[n.external_id], n) for n in new if n.external_id in known]
    for alike in group_alike(added):
        _insert(connection, gallery_id, version_id, alike, first_seq)
        first_seq += len(alike)
    if replaced:
        remove_embeddings(connection, gallery_id, [row.id for row, _ in replaced])
        rows = [
            {"key": row.id, "metadata": n.metadata or {}, "blob": n.blob, "seq": first_seq + number, "deleted": False}
            for number, (row, n) in enumerate(replaced)
        ]
        overwrite(connection, rows)
    keys = {n.external_id: row.id for row, n in replaced}
    for alike in group_alike([n for _, n in replaced]):
        item_ids = [keys[n.external_id] for n in alike]
        put_embeddings(connection, gallery_id, version_id, alike[0].origin, item_ids, *_arrays(alike))
    return [row.blob for row, _ in replaced if row.blob is not None]


def group_alike(new: Sequence[NewItem]) -> list[list[NewItem]]:
    """Group items by origin, and by whether they have side-information, in the order of their feed numbers."""
    found: dict[tuple[str, bool], list[NewItem]] = {}
    for n in new:
        found.setdefault((n.origin, n.side is None), []).append(n)
    return list(found.values())


def _arrays(new: Sequence[NewItem]) -> tuple[Vectors, Vectors | None]:
    """Vectors (N, D) of one group of `group_alike`, and their side-information (N, S), if any."""
    sides = [n.side for n in new if n.side is not None]
    return stacked([n.vector for n in new]), stacked(sides) if sides else None


def stacked(rows: Sequence[Vectors]) -> Vectors:
    """Rows of one length (D,) as an array (N, D), faster than `np.stack`."""
    return np.concatenate(rows).reshape(len(rows), -1)


def _insert(connection: Connection, gallery_id: int, version_id: int, new: Sequence[NewItem], first_seq: int) -> None:
    """Insert new items in two statements, as a statement per row would be much slower."""
    rows = records(connection, [n.external_id for n in new], [n.metadata or {} for n in new], [n.blob for n in new])
    columns: dict[str, ColumnElement[Any]] = {
        "gallery_id": literal(gallery_id),
        "external_id": rows.name,
        "metadata": rows.document,
        "blob": rows.text,
        "seq": rows.place + first_seq,
        "deleted": false(),
        "created": literal(time.time()),
    }
    connection.execute(insert(item).from_select(list(columns), select(*columns.values())))
    put_first_embeddings(connection, gallery_id, version_id, new[0].origin, first_seq, *_arrays(new))


def delete_items(connection: Connection, gallery_id: int, external_ids: Sequence[str]) -> tuple[set[str], list[str]]:
    """Delete items and their embeddings, leaving tombstones in the change feed.

    Returns:
        The ids that existed, and the blobs that nothing refers to any more.
    """
    first = take_seq(connection, gallery_id, len(external_ids))
    live = [row for row in rows_of(connection, gallery_id, external_ids) if not row.deleted]
    remove_embeddings(connection, gallery_id, [row.id for row in live])
    if live:
        tombstone = update(item).where(item.c.id == bindparam("key"))
        connection.execute(
            tombstone.values(seq=bindparam("at"), deleted=True, blob=None, metadata={}),
            [{"key": row.id, "at": first + number} for number, row in enumerate(live)],
        )
    return {row.external_id for row in live}, [row.blob for row in live if row.blob is not None]


def set_metadata(connection: Connection, rows: Iterable[tuple[ItemRow, Mapping[str, Any]]], first_seq: int) -> None:
    """Write only the metadata of live items, each with the next feed number from `first_seq` on."""
    changed = [
        {"key": row.id, "metadata": dict(metadata), "blob": row.blob, "seq": first_seq + number, "deleted": False}
        for number, (row, metadata) in enumerate(rows)
    ]
    if changed:
        overwrite(connection, changed)


def overwrite(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `metadata`, `blob`, `seq` and `deleted` of the items with the given `key`s."""
    # As text like that of new items: a replica knows unchanged metadata by their text.
    document = bindparam("new_metadata", type_=Text)
    written = func.json(document) if connection.dialect.name == "sqlite" else cast(document, JSON)
    columns = ("blob", "seq", "deleted")
    values: dict[str, Any] = {"metadata": written, **{name: bindparam(f"new_{name}") for name in columns}}
    connection.execute(
        update(item).where(item.c.id == bindparam("key")).values(values),
        [
            {"key": r["key"], "new_metadata": to_json(r["metadata"]), **{f"new_{name}": r[name] for name in columns}}
            for r in rows
        ],
    )


def rows_of(connection: Connection, gallery_id: int, external_ids: Sequence[str]) -> list[ItemRow]:
    """The rows of these ids, also of deleted items."""
    # Other ids cannot be stored, and PostgreSQL refuses to compare with one that has a NUL character.
    ids = external_ids
    if not is_writable("".join(ids)):
        ids = [external_id for external_id in ids if is_writable(external_id)]
    conditions = (item.c.gallery_id == gallery_id, item.c.external_id.in_(texts(connection, ids)))
    return all_of(ItemRow, connection.execute(select(item).where(*conditions)))


def live_item(connection: Connection, gallery_id: int, external_id: str) -> ItemRow:
    """The item's row. Raises UnknownItem."""
    rows = rows_of(connection, gallery_id, [external_id])
    if not rows or rows[0].deleted:
        raise UnknownItem(f"the gallery has no item {shortened(external_id)!r}")
    return rows[0]


def items_after(
    connection: Connection, gallery_id: int, after: int, limit: int, *which: ColumnElement[bool]
) -> list[ItemRow]:
    """Up to `limit` live items whose key is above `after`, by key, that meet the conditions `which`."""
    statement = (
        select(item)
        .where(item.c.gallery_id == gallery_id, item.c.id > after, item.c.deleted == false(), *which)
        .order_by(item.c.id)
        .limit(limit)
    )
    return all_of(ItemRow, connection.execute(statement))


def items_named(connection: Connection, gallery_id: int, first_seq: int, names: Sequence[str]) -> dict[int, Item]:
    """Key -> item of the items with these ids, in the order of their feed numbers, which begin at `first_seq`."""
    seqs = range(first_seq, first_seq + len(names))
    conditions = (item.c.gallery_id == gallery_id, item.c.seq.between(seqs[0], seqs[-1]))
    each = select(item.c.id, cast(item.c.metadata, Text)).where(*conditions).order_by(item.c.seq)
    keys, documents = select_columns(connection, each)
    return dict(zip(keys, map(Item, documents, names, seqs), strict=True))


def live_keys(connection: Connection, gallery_id: int) -> NDArray[np.int64]:
    """The keys of a gallery's live items (N,), ascending."""
    return select_keys(connection, select(item.c.id).where(item.c.gallery_id == gallery_id, item.c.deleted == false()))


def live_items(connection: Connection, gallery_id: int) -> int:
    """The number of a gallery's live items."""
    conditions = (item.c.gallery_id == gallery_id, item.c.deleted == false())
    return int(connection.execute(select(func.count(item.c.id)).where(*conditions)).scalar_one())
