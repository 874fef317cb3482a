"""Partitions of embeddings on PostgreSQL: created before the first row, emptied and dropped with version or gallery.

A partition has the embeddings of one gallery and version. Rows stored before it exists are in the default partition,
which is correct but slower; `settle` moves them to their own. So no write waits for a partition: a change that does not
get its lock soon gives up and is retried. SQLite has no partitions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import copy_context
from functools import partial

from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import DBAPIError

from index.events import Event
from service.errors import UnknownGallery
from service.store.database.connections import COMMIT_STATE, CommitState, Database
from service.store.galleries.gallery import take_seq

logger = logging.getLogger(__name__)

LOCK_SECONDS = 0.2
"""How long an attempt waits for a lock and blocks those behind it; PostgreSQL checks for deadlocks after a second."""
PARTITION_LOCK = 0x7265_6772_6166_75
"""The advisory lock held while a partition is created, so that two processes do not create the same one."""
ATTEMPTS = 4
PAUSE_SECONDS = 0.1
"""Pause after the first attempt; doubled after each further one."""
REFUSED = frozenset({"55P03", "40P01", "23514"})
"""SQLSTATEs of a lock timeout, a deadlock, and a default partition that meanwhile got rows of the new one."""


def make(database: Database, gallery_id: int, version_id: int) -> None:
    """Create the partition of a gallery and version before rows are stored, if its locks are free."""
    place = (gallery_id, version_id)
    if database.is_sqlite or place in database.partitions:
        return

    def attach(connection: Connection) -> None:
        connection.execute(select(func.pg_advisory_xact_lock(PARTITION_LOCK)))
        if not _exists(connection, *place) and not _is_awaited(connection, *place):
            _make_beside(connection, *place)
            _attach(connection, *place)

    with database.lookup() as connection:
        exists = _exists(connection, *place)
    if exists or _try(database, attach, attempts=1):
        database.partitions.add(place)


def settle(database: Database, stop: threading.Event | None = None) -> bool:
    """Move the rows of the default partition into their own ones, until `stop`; returns whether it is empty.

    They come from migration 0020, which creates only the largest partitions, from programs of an older release, which
    create none, and from attempts that did not get a lock.
    """
    if database.is_sqlite:
        return True
    with database.lookup() as connection:
        rows = connection.execute(text("select distinct gallery_id, version_id from embedding_default"))
        places = sorted((row.gallery_id, row.version_id) for row in rows)
    results = [
        _try(database, partial(_settle, gallery_id=place[0], version_id=place[1]))
        for place in places
        if stop is None or not stop.is_set()
    ]
    return len(results) == len(places) and all(results)


def empty(connection: Connection, gallery_id: int, version_id: int) -> bool:
    """Remove all embeddings of a version in a gallery by a TRUNCATE, in the caller's transaction.

    False: they have no partition, or it is being read; nothing was removed.
    """
    if connection.dialect.name == "sqlite" or not _exists(connection, gallery_id, version_id):
        return False
    try:
        with connection.begin_nested():
            _set_lock_timeout(connection)
            # The rows also vanish from older snapshots. A DROP would block readers of all other partitions.
            connection.execute(text(f"truncate {_name(gallery_id, version_id)}"))
            connection.execute(text("set local lock_timeout to default"))
    except DBAPIError as error:
        if not _is_refused(error):
            raise
        return False
    return True


def empty_ones(connection: Connection, candidates: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pairs of gallery and version among `candidates` that have an empty partition."""
    names = set(connection.execute(_PARTITIONS, {"prefix": "embedding_"}).scalars())
    return [place for place in candidates if (name := _name(*place)) in names and _is_empty(connection, name)]


def drop(database: Database, gallery_id: int, version_id: int, attempts: int = ATTEMPTS) -> None:
    """Drop an empty partition, if its lock is free soon; one that remains costs almost nothing."""
    if database.is_sqlite:
        return
    database.partitions.discard((gallery_id, version_id))

    def drop_empty(connection: Connection) -> None:
        take_seq(connection, gallery_id, 0)  # nothing is stored in it meanwhile
        name = _name(gallery_id, version_id)
        if _exists(connection, gallery_id, version_id) and _is_empty(connection, name):
            connection.execute(text(f"drop table {name}"))

    try:
        _try(database, drop_empty, attempts)
    except UnknownGallery:
        return  # its partitions are dropped with it


