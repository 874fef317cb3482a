"""Embeddings in SQL. Every function runs in its caller's transaction.

Shapes: N vectors, D their dimension, S numbers of side-information.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    LargeBinary,
    Select,
    bindparam,
    case,
    cast,
    delete,
    exists,
    false,
    func,
    insert,
    literal,
    null,
    select,
    update,
)

from index.item_id import is_writable
from index.space import Vectors
from index.version import Origin
from service.store.rows import all_of
from service.store.sql.arrays import blocks, key_table
from service.store.sql.partitioned import in_gallery, insert_target, of_item
from service.store.tables import embedding, item
from service.store.vectors.codec import digests_to_bytes, to_bytes
from service.store.vectors.reader import read_vectors, with_vectors


class ItemEmbeddingRow(NamedTuple):
    """An embedding of a live item, with its item."""

    id: int
    seq: int
    external_id: str
    blob: str | None
    version_id: int
    vector: bytes


def put_embeddings(
    connection: Connection,
    gallery_id: int,
    version_id: int,
    origin: str,
    item_ids: Sequence[int],
    vectors: Vectors,
    side: Vectors | None = None,
    uncertainty: Vectors | None = None,
) -> None:
    """Insert embeddings of one version and origin, replacing the items' embeddings of that version.

    Args:
        connection: in a transaction.
        gallery_id: the gallery of the items.
        version_id: the version of the embeddings.
        origin: `encoded`, `transformed` or `supplied`.
        item_ids: N items, all different.
        vectors: (N, D).
        side: (N, S), if the version has side-information.
        uncertainty: (N,), if a transform computed it.
    """
    if not item_ids:
        return
    keys = key_table(connection, item_ids)
    conditions = (embedding.c.version_id == version_id, in_gallery(embedding, gallery_id))
    connection.execute(delete(embedding).where(*conditions, embedding.c.item_id.in_(keys.keys)))
    table, place_columns = insert_target(connection, gallery_id)
    rows = {
        **place_columns,
        "item_id": keys.key,
        "version_id": literal(version_id),
        "origin": literal(origin),
        **_vector_columns(vectors, side, keys.place),
    }
    connection.execute(insert(table).from_select(list(rows), select(*rows.values())))
    if uncertainty is not None:
        statement = update(embedding).where(*conditions, embedding.c.item_id == bindparam("key"))
        values = [{"key": key, "value": value} for key, value in zip(item_ids, uncertainty.tolist(), strict=True)]
        connection.execute(statement.values(uncertainty=bindparam("value")), values)


def put_first_embeddings(
    connection: Connection,
    gallery_id: int,
    version_id: int,
    origin: str,
    first_seq: int,
    vectors: Vectors,
    side: Vectors | None = None,
) -> None:
    """Insert the first embeddings of N items: those with the N feed numbers from `first_seq` on."""
    table, place_columns = insert_target(connection, gallery_id)
    rows = {
        **place_columns,
        "item_id": item.c.id,
        "version_id": literal(version_id),
        "origin": literal(origin),
        **_vector_columns(vectors, side, item.c.seq - first_seq),
    }
    conditions = (item.c.gallery_id == gallery_id, item.c.seq.between(first_seq, first_seq + len(vectors) - 1))
    connection.execute(insert(table).from_select(list(rows), select(*rows.values()).where(*conditions)))


def _vector_columns(vectors: Vectors, side: Vectors | None, place: ColumnElement[int]) -> dict[str, ColumnElement[Any]]:
    """The columns of vectors (N, D) and side-information (N, S); `place`: the position of a row's values."""
    return {
        "vector": _row_at(to_bytes(vectors), len(vectors), place),
        "side": null() if side is None else _row_at(to_bytes(side), len(side), place),
        "digest": _row_at(digests_to_bytes(vectors), len(vectors), place),
    }


def _row_at(rows: bytes, count: int, place: ColumnElement[int]) -> ColumnElement[bytes]:
    """The bytes of one row, cut from all `count` rows, which are sent as one value."""
    width = len(rows) // count
    # Cast, as `place` has 64 bits on PostgreSQL, whose substr does not take such numbers.
    return func.substr(literal(rows, LargeBinary), cast(place * width + 1, Integer), width)


