"""Partitions of embeddings on PostgreSQL: made before the first row, emptied and dropped with version or gallery.

A partition is one gallery's embeddings of one version. Rows stored before it exists lie in the default partition, as
correct and only slower to find; `settle` moves them to their own. So no write ever waits for a partition: a change that
cannot get its lock soon gives up and is tried again. SQLite has no partitions.
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
from service.store.database import COMMIT_STATE, CommitState, Database
from service.store.repository import take_seq

logger = logging.getLogger(__name__)

LOCK_SECONDS = 0.2
"""How long one attempt waits for a lock, blocking those behind it; PostgreSQL checks for deadlocks after a second."""
PARTITION_LOCK = 0x7265_6772_6166_75
"""The advisory lock held while a partition is made: two processes that made the same one would clash by its name."""
ATTEMPTS = 4
PAUSE_SECONDS = 0.1
"""Pause after the first attempt; twice as long after each further one."""
REFUSED = frozenset({"55P03", "40P01", "23514"})
"""SQLSTATEs of a lock timeout, of a deadlock, and of rows that the default partition got meanwhile."""


def make(database: Database, gallery_id: int, version_id: int) -> None:
    """Make the partition of a gallery and version before rows are stored, if its locks are free."""
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

    They come from migration 0020, which makes the largest partitions only, from programs of an older release, which
    make none, and from attempts that got no lock.
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

    False: they do not lie in a partition, or it is being read; nothing was removed.
    """
    if connection.dialect.name == "sqlite" or not _exists(connection, gallery_id, version_id):
        return False
    try:
        with connection.begin_nested():
            _set_lock_timeout(connection)
            # The rows vanish for older snapshots too; dropping would block readers of all other partitions.
            connection.execute(text(f"truncate {_name(gallery_id, version_id)}"))
            connection.execute(text("set local lock_timeout to default"))
    except DBAPIError as error:
        if not _is_refused(error):
            raise
        return False
    return True


def empty_ones(connection: Connection, candidates: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of these galleries and versions that have an empty partition."""
    names = set(connection.execute(_PARTITIONS, {"prefix": "embedding_"}).scalars())
    return [place for place in candidates if (name := _name(*place)) in names and _is_empty(connection, name)]


def drop(database: Database, gallery_id: int, version_id: int, attempts: int = ATTEMPTS) -> None:
    """Drop an empty partition, if its lock is free soon; one that stays costs only its name."""
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
        return  # it takes its partitions with it


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
    ):  # try the lock first: else all is copied for nothing while the gallery's writers wait
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
    # A snapshot from before sees the rows in neither partition: new feed numbers make replicas read them again.
    first = take_seq(connection, gallery_id, moved)
    numbered = f"select item_id, row_number() over (order by item_id) - 1 as place from {name}"  # noqa: S608
    statement = f"update item set seq = :first + place from ({numbered}) moved where id = item_id"  # noqa: S608
    connection.execute(text(statement), {"first": first})


def _make_beside(connection: Connection, gallery_id: int, version_id: int) -> str:
    """Create a table that can become a partition: creating a partition would block all readers until the commit."""
    name = _name(gallery_id, version_id)
    connection.execute(text(f"create table {name} (like embedding including all)"))
    return name


def _attach(connection: Connection, gallery_id: int, version_id: int) -> None:
    # Attaching locks these two after the default partition, in the opposite order of writers.
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
    """Whether the default partition holds embeddings that belong in this one."""
    statement = "select 1 from embedding_default where gallery_id = :gallery and version_id = :version limit 1"
    return connection.execute(text(statement), {"gallery": gallery_id, "version": version_id}).first() is not None


def _try(database: Database, change: Callable[[Connection], None], attempts: int = ATTEMPTS) -> bool:
    """Run a change in a transaction that gives up soon on a lock; returns whether it was made."""
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
    COMMIT_STATE.set(CommitState())  # not a change that the request asked for
    with database.write() as connection:
        _set_lock_timeout(connection)
        change(connection)


def _set_lock_timeout(connection: Connection) -> None:
    connection.execute(text(f"set local lock_timeout = {int(LOCK_SECONDS * 1000)}"))


def _is_refused(error: DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) in REFUSED
