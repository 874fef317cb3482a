"""Vectors that lie in files of the image store: which files there are, and which rows of `embedding` say so.

A file has a row before it is written and after it is removed: none is ever looked for by listing the store, and its
number, which is in its key, is given once. States: `writing`; `kept`, of which rows may say that their vector lies
there; `dropped`, of which no row says so any more and none ever will.
"""

from __future__ import annotations

import time
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

from service.store.partitioned import of_item
from service.store.rows import all_of, first_of
from service.store.sql_arrays import key_table
from service.store.tables import Id, embedding, gallery, item, metadata
from service.store.vector_codec import PLACE, place_prefix

vector_file = Table(
    "vector_file",
    metadata,
    Column("id", Id, primary_key=True),
    # No foreign keys: the row outlives gallery and version until the file is removed.
    Column("gallery_id", Id, nullable=False, index=True),
    Column("version_id", Id, nullable=False),
    # Where it lies in the blob store; its sha256 and bytes.
    Column("key", String(256), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("rows", Integer, nullable=False),
    # The lowest and highest key of the items whose vectors it was made of.
    Column("first_item", BigInteger, nullable=False),
    Column("last_item", BigInteger, nullable=False),
    Column("state", String(8), nullable=False),
    # When it came to that state.
    Column("since", Float, nullable=False),
    # How many rows of `embedding` said that they lie in it, when, and at which number of the feed.
    Column("live", Integer, nullable=False),
    Column("counted", Float, nullable=False),
    Column("counted_seq", BigInteger, nullable=False),
    CheckConstraint("state in ('writing', 'kept', 'dropped')", name="state"),
    sqlite_autoincrement=True,
)


class VectorFileRow(NamedTuple):
    """A file of vectors; what its fields mean is in the table."""

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
    live: int
    counted: float
    counted_seq: int


def lies_in(file_id: int) -> ColumnElement[bool]:
    """Whether a row of `embedding` says that its vector lies in this file."""
    prefix = place_prefix(file_id)
    there = func.substr(embedding.c.vector, 1, len(prefix)) == literal(prefix)
    return and_(func.length(embedding.c.vector) == PLACE.itemsize, there)


IS_HERE = func.length(embedding.c.vector) != PLACE.itemsize
"""Whether a row of `embedding` holds its vector itself."""


def any_file(connection: Connection) -> bool:
    """Whether there is a file."""
    return connection.execute(select(vector_file.c.id).limit(1)).first() is not None


def files(connection: Connection, *which: ColumnElement[bool]) -> list[VectorFileRow]:
    """The files that `which` holds for, the oldest first."""
    return all_of(VectorFileRow, connection.execute(select(vector_file).where(*which).order_by(vector_file.c.id)))


def newest_files(connection: Connection, limit: int) -> list[str]:
    """The keys of some files that have to be there."""
    kept = select(vector_file.c.key).where(vector_file.c.state == "kept")
    return list(connection.execute(kept.order_by(vector_file.c.id.desc()).limit(limit)).scalars())


def file_row(connection: Connection, file_id: int) -> VectorFileRow | None:
    """A file's row, None where there is none."""
    return first_of(VectorFileRow, connection.execute(select(vector_file).where(vector_file.c.id == file_id)))


def begin_file(
    connection: Connection, gallery_id: int, version_id: int, sha256: str, size: int, items: Sequence[int], below: str
) -> VectorFileRow:
    """A row for a file that is about to be written, of the vectors of these items, in ascending order."""
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
        "since": time.time(),
        "live": 0,
        "counted": 0.0,
        "counted_seq": 0,
    }
    number = connection.execute(insert(vector_file).values(values).returning(vector_file.c.id)).scalar_one()
    key = f"{below}{gallery_id}/{number}-{sha256[:16]}.parquet"
    connection.execute(update(vector_file).where(vector_file.c.id == number).values(key=key))
    found = file_row(connection, number)
    assert found is not None
    return found


