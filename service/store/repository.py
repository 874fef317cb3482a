"""SQL about galleries and their items. Every function runs in its caller's transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import (
    ColumnElement,
    Connection,
    Text,
    bindparam,
    cast,
    exists,
    false,
    func,
    insert,
    literal,
    select,
    update,
)

from index.engines.config import IndexConfig
from index.item_id import is_writable
from index.metadata import Item
from index.space import Vectors
from index.version import NAME
from service.errors import UnknownGallery, UnknownItem
from service.store.embeddings import first_held, put_embeddings, put_first_embeddings, remove_embeddings
from service.store.partitioned import in_gallery, of_item
from service.store.rows import EMPTIED, GalleryRow, ItemRow, all_of, first_of
from service.store.sql_arrays import blocks, columns_of, gathered, listed, records, texts
from service.store.tables import deployment, embedding, gallery, item, version
from service.store.vector_codec import any_place, is_place
from service.store.vector_reader import read_vectors

FEED_BLOCK = 10_000

FeedRow = tuple[int, int | None, str | None, bytes | None, str, str, int, bool]
"""One embedding of an item as the change feed gives it: see `changes`."""

AtHand = Callable[[Sequence[FeedRow]], Sequence[bytes | None]]
"""Of rows whose vectors lie in files: those vectors that need not be read, and of the others where they lie."""

IS_THERE = gallery.c.deleted.is_(None)
"""Of a gallery: nobody deleted it. The row of one that was deleted stays until what it held is freed."""

STREAMED = {"stream_results": True}
"""Of one statement: set on the connection, on PostgreSQL every later statement would be read through a cursor too."""


class NewItem(NamedTuple):
    """An item to be written, everything about it checked: `vector` (D,), `side` (S,) or None, `blob` a key or None.

    `metadata` None: none were named.
    """

    external_id: str
    metadata: Mapping[str, Any] | None
    origin: str
    vector: Vectors
    side: Vectors | None = None
    blob: str | None = None


# Galleries


def insert_gallery(connection: Connection, name: str, index: IndexConfig | None = None) -> int:
    """Add a gallery without items; IntegrityError when the name is taken. Returns its id."""
    values = {"name": name, "next_seq": 1, "created": time.time(), "index_config": _index(index)}
    return int(connection.execute(insert(gallery).values(values).returning(gallery.c.id)).scalar_one())


def set_index(connection: Connection, gallery_id: int, index: IndexConfig) -> None:
    """Have a gallery indexed otherwise; takes a number of the feed, so that every process hears of it."""
    take_seq(connection, gallery_id, 1)
    connection.execute(update(gallery).where(gallery.c.id == gallery_id).values(index_config=_index(index)))


def index_of(row: GalleryRow) -> IndexConfig:
    """How a gallery is to be indexed."""
    return IndexConfig.model_validate(row.index_config or {})


def _index(index: IndexConfig | None) -> dict[str, Any] | None:
    return None if index is None else index.model_dump(mode="json", exclude_defaults=True)


def all_galleries(connection: Connection) -> list[GalleryRow]:
    """Every gallery's row, in order of creation."""
    return all_of(GalleryRow, connection.execute(select(gallery).where(IS_THERE).order_by(gallery.c.id)))


def galleries_now(connection: Connection, among: Sequence[int] | None = None) -> dict[int, tuple[int, int | None]]:
    """Id -> the next number of its change feed, and its current version, of every gallery, or of those `among`."""
    which = () if among is None else (gallery.c.id.in_(listed(connection, among).keys),)
    columns = select(gallery.c.id, gallery.c.next_seq, gallery.c.current_id).where(IS_THERE, *which)
    return {row[0]: (row[1], row[2]) for row in connection.execute(columns.order_by(gallery.c.id))}


def gallery_named(connection: Connection, name: str) -> GalleryRow:
    """The gallery's row. Raises UnknownGallery."""
    named = select(gallery).where(gallery.c.name == name, IS_THERE)
    row = first_of(GalleryRow, connection.execute(named)) if NAME.fullmatch(name) else None
    if row is None:
        raise UnknownGallery(f"there is no gallery {name!r}")
    return row


def gallery_row(connection: Connection, gallery_id: int) -> GalleryRow | None:
    """The gallery's row, None when it was deleted."""
    return first_of(GalleryRow, connection.execute(select(gallery).where(gallery.c.id == gallery_id, IS_THERE)))


def take_seq(connection: Connection, gallery_id: int, count: int) -> int:
    """Take the next `count` numbers of the gallery's change feed and return the first.

    To be called before anything else is read or written: it locks the gallery's row, so that numbers are in commit
    order and one gallery has one writer at a time. Numbers that are not used leave a harmless gap.

    Raises:
        UnknownGallery: the gallery was deleted.
    """
    statement = (
        update(gallery)
        .where(gallery.c.id == gallery_id, IS_THERE)
        .values(next_seq=gallery.c.next_seq + count)
        .returning(gallery.c.next_seq)
    )
    after = connection.execute(statement).scalar()
    if after is None:
        raise UnknownGallery("the gallery was deleted")
    return int(after) - count