def drop_gallery(database: Database, gallery_id: int) -> bool:
    """Drop all partitions of a deleted gallery; False: they are being read, and nothing was dropped."""
    if database.is_sqlite:
        return True

    def drop_all(connection: Connection) -> None:
        if names := list(connection.execute(_PARTITIONS, {"prefix": _name(gallery_id, "")}).scalars()):
            connection.execute(text(f"drop table {', '.join(names)}"))

    return _try(database, drop_all)


_PARTITIONS = text(
    "select relname from pg_class join pg_inherits on pg_class.oid = inhrelid"
    " where inhparent = 'embedding'::regclass and starts_with(relname, :prefix)"
)


def _settle(connection: Connection, gallery_id: int, version_id: int) -> None:
    place = (gallery_id, version_id)
    with (
        connection.begin_nested() as savepoint
    ):  # try the lock first: otherwise rows may be copied in vain while the gallery's writers wait
        _lock_out_writers(connection)
        savepoint.rollback()
    try:
        take_seq(connection, gallery_id, 0)  # no item is stored there meanwhile
    except UnknownGallery:
        return
    connection.execute(select(func.pg_advisory_xact_lock(PARTITION_LOCK)))
    if _exists(connection, *place):
        return
    rows_of_place = f"from embedding_default where gallery_id = {gallery_id} and version_id = {version_id}"
    name = _make_beside(connection, *place)
    moved = connection.execute(text(f"insert into {name} select * {rows_of_place}")).rowcount
    connection.execute(text(f"delete {rows_of_place}"))
    _attach(connection, *place)
    # An older snapshot sees the rows in neither partition, so new feed numbers make replicas read them again.
    first = take_seq(connection, gallery_id, moved)
    numbered = f"select item_id, row_number() over (order by item_id) - 1 as place from {name}"  # noqa: S608
    statement = f"update item set seq = :first + place from ({numbered}) moved where id = item_id"  # noqa: S608
    connection.execute(text(statement), {"first": first})


def _make_beside(connection: Connection, gallery_id: int, version_id: int) -> str:
    """Create a table that can become a partition, as creating a partition would block all readers until the commit."""
    name = _name(gallery_id, version_id)
    connection.execute(text(f"create table {name} (like embedding including all)"))
    return name


def _attach(connection: Connection, gallery_id: int, version_id: int) -> None:
    # Lock these two first: attaching would lock them after the default partition, opposite to the order of writers.
    _lock_out_writers(connection)
    bounds = f"from ({gallery_id}, {version_id}) to ({gallery_id}, {version_id + 1})"
    name = _name(gallery_id, version_id)
    connection.execute(text(f"alter table embedding attach partition {name} for values {bounds}"))


def _lock_out_writers(connection: Connection) -> None:
    connection.execute(text("lock table item, version in share row exclusive mode"))


def _name(gallery_id: int, version_id: int | str) -> str:
    return f"embedding_{gallery_id}_{version_id}"


def _is_empty(connection: Connection, name: str) -> bool:
    return connection.execute(text(f"select 1 from {name} limit 1")).first() is None  # noqa: S608 - numbers


def _exists(connection: Connection, gallery_id: int, version_id: int) -> bool:
    found = connection.execute(text("select to_regclass(:name)"), {"name": _name(gallery_id, version_id)})
    return found.scalar_one() is not None


def _is_awaited(connection: Connection, gallery_id: int, version_id: int) -> bool:
    """Whether the default partition holds rows that belong in this one."""
    statement = "select 1 from embedding_default where gallery_id = :gallery and version_id = :version limit 1"
    return connection.execute(text(statement), {"gallery": gallery_id, "version": version_id}).first() is not None


def _try(database: Database, change: Callable[[Connection], None], attempts: int = ATTEMPTS) -> bool:
    """Run a change in a transaction that soon gives up waiting for a lock; returns whether it was made."""
    for attempt in range(attempts):
        if attempt:
            time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            copy_context().run(_change_separately, database, change)
        except DBAPIError as error:
            if not _is_refused(error):
                raise
        else:
            return True
    logger.info(Event("partition_busy"))
    return False


def _change_separately(database: Database, change: Callable[[Connection], None]) -> None:
    COMMIT_STATE.set(CommitState())  # not the change that the request is about
    with database.write() as connection:
        _set_lock_timeout(connection)
        change(connection)


def _set_lock_timeout(connection: Connection) -> None:
    connection.execute(text(f"set local lock_timeout = {int(LOCK_SECONDS * 1000)}"))


def _is_refused(error: DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) in REFUSED
