"""The files of vectors in the image store, and the rows of `embedding` that refer to them.

A file has a row in `vector_file` from before it is written until after it is removed, so the store need not be listed.
Its number, which is in its key, is used once. States: `writing`; `kept`: rows may refer to it; `dropped`: no row refers
to it, or ever will.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ColumnElement,
    Connection,
    Float,
    Integer,
    Select,
    String,
    Table,
    and_,
    delete,
    exists,
    false,
    func,
    insert,
    literal,
    select,
    update,
)

from service.store.rows import all_of, first_of
from service.store.sql.arrays import key_table
from service.store.sql.database_clock import now
from service.store.sql.partitioned import of_item
from service.store.tables import Id, embedding, gallery, item, metadata
from service.store.vectors.codec import LOCATION, location_prefix

vector_file = Table(
    "vector_file",
    metadata,
    Column("id", Id, primary_key=True),
    # No foreign keys: the row outlives gallery and version until the file is removed.
    Column("gallery_id", Id, nullable=False, index=True),
    Column("version_id", Id, nullable=False),
    # The key in the image store, and the file's sha256 and size.
    Column("key", String(256), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("rows", Integer, nullable=False),
    # The lowest and highest key of the items whose vectors it has.
    Column("first_item", BigInteger, nullable=False),
    Column("last_item", BigInteger, nullable=False),
    Column("state", String(8), nullable=False),
    # When it got into that state.
    Column("since", Float, nullable=False),
    # When the rows of `embedding` that refer to it were counted, and at which feed number.
    Column("counted", Float, nullable=False),
    Column("counted_seq", BigInteger, nullable=False),
    CheckConstraint("state in ('writing', 'kept', 'dropped')", name="state"),
    sqlite_autoincrement=True,
)


class VectorFileRow(NamedTuple):
    """A file of vectors; see the table for its fields."""

    id: int
    gallery_id: int
    version_id: int
    key: str
    sha256: str
    bytes: int
    rows: int
    first_item: int
    last_item: int
    state: str
    since: float
    counted: float
    counted_seq: int


def is_in_file(file_id: int) -> ColumnElement[bool]:
    """Whether a row of `embedding` refers to this file."""
    prefix = location_prefix(file_id)
    there = func.substr(embedding.c.vector, 1, len(prefix)) == literal(prefix)
    return and_(func.length(embedding.c.vector) == LOCATION.itemsize, there)


IS_IN_DATABASE = func.length(embedding.c.vector) != LOCATION.itemsize
"""Condition on `embedding`: the row holds its vector itself."""


def any_file(connection: Connection) -> bool:
    """Whether any file has a row."""
    return connection.execute(select(vector_file.c.id).limit(1)).first() is not None


def files(connection: Connection, *which: ColumnElement[bool]) -> list[VectorFileRow]:
    """The files that meet the conditions, the oldest first."""
    return all_of(VectorFileRow, connection.execute(select(vector_file).where(*which).order_by(vector_file.c.id)))


def newest_files(connection: Connection, limit: int) -> list[str]:
    """The keys of the newest files that must exist in the store."""
    kept = select(vector_file.c.key).where(vector_file.c.state == "kept")
    return list(connection.execute(kept.order_by(vector_file.c.id.desc()).limit(limit)).scalars())


def file_row(connection: Connection, file_id: int) -> VectorFileRow | None:
    """A file's row; None: there is none."""
    return first_of(VectorFileRow, connection.execute(select(vector_file).where(vector_file.c.id == file_id)))


def file_rows(connection: Connection, numbers: Sequence[int]) -> list[VectorFileRow]:
    """The rows of those files that have one."""
    return files(connection, vector_file.c.id.in_(key_table(connection, numbers).keys))


def begin_file(
    connection: Connection, gallery_id: int, version_id: int, sha256: str, size: int, items: Sequence[int], below: str
) -> VectorFileRow:
    """Insert the row of a file that is about to be written, with the vectors of `items` (keys, ascending)."""
    values = {
        "gallery_id": gallery_id,
        "version_id": version_id,
        "key": "",
        "sha256": sha256,
        "bytes": size,
        "rows": len(items),
        "first_item": items[0],
        "last_item": items[-1],
        "state": "writing",
        "since": now(),
        "counted": 0.0,
        "counted_seq": 0,
    }
    number = connection.execute(insert(vector_file).values(values).returning(vector_file.c.id)).scalar_one()
    key = f"{below}{gallery_id}/{number}-{sha256[:16]}.parquet"
    connection.execute(update(vector_file).where(vector_file.c.id == number).values(key=key))
    found = file_row(connection, number)
    assert found is not None
    return found


