"""Partitions of embeddings on PostgreSQL: made before the first row comes, emptied and dropped with what they hold.

A partition is one gallery's embeddings of one version. What comes before it is there lies in the default partition, as
correct and only slower to find; `settle` brings it to where it belongs. So nobody ever has to wait for a partition, and
what needs a lock that others hold gives up soon and is tried again. SQLite has none.
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
from service.store.database import FATE, Database, Fate
from service.store.repository import take_seq

logger = logging.getLogger(__name__)

LOCK_SECONDS = 0.2
"""How long one attempt waits for a lock, and those behind it with it; PostgreSQL looks for deadlocks after a second."""
MAKING = 0x7265_6772_6166_75
"""The advisory lock that whoever makes a partition holds: two that made the same one would meet at its name."""
ATTEMPTS = 4
PAUSE_SECONDS = 0.1
"""After the first attempt; twice as long after each one more."""
REFUSED = frozenset({"55P03", "40P01", "23514"})
"""The SQLSTATE of a lock not to be had in time, of a deadlock, and of rows that the default partition got meanwhile."""


def make(database: Database, gallery_id: int, version_id: int) -> None:
    """Have a partition for what is going to be stored, if it can be had at once."""
    place = (gallery_id, version_id)
    if database.watched or place in database.partitions:
        return

    def attach(connection: Connection) -> None:
        connection.execute(select(func.pg_advisory_xact_lock(MAKING)))
        if not _exists(connection, *place) and not _waiting(connection, *place):
            _make_beside(connection, *place)
            _attach(connection, *place)

    with database.lookup() as connection:
        there = _exists(connection, *place)
    if there or _tried(database, attach, attempts=1):
        database.partitions.add(place)


def settle(database: Database, stop: threading.Event | None = None) -> bool:
    """Bring what lies in the default partition into partitions of its own, until `stop`; whether nothing is left there.

    It comes from migration 0020, which makes the largest ones only, from programs of an older release, which know of no
    partitions, and from attempts that got no lock.
    """
    if database.watched:
        return True
    with database.lookup() as connection:
        found = connection.execute(text("select distinct gallery_id, version_id from embedding_default"))
        places = sorted((row.gallery_id, row.version_id) for row in found)
    done = [
        _tried(database, partial(_settle, gallery_id=place[0], version_id=place[1]))
        for place in places
        if stop is None or not stop.is_set()
    ]
    return len(done) == len(places) and all(done)


def empty(connection: Connection, gallery_id: int, version_id: int) -> bool:
    """Remove all embeddings of a version in a gallery at once, in its caller's transaction.

    False: they do not lie in a partition, or somebody reads there; nothing was removed.
    """
    if connection.dialect.name == "sqlite" or not _exists(connection, gallery_id, version_id):
        return False
    try:
        with connection.begin_nested():
            _limit(connection)
            # Its rows are gone for every reader, the older ones too; a drop would keep readers of all others waiting.
            connection.execute(text(f"truncate {_name(gallery_id, version_id)}"))
            connection.execute(text("set local lock_timeout to default"))
    except DBAPIError as error:
        if not _is_refused(error):
            raise
        return False
    return True


def empty_ones(connection: Connection, among: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of these galleries and versions that have a partition, with nothing in it."""
    there = set(connection.execute(_PARTITIONS, {"prefix": "embedding_"}).scalars())
    return [place for place in among if (name := _name(*place)) in there and _is_empty(connection, name)]


def drop(database: Database, gallery_id: int, version_id: int, attempts: int = ATTEMPTS) -> None:
    """Drop a partition that is empty, if it can be had soon; one that stays costs nothing but its name."""
    if database.watched:
        return
    database.partitions.discard((gallery_id, version_id))

    def drop_empty(connection: Connection) -> None:
        take_seq(connection, gallery_id, 0)  # nobody stores anything in it meanwhile
        name = _name(gallery_id, version_id)
        if _exists(connection, gallery_id, version_id) and _is_empty(connection, name):
            connection.execute(text(f"drop table {name}"))

    try:
        _tried(database, drop_empty, attempts)
    except UnknownGallery:
        return  # it takes its partitions with it