def keep_file(connection: Connection, file_id: int) -> bool:
    """Have rows say from now on that their vector lies there; False: it was dropped meanwhile."""
    conditions = (vector_file.c.id == file_id, vector_file.c.state.in_(("writing", "kept")))
    return bool(connection.execute(update(vector_file).where(*conditions).values(state="kept")).rowcount)


def count_live(connection: Connection, file: VectorFileRow) -> int:
    """How many rows say that they lie in a file."""
    return int(connection.execute(select(func.count()).select_from(_holders(file).subquery())).scalar_one())


def note_live(connection: Connection, file_id: int, live: int, seq: int) -> None:
    """Note how many they were, at which number of the feed."""
    noted = {"live": live, "counted": time.time(), "counted_seq": seq}
    connection.execute(update(vector_file).where(vector_file.c.id == file_id).values(noted))


def holders(connection: Connection, file: VectorFileRow, after: int, limit: int) -> list[tuple[int, bytes]]:
    """Up to `limit` items behind key `after` whose vector lies in a file, with what is stored of it."""
    behind = _holders(file).where(item.c.id > after).order_by(item.c.id).limit(limit)
    return [(key, bytes(stored)) for key, stored in connection.execute(behind)]


def _holders(file: VectorFileRow) -> Select[int, bytes]:
    conditions = (item.c.gallery_id == file.gallery_id, item.c.id.between(file.first_item, file.last_item))
    held = (embedding.c.version_id == file.version_id, lies_in(file.id))
    return select(item.c.id, embedding.c.vector).join(embedding, of_item()).where(*conditions, *held)


def drop_file(connection: Connection, file_id: int, *still: ColumnElement[bool]) -> None:
    """Have no row ever say again that its vector lies there, if `still` holds; the file itself is removed later."""
    conditions = (vector_file.c.id == file_id, *still)
    connection.execute(update(vector_file).where(*conditions).values(state="dropped", since=time.time()))


def forget_file(connection: Connection, file_id: int) -> None:
    """The end of a file that is removed."""
    connection.execute(delete(vector_file).where(vector_file.c.id == file_id, vector_file.c.state == "dropped"))


def changed_files(connection: Connection, before: float, limit: int) -> list[tuple[VectorFileRow, int]]:
    """Kept files of galleries that were written since theirs were counted, and the number their feed has come to.

    Those that were counted longest ago, and none that was since the moment `before`.
    """
    changed = (vector_file.c.state == "kept", vector_file.c.counted < before)
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
"""Of a file: nothing of its gallery is left."""
LOST = (vector_file.c.state == "writing") | OF_NO_GALLERY
"""Of a file that nobody is writing: its writer was killed or lost its lease, or nothing of its gallery is left."""


def stored_here(
    connection: Connection, gallery_id: int, version_id: int, keys: Sequence[int], upto: int
) -> list[tuple[int, int, bytes, bytes | None]]:
    """Key, number of the feed, vector and digest of those of the items that hold it, by key.

    Only of live items that were not written since number `upto`.
    """
    conditions = (
        item.c.gallery_id == gallery_id,
        item.c.id.in_(key_table(connection, keys).keys),
        item.c.deleted == false(),
    )
    held = (embedding.c.version_id == version_id, item.c.seq <= upto, IS_HERE)
    columns = (item.c.id, item.c.seq, embedding.c.vector, embedding.c.digest)
    found = select(*columns).join(embedding, of_item()).where(*conditions, *held).order_by(item.c.id)
    return [(key, seq, bytes(vector), digest) for key, seq, vector, digest in connection.execute(found)]


def held_here(connection: Connection, gallery_id: int, after: int, upto: int) -> list[tuple[int, int]]:
    """Item and version of each vector that the database holds, of items written behind one number, up to another."""
    written = (item.c.gallery_id == gallery_id, item.c.seq > after, item.c.seq <= upto, item.c.deleted == false())
    found = select(item.c.id, embedding.c.version_id).join(embedding, of_item())
    return [(key, version_id) for key, version_id in connection.execute(found.where(*written, IS_HERE))]
