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

from index.engines.config import IndexConfig, IndexKind
from index.errors import shortened
from index.item_id import is_writable
from index.metadata.metadata import Item
from index.space import Vectors
from index.version import NAME
from service.errors import UnknownGallery, UnknownItem
from service.store.embeddings import first_held, put_embeddings, put_first_embeddings, remove_embeddings
from service.store.partitioned import in_gallery, of_item
from service.store.rows import EMPTIED, GalleryRow, ItemRow, all_of, first_of
from service.store.sql_arrays import blocks, key_table, records, select_columns, select_keys, texts
from service.store.tables import deployment, embedding, gallery, item, version
from service.store.vector_codec import any_place, is_place
from service.store.vector_reader import read_vectors

FEED_BLOCK = 10_000

FeedRow = tuple[int, int | None, str | None, bytes | None, str, str, int, bool]
"""A row of the change feed, with one embedding of an item; see `changes`."""

FillFromMemory = Callable[[Sequence[FeedRow]], Sequence[bytes | None]]
"""For feed rows whose vectors are in files, returns their vectors if they are in memory, else the stored places."""

NOT_DELETED = gallery.c.deleted.is_(None)
"""Condition on galleries. The row of a deleted one stays until its items are freed."""

STREAMED = {"stream_results": True}
"""Options of one statement; on a connection, they would make PostgreSQL use a cursor for all later ones, too."""


class NewItem(NamedTuple):
    """A checked item to write: `vector` (D,), `side` (S,) or None, `blob` a key or None; `metadata` None: not given."""

    external_id: str
    metadata: Mapping[str, Any] | None
    origin: str
    vector: Vectors
    side: Vectors | None = None
    blob: str | None = None


# Galleries


def insert_gallery(connection: Connection, name: str, index: IndexConfig | None = None) -> int:
    """Add an empty gallery; returns its id. Raises IntegrityError if the name is taken."""
    values = {"name": name, "next_seq": 1, "created": time.time(), "index_config": _index(index)}
    return int(connection.execute(insert(gallery).values(values).returning(gallery.c.id)).scalar_one())


def set_index(connection: Connection, gallery_id: int, index: IndexConfig) -> None:
    """Change how a gallery is indexed; takes a feed number, so that every process follows."""
    take_seq(connection, gallery_id, 1)
    connection.execute(update(gallery).where(gallery.c.id == gallery_id).values(index_config=_index(index)))


def index_of(row: GalleryRow) -> IndexConfig:
    """The index configuration of a gallery."""
    return IndexConfig.model_validate(row.index_config or {})


def _index(index: IndexConfig | None) -> dict[str, Any] | None:
    return None if index is None else index.model_dump(mode="json", exclude_defaults=True)


def all_galleries(connection: Connection) -> list[GalleryRow]:
    """Every gallery's row, in order of creation."""
    return all_of(GalleryRow, connection.execute(select(gallery).where(NOT_DELETED).order_by(gallery.c.id)))


def galleries_of_kinds(connection: Connection, kinds: Sequence[IndexKind]) -> list[GalleryRow]:
    """The rows of the galleries whose index is of one of these kinds, in order of creation."""
    chosen = gallery.c.index_config["kind"].as_string().in_(kinds)
    return all_of(GalleryRow, connection.execute(select(gallery).where(NOT_DELETED, chosen).order_by(gallery.c.id)))


def gallery_states(connection: Connection, among: Sequence[int] | None = None) -> dict[int, tuple[int, int | None]]:
    """Id -> (next feed number, current version) of every gallery, or of those `among`."""
    which = () if among is None else (gallery.c.id.in_(key_table(connection, among).keys),)
    columns = select(gallery.c.id, gallery.c.next_seq, gallery.c.current_id).where(NOT_DELETED, *which)
    return {row[0]: (row[1], row[2]) for row in connection.execute(columns.order_by(gallery.c.id))}