# Items


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
    deleted items, where they were read already. Returns the blobs that nothing refers to any more.
    """
    if known is None:
        known = {row.external_id: row for row in rows_of(connection, gallery_id, [n.external_id for n in new])}
    added = [n for n in new if n.external_id not in known]
    again = [(known[n.external_id], n) for n in new if n.external_id in known]
    for alike in alike_of(added):
        _insert(connection, gallery_id, version_id, alike, first_seq)
        first_seq += len(alike)
    if again:
        remove_embeddings(connection, gallery_id, [row.id for row, _ in again])
        rows = [
            {"key": row.id, "metadata": n.metadata or {}, "blob": n.blob, "seq": first_seq + number, "deleted": False}
            for number, (row, n) in enumerate(again)
        ]
        overwrite(connection, rows)
    keys = {n.external_id: row.id for row, n in again}
    for alike in alike_of([n for _, n in again]):
        mine = [keys[n.external_id] for n in alike]
        put_embeddings(connection, gallery_id, version_id, alike[0].origin, mine, *_arrays(alike))
    return [row.blob for row, _ in again if row.blob is not None]


def alike_of(new: Sequence[NewItem]) -> list[list[NewItem]]:
    """Items of one origin together, those with side-information apart from those without: as they are numbered."""
    found: dict[tuple[str, bool], list[NewItem]] = {}
    for n in new:
        found.setdefault((n.origin, n.side is None), []).append(n)
    return list(found.values())


def _arrays(new: Sequence[NewItem]) -> tuple[Vectors, Vectors | None]:
    """Vectors (N, D) of items that are alike and, where they have some, side-information (N, S)."""
    sides = [n.side for n in new if n.side is not None]
    return stacked([n.vector for n in new]), stacked(sides) if sides else None


def stacked(rows: Sequence[Vectors]) -> Vectors:
    """Rows of one length (D,) as an array (N, D); `np.stack` looks at each of them several times."""
    return np.concatenate(rows).reshape(len(rows), -1)


def _insert(connection: Connection, gallery_id: int, version_id: int, new: Sequence[NewItem], first_seq: int) -> None:
    """Items that are not there, in two statements: a row each would go through Python several times."""
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
    """Delete items and their embeddings, leaving a tombstone in the change feed.

    Returns:
        The ids that were there, and the blobs that nothing refers to any more.
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


def live_item(connection: Connection, gallery_id: int, external_id: str) -> ItemRow:
    """The item's row. Raises UnknownItem."""
    rows = rows_of(connection, gallery_id, [external_id])
    if not rows or rows[0].deleted:
        raise UnknownItem(f"the gallery holds no item {external_id!r}")
    return rows[0]


def items_after(
    connection: Connection, gallery_id: int, after: int, limit: int, *which: ColumnElement[bool]
) -> list[ItemRow]:
    """Up to `limit` live items whose key is above `after`, by key, of those that `which` holds for."""
    statement = (
        select(item)
        .where(item.c.gallery_id == gallery_id, item.c.id > after, item.c.deleted == false(), *which)
        .order_by(item.c.id)
        .limit(limit)
    )
    return all_of(ItemRow, connection.execute(statement))


def live_items_by_version(connection: Connection, gallery_id: int, order: Sequence[int]) -> dict[int, int]:
    """Version id -> live items that it serves in this order, oldest version first.

    It looks at every item; what is in memory counts faster.
    """
    live = (item.c.gallery_id == gallery_id, item.c.deleted == false())
    each = select(first_held(order).label("version_id")).where(*live).subquery()
    counted = select(each.c.version_id, func.count()).where(each.c.version_id.is_not(None)).group_by(each.c.version_id)
    return {row[0]: row[1] for row in connection.execute(counted.order_by(each.c.version_id))}


def versions_held(connection: Connection, gallery_id: int) -> set[int]:
    """The versions that live items of the gallery hold embeddings of."""
    # One item of each is enough, and is found at once where the look begins with the version: hence no plain
    # `gallery_id`, which has an index too.
    mine = (item.c.id == embedding.c.item_id, item.c.gallery_id + 0 == gallery_id, item.c.deleted == false())
    held = exists().where(embedding.c.version_id == version.c.id, in_gallery(embedding, gallery_id), *mine)
    return set(connection.execute(select(version.c.id).where(held)).scalars())


def versions_emptied(connection: Connection, gallery_id: int) -> set[int]:
    """Retired versions whose embeddings went at once: some that replicas still count are gone, see `EMPTIED`."""
    mine = (deployment.c.gallery_id == gallery_id, deployment.c.to_free == EMPTIED)
    return set(connection.execute(select(deployment.c.version_id).where(*mine)).scalars())


# The change feed