def activate_file(connection: Connection, file_id: int) -> bool:
    """Permit rows to refer to a file; False: it was dropped meanwhile."""
    conditions = (vector_file.c.id == file_id, vector_file.c.state.in_(("writing", "kept")))
    return bool(connection.execute(update(vector_file).where(*conditions).values(state="kept")).rowcount)


def count_live(connection: Connection, file: VectorFileRow) -> int:
    """How many rows refer to a file."""
    return int(connection.execute(select(func.count()).select_from(_holders(file).subquery())).scalar_one())


def set_counted(connection: Connection, file_id: int, seq: int) -> None:
    """Store that the rows that refer to a file were counted, at this feed number."""
    noted = {"counted": now(), "counted_seq": seq}
    connection.execute(update(vector_file).where(vector_file.c.id == file_id).values(noted))


def rows_in_file(connection: Connection, file: VectorFileRow, after: int, limit: int) -> list[tuple[int, bytes]]:
    """Up to `limit` items after key `after` whose rows refer to a file: key and stored location."""
    behind = _holders(file).where(item.c.id > after).order_by(item.c.id).limit(limit)
    return [(key, bytes(stored)) for key, stored in connection.execute(behind)]


def _holders(file: VectorFileRow) -> Select[int, bytes]:
    conditions = (item.c.gallery_id == file.gallery_id, item.c.id.between(file.first_item, file.last_item))
    held = (embedding.c.version_id == file.version_id, is_in_file(file.id))
    return select(item.c.id, embedding.c.vector).join(embedding, of_item()).where(*conditions, *held)


def drop_file(connection: Connection, file_id: int, *still: ColumnElement[bool]) -> None:
    """Drop a file if it still meets the conditions: no row may refer to it any more, and it is removed later."""
    conditions = (vector_file.c.id == file_id, *still)
    connection.execute(update(vector_file).where(*conditions).values(state="dropped", since=now()))


def forget_file(connection: Connection, file_id: int) -> None:
    """Delete the row of a removed file."""
    connection.execute(delete(vector_file).where(vector_file.c.id == file_id, vector_file.c.state == "dropped"))


def changed_files(connection: Connection, seconds: float, limit: int) -> list[tuple[VectorFileRow, int]]:
    """Kept files of galleries that were written since the files' rows were counted, with the galleries' feed numbers.

    The files counted longest ago come first, without those counted in the last `seconds`.
    """
    changed = (vector_file.c.state == "kept", vector_file.c.counted < now() - seconds)
    behind = gallery.c.next_seq - 1 > vector_file.c.counted_seq
    found = (
        select(*vector_file.c, gallery.c.next_seq - 1)
        .join(gallery, gallery.c.id == vector_file.c.gallery_id)
        .where(*changed, behind)
        .order_by(vector_file.c.counted)
        .limit(limit)
    )
    return [(VectorFileRow(*row[:-1]), row[-1]) for row in connection.execute(found)]


OF_NO_GALLERY = and_(
    vector_file.c.state != "dropped", ~exists().where(gallery.c.id == vector_file.c.gallery_id).correlate(vector_file)
)
"""Condition on files: the gallery was deleted and completely freed."""
ABANDONED = (vector_file.c.state == "writing") | OF_NO_GALLERY
"""Condition on unused files: the writer was killed or lost its lease, or the gallery was deleted and freed."""


def read_from_database(
    connection: Connection, gallery_id: int, version_id: int, keys: Sequence[int], upto: int
) -> list[tuple[int, int, bytes, bytes | None]]:
    """Key, feed number, vector and digest of those items whose vector is in the database, by key.

    Only live items that were not written after feed number `upto`.
    """
    conditions = (
        item.c.gallery_id == gallery_id,
        item.c.id.in_(key_table(connection, keys).keys),
        item.c.deleted == false(),
    )
    # `seq + 0` keeps the database from reading the whole gallery by the index on `seq`.
    held = (embedding.c.version_id == version_id, item.c.seq + 0 <= upto, IS_IN_DATABASE)
    columns = (item.c.id, item.c.seq, embedding.c.vector, embedding.c.digest)
    found = select(*columns).join(embedding, of_item()).where(*conditions, *held).order_by(item.c.id)
    return [(key, seq, bytes(vector), digest) for key, seq, vector, digest in connection.execute(found)]


def vectors_in_database(connection: Connection, gallery_id: int, after: int, upto: int) -> list[tuple[int, int]]:
    """Item and version of each vector in the database, of items with feed numbers after `after` up to `upto`."""
    written = (item.c.gallery_id == gallery_id, item.c.seq > after, item.c.seq <= upto, item.c.deleted == false())
    found = select(item.c.id, embedding.c.version_id).join(embedding, of_item())
    return [(key, version_id) for key, version_id in connection.execute(found.where(*written, IS_IN_DATABASE))]