def gallery_named(connection: Connection, name: str) -> GalleryRow:
    """The row of the gallery of this name. Raises UnknownGallery."""
    statement = select(gallery).where(gallery.c.name == name, NOT_DELETED)
    row = first_of(GalleryRow, connection.execute(statement)) if NAME.fullmatch(name) else None
    if row is None:
        raise UnknownGallery(f"gallery {shortened(name)!r} does not exist")
    return row


def gallery_row(connection: Connection, gallery_id: int) -> GalleryRow | None:
    """The gallery's row; None: it was deleted."""
    return first_of(GalleryRow, connection.execute(select(gallery).where(gallery.c.id == gallery_id, NOT_DELETED)))


def take_seq(connection: Connection, gallery_id: int, count: int) -> int:
    """Take the next `count` numbers of the gallery's change feed and return the first.

    Call it before reading or writing anything else: it locks the gallery's row until the commit, so that numbers are in
    commit order, and a gallery has one writer at a time. Unused numbers leave a harmless gap.

    Raises:
        UnknownGallery: the gallery was deleted.
    """
    statement = (
        update(gallery)
        .where(gallery.c.id == gallery_id, NOT_DELETED)
        .values(next_seq=gallery.c.next_seq + count)
        .returning(gallery.c.next_seq)
    )
    after = connection.execute(statement).scalar()
    if after is None:
        raise UnknownGallery("the gallery was deleted")
    return int(after) - count


def lock_galleries(connection: Connection) -> list[GalleryRow]:
    """Lock all galleries until the commit, as `take_seq` locks one; returns their rows, in order of creation."""
    # In one order, so that two processes never wait for each other. SQLite has no locks of rows, and one writer anyway.
    statement = select(gallery).where(NOT_DELETED).order_by(gallery.c.id).with_for_update(key_share=True)
    return all_of(GalleryRow, connection.execute(statement))


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


def live_items_by_version(connection: Connection, gallery_id: int, order: Sequence[int]) -> dict[int, int]:
    """Version id -> how many live items it serves with this order of preference, oldest version first.

    Reads every item; a replica counts faster.
    """
    live = (item.c.gallery_id == gallery_id, item.c.deleted == false())
    each = select(first_held(order).label("version_id")).where(*live).subquery()
    counted = select(each.c.version_id, func.count()).where(each.c.version_id.is_not(None)).group_by(each.c.version_id)
    return {row[0]: row[1] for row in connection.execute(counted.order_by(each.c.version_id))}


def versions_with_embeddings(connection: Connection, gallery_id: int) -> set[int]:
    """The versions of which live items of the gallery hold embeddings."""
    # One item per version is enough and quickly found by the index on versions; `gallery_id + 0` keeps the database
    # from using the index on galleries.
    conditions = (item.c.id == embedding.c.item_id, item.c.gallery_id + 0 == gallery_id, item.c.deleted == false())
    exists_embedding = exists().where(
        embedding.c.version_id == version.c.id, in_gallery(embedding, gallery_id), *conditions
    )
    return set(connection.execute(select(version.c.id).where(exists_embedding)).scalars())


def versions_emptied(connection: Connection, gallery_id: int) -> set[int]:
    """Retired versions whose embeddings were removed by TRUNCATE, but may still be in replicas, see `EMPTIED`."""
    conditions = (deployment.c.gallery_id == gallery_id, deployment.c.to_free == EMPTIED)
    return set(connection.execute(select(deployment.c.version_id).where(*conditions)).scalars())


# The change feed


def items_named(connection: Connection, gallery_id: int, first_seq: int, names: Sequence[str]) -> dict[int, Item]:
    """Key -> item of the items with these ids, in the order of their feed numbers, which begin at `first_seq`."""
    seqs = range(first_seq, first_seq + len(names))
    conditions = (item.c.gallery_id == gallery_id, item.c.seq.between(seqs[0], seqs[-1]))
    each = select(item.c.id, cast(item.c.metadata, Text)).where(*conditions).order_by(item.c.seq)
    keys, documents = select_columns(connection, each)
    return dict(zip(keys, map(Item, documents, names, seqs), strict=True))