def drop_gallery(database: Database, gallery_id: int) -> bool:
    """Drop all partitions of a deleted gallery; False: others read there, and nothing was dropped."""
    if database.watched:
        return True

    def drop_all(connection: Connection) -> None:
        if names := list(connection.execute(_PARTITIONS, {"prefix": _name(gallery_id, "")}).scalars()):
            connection.execute(text(f"drop table {', '.join(names)}"))

    return _tried(database, drop_all)


_PARTITIONS = text(
    "select relname from pg_class join pg_inherits on pg_class.oid = inhrelid"
    " where inhparent = 'embedding'::regclass and starts_with(relname, :prefix)"
)


def _settle(connection: Connection, gallery_id: int, version_id: int) -> None:
    place = (gallery_id, version_id)
    with connection.begin_nested() as tried:  # else all is copied for nothing, while the gallery's writers wait
        _keep_writers_out(connection)
        tried.rollback()
    try:
        take_seq(connection, gallery_id, 0)  # keeps those away who store something there
    except UnknownGallery:
        return
    connection.execute(select(func.pg_advisory_xact_lock(MAKING)))
    if _exists(connection, *place):
        return
    which = f"from embedding_default where gallery_id = {gallery_id} and version_id = {version_id}"
    name = _make_beside(connection, *place)
    moved = connection.execute(text(f"insert into {name} select * {which}")).rowcount
    connection.execute(text(f"delete {which}"))
    _attach(connection, *place)
    # Who began to read before sees the rows in neither place: whoever follows the feed looks again.
    first = take_seq(connection, gallery_id, moved)
    numbered = f"select item_id, row_number() over (order by item_id) - 1 as place from {name}"  # noqa: S608
    told = f"update item set seq = :first + place from ({numbered}) moved where id = item_id"  # noqa: S608
    connection.execute(text(told), {"first": first})


def _make_beside(connection: Connection, gallery_id: int, version_id: int) -> str:
    """A table that can become a partition. Made as one, it would keep all readers waiting from its first moment."""
    name = _name(gallery_id, version_id)
    connection.execute(text(f"create table {name} (like embedding including all)"))
    return name


def _attach(connection: Connection, gallery_id: int, version_id: int) -> None:
    # Attaching locks these two after the default partition: those who write would hold the one and wait for the other.
    _keep_writers_out(connection)
    bounds = f"from ({gallery_id}, {version_id}) to ({gallery_id}, {version_id + 1})"
    name = _name(gallery_id, version_id)
    connection.execute(text(f"alter table embedding attach partition {name} for values {bounds}"))


def _keep_writers_out(connection: Connection) -> None:
    connection.execute(text("lock table item, version in share row exclusive mode"))


def _name(gallery_id: int, version_id: int | str) -> str:
    return f"embedding_{gallery_id}_{version_id}"


def _is_empty(connection: Connection, name: str) -> bool:
    return connection.execute(text(f"select 1 from {name} limit 1")).first() is None  # noqa: S608 - numbers


def _exists(connection: Connection, gallery_id: int, version_id: int) -> bool:
    found = connection.execute(text("select to_regclass(:name)"), {"name": _name(gallery_id, version_id)})
    return found.scalar_one() is not None


def _waiting(connection: Connection, gallery_id: int, version_id: int) -> bool:
    """Whether embeddings lie in the default partition that belong into this one."""
    mine = "select 1 from embedding_default where gallery_id = :gallery and version_id = :version limit 1"
    return connection.execute(text(mine), {"gallery": gallery_id, "version": version_id}).first() is not None


def _tried(database: Database, change: Callable[[Connection], None], attempts: int = ATTEMPTS) -> bool:
    """Change something in a transaction that gives up soon where others hold a lock; whether it was done."""
    for attempt in range(attempts):
        if attempt:
            time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            copy_context().run(_change_apart, database, change)
        except DBAPIError as error:
            if not _is_refused(error):
                raise
        else:
            return True
    logger.info(Event("partition_busy"))
    return False


def _change_apart(database: Database, change: Callable[[Connection], None]) -> None:
    FATE.set(Fate())  # none of what the request asked for
    with database.write() as connection:
        _limit(connection)
        change(connection)


def _limit(connection: Connection) -> None:
    connection.execute(text(f"set local lock_timeout = {int(LOCK_SECONDS * 1000)}"))


def _is_refused(error: DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) in REFUSED