def items_called(connection: Connection, gallery_id: int, first_seq: int, names: Sequence[str]) -> dict[int, Item]:
    """Key -> what is known of the items with these names, whose last writes have the numbers from `first_seq` on."""
    seqs = range(first_seq, first_seq + len(names))
    mine = (item.c.gallery_id == gallery_id, item.c.seq.between(seqs[0], seqs[-1]))
    each = select(item.c.id, cast(item.c.metadata, Text)).where(*mine).order_by(item.c.seq)
    keys, documents = columns_of(connection, each)
    return dict(zip(keys, map(Item, documents, names, seqs), strict=True))


_FEED = select(
    item.c.id,
    *(embedding.c.version_id, embedding.c.origin, embedding.c.vector),
    *(cast(item.c.metadata, Text), item.c.external_id, item.c.seq, item.c.deleted),
).select_from(item.outerjoin(embedding, of_item()))
"""Rows of items as the change feed gives them."""


def changes(
    connection: Connection, gallery_id: int, after: int, at_hand: AtHand | None = None
) -> Iterator[Sequence[FeedRow]]:
    """The feed behind number `after`: (id, version_id, origin, vector, metadata as JSON, external_id, seq, deleted).

    A row for each embedding that an item holds, and one without version, origin and vector for an item that holds none,
    as a deleted one does: those deleted up to `purged_seq` may be left out. The rows of an item are in one block.
    Vectors that lie in files are read, but for those that `at_hand` gives.
    """
    statement = _FEED.where(item.c.gallery_id == gallery_id, item.c.seq > after).order_by(item.c.seq, item.c.id)
    # A rebuild has no use for tombstones, and there may be many.
    if after == 0:
        statement = statement.where(item.c.deleted == false())
    last: list[FeedRow] = []  # the rows so far of the last item
    with connection.execute(statement, execution_options=STREAMED) as streamed:  # whoever reads may stop before the end
        for block in streamed.partitions(FEED_BLOCK):
            rows = [*last, *block]
            cut = next(number for number, row in enumerate(rows) if row[0] == rows[-1][0])
            last = rows[cut:]
            if cut:
                yield _with_vectors(connection, rows[:cut], at_hand)
    if last:
        yield _with_vectors(connection, last, at_hand)


def live_keys(connection: Connection, gallery_id: int) -> NDArray[np.int64]:
    """The keys of the items that a gallery has (N,), ascending."""
    return gathered(connection, select(item.c.id).where(item.c.gallery_id == gallery_id, item.c.deleted == false()))


def live_items(connection: Connection, gallery_id: int) -> int:
    """How many items a gallery has."""
    mine = (item.c.gallery_id == gallery_id, item.c.deleted == false())
    return int(connection.execute(select(func.count(item.c.id)).where(*mine)).scalar_one())


def feed_of(connection: Connection, gallery_id: int, keys: Sequence[int]) -> Iterator[Sequence[FeedRow]]:
    """What `changes` tells of these items of a gallery, in blocks."""
    for block in blocks(keys):
        mine = _FEED.where(item.c.gallery_id == gallery_id, item.c.id.in_(listed(connection, block).keys))
        if found := connection.execute(mine.order_by(item.c.id)).all():
            yield _with_vectors(connection, found)


def _with_vectors(connection: Connection, rows: Sequence[FeedRow], at_hand: AtHand | None = None) -> Sequence[FeedRow]:
    """Rows as the database stores them -> with vectors where some lie in files."""
    stored = [row[3] for row in rows]
    if not any_place(stored):
        return rows
    far = [n for n, one in enumerate(stored) if is_place(one)]
    if at_hand is not None:
        for n, one in zip(far, at_hand([rows[n] for n in far]), strict=True):
            stored[n] = one
    read = read_vectors(connection, stored)
    return [(*row[:3], vector, *row[4:]) for row, vector in zip(rows, read, strict=True)]


def rows_of(connection: Connection, gallery_id: int, external_ids: Sequence[str]) -> list[ItemRow]:
    """Rows of the given ids, also of deleted items."""
    # No other id can be stored, and PostgreSQL refuses to compare with one that holds a NUL.
    ids = external_ids
    if not is_writable("".join(ids)):
        ids = [external_id for external_id in ids if is_writable(external_id)]
    mine = (item.c.gallery_id == gallery_id, item.c.external_id.in_(texts(connection, ids)))
    return all_of(ItemRow, connection.execute(select(item).where(*mine)))


def set_metadata(connection: Connection, rows: Iterable[tuple[ItemRow, Mapping[str, Any]]], first_seq: int) -> None:
    """Write the metadata of live items, which takes a number of the feed each, from `first_seq` on; all else stays."""
    changed = [
        {"key": row.id, "metadata": dict(metadata), "blob": row.blob, "seq": first_seq + number, "deleted": False}
        for number, (row, metadata) in enumerate(rows)
    ]
    if changed:
        overwrite(connection, changed)


def overwrite(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write metadata, blob, seq and deleted of the items of these keys (`key`)."""
    columns = ("metadata", "blob", "seq", "deleted")
    statement = (
        update(item).where(item.c.id == bindparam("key")).values({name: bindparam(f"new_{name}") for name in columns})
    )
    connection.execute(statement, [{"key": r["key"], **{f"new_{name}": r[name] for name in columns}} for r in rows])