def remove_embeddings(connection: Connection, gallery_id: int, keys: Sequence[int]) -> None:
    """Remove all embeddings of these items of a gallery."""
    conditions = (in_gallery(embedding, gallery_id), embedding.c.item_id.in_(key_table(connection, keys).keys))
    connection.execute(delete(embedding).where(*conditions))


def embeddings_of(connection: Connection, gallery_id: int, item_ids: Sequence[int]) -> dict[int, dict[int, str]]:
    """Item -> version id -> origin of each embedding these items hold, oldest version first."""
    origins: dict[int, dict[int, str]] = {key: {} for key in item_ids}
    columns = (embedding.c.item_id, embedding.c.version_id, embedding.c.origin)
    conditions = (in_gallery(embedding, gallery_id), embedding.c.item_id.in_(key_table(connection, item_ids).keys))
    statement = select(*columns).where(*conditions)
    for key, version_id, origin in connection.execute(statement.order_by(embedding.c.version_id)):
        origins[key][version_id] = origin
    return origins


def vectors_of(
    connection: Connection, gallery_id: int, item_ids: Sequence[int]
) -> dict[int, dict[int, tuple[str, bytes]]]:
    """Item -> version id -> (origin, vector) of each embedding these items hold, oldest version first."""
    embeddings: dict[int, dict[int, tuple[str, bytes]]] = {key: {} for key in item_ids}
    columns = (embedding.c.item_id, embedding.c.version_id, embedding.c.origin, embedding.c.vector)
    conditions = (in_gallery(embedding, gallery_id), embedding.c.item_id.in_(key_table(connection, item_ids).keys))
    rows = connection.execute(select(*columns).where(*conditions).order_by(embedding.c.version_id)).all()
    vectors = read_vectors(connection, [row.vector for row in rows])
    for (key, version_id, origin, _), vector in zip(rows, vectors, strict=True):
        embeddings[key][version_id] = origin, vector
    return embeddings


def has_own_embedding(version_id: int) -> ColumnElement[bool]:
    """Whether a row of `item` holds an embedding that the version itself made, not one that an edge transformed."""
    held = embedding.alias("held")  # an alias, as the enclosing statement may also read embeddings
    conditions = (of_item(held), held.c.version_id == version_id)
    return exists().where(*conditions, held.c.origin.in_((Origin.ENCODED.value, Origin.SUPPLIED.value)))


def first_held(order: Sequence[int], among: Select[int] | None = None) -> ColumnElement[Any]:
    """The first version in `order` (and `among`, if given) of which a row of `item` holds an embedding; null: none.

    In the order of `Placement`, this is the version that serves the item, see `service.registry.placement`.
    """
    held = embedding.alias("held")  # an alias, as the enclosing statement may also read embeddings
    places = {version_id: place for place, version_id in enumerate(order)}
    rank = case(places, value=held.c.version_id, else_=len(order)) if places else held.c.version_id
    mine = select(held.c.version_id).where(of_item(held))
    mine = mine if among is None else mine.where(held.c.version_id.in_(among))
    return mine.order_by(rank).limit(1).correlate(item).scalar_subquery()


EMBEDDINGS_OF_IDS = (  # built once: SQLAlchemy takes longer to build it than SQLite to run it
    select(item.c.id, item.c.seq, item.c.external_id, item.c.blob, embedding.c.version_id, embedding.c.vector)
    .join(embedding, of_item())
    .where(item.c.gallery_id == bindparam("gallery"), item.c.deleted == false())
    .where(item.c.external_id.in_(bindparam("ids", expanding=True)))
    .order_by(embedding.c.version_id)
)


def embeddings_by_id(
    connection: Connection, gallery_id: int, external_ids: Sequence[str]
) -> dict[str, list[ItemEmbeddingRow]]:
    """External id -> the embeddings of each live item, the oldest version first."""
    found: dict[str, list[ItemEmbeddingRow]] = {}
    for block in blocks([external_id for external_id in external_ids if is_writable(external_id)]):
        rows = all_of(ItemEmbeddingRow, connection.execute(EMBEDDINGS_OF_IDS, {"gallery": gallery_id, "ids": block}))
        for row in with_vectors(connection, rows, "vector"):
            found.setdefault(row.external_id, []).append(row)
    return found