_FEED = select(
    item.c.id,
    *(embedding.c.version_id, embedding.c.origin, embedding.c.vector),
    *(cast(item.c.metadata, Text), item.c.external_id, item.c.seq, item.c.deleted),
).select_from(item.outerjoin(embedding, of_item()))
"""The SELECT of `FeedRow`s."""


def changes(
    connection: Connection, gallery_id: int, after: int, fill_from_memory: FillFromMemory | None = None
) -> Iterator[Sequence[FeedRow]]:
    """The feed after number `after`: (id, version_id, origin, vector, metadata as JSON, external_id, seq, deleted).

    One row for each embedding of an item, or one without version, origin and vector if it has none, as deleted items
    do; items deleted up to `purged_seq` may be missing. The rows of an item are in one block. Vectors in files are
    read, except those that `fill_from_memory` returns.
    """
    statement = _FEED.where(item.c.gallery_id == gallery_id, item.c.seq > after).order_by(item.c.seq, item.c.id)
    # A complete load does not need the tombstones, of which there may be many.
    if after == 0:
        statement = statement.where(item.c.deleted == false())
    last: list[FeedRow] = []  # the rows so far of the last item
    with connection.execute(statement, execution_options=STREAMED) as streamed:  # the caller may stop before the end
        for block in streamed.partitions(FEED_BLOCK):
            rows = [*last, *block]
            cut = next(number for number, row in enumerate(rows) if row[0] == rows[-1][0])
            last = rows[cut:]
            if cut:
                yield _with_vectors(connection, rows[:cut], fill_from_memory)
    if last:
        yield _with_vectors(connection, last, fill_from_memory)


def live_keys(connection: Connection, gallery_id: int) -> NDArray[np.int64]:
    """The keys of a gallery's live items (N,), ascending."""
    return select_keys(connection, select(item.c.id).where(item.c.gallery_id == gallery_id, item.c.deleted == false()))


def live_items(connection: Connection, gallery_id: int) -> int:
    """The number of a gallery's live items."""
    conditions = (item.c.gallery_id == gallery_id, item.c.deleted == false())
    return int(connection.execute(select(func.count(item.c.id)).where(*conditions)).scalar_one())


def feed_of(connection: Connection, gallery_id: int, keys: Sequence[int]) -> Iterator[Sequence[FeedRow]]:
    """The rows of these items of a gallery, as `changes` yields them, in blocks."""
    for block in blocks(keys):
        statement = _FEED.where(item.c.gallery_id == gallery_id, item.c.id.in_(key_table(connection, block).keys))
        if found := connection.execute(statement.order_by(item.c.id)).all():
            yield _with_vectors(connection, found)


def _with_vectors(
    connection: Connection, rows: Sequence[FeedRow], fill_from_memory: FillFromMemory | None = None
) -> Sequence[FeedRow]:
    """Replace places in files by their vectors."""
    stored = [row[3] for row in rows]
    if not any_place(stored):
        return rows
    in_files = [n for n, value in enumerate(stored) if is_place(value)]
    if fill_from_memory is not None:
        for n, value in zip(in_files, fill_from_memory([rows[n] for n in in_files]), strict=True):
            stored[n] = value
    read = read_vectors(connection, stored)
    return [(*row[:3], vector, *row[4:]) for row, vector in zip(rows, read, strict=True)]


def rows_of(connection: Connection, gallery_id: int, external_ids: Sequence[str]) -> list[ItemRow]:
    """The rows of these ids, also of deleted items."""
    # Other ids cannot be stored, and PostgreSQL refuses to compare with one that has a NUL character.
    ids = external_ids
    if not is_writable("".join(ids)):
        ids = [external_id for external_id in ids if is_writable(external_id)]
    conditions = (item.c.gallery_id == gallery_id, item.c.external_id.in_(texts(connection, ids)))
    return all_of(ItemRow, connection.execute(select(item).where(*conditions)))


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
    columns = ("metadata", "blob", "seq", "deleted")
    statement = (
        update(item).where(item.c.id == bindparam("key")).values({name: bindparam(f"new_{name}") for name in columns})
    )
    connection.execute(statement, [{"key": r["key"], **{f"new_{name}": r[name] for name in columns}} for r in rows])
