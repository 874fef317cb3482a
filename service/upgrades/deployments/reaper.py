"""Freeing what a retired version holds in a gallery, and deleted galleries: block by block, so that nobody waits long.

A request frees what it retired, and a small gallery, before it answers. What it could not, and what a process that was
killed left behind, is a deployment with `to_free` or the row of a deleted gallery: a thread goes on with it, without
keeping a process that starts from answering queries.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, case, delete, false, func, select, update

from index.events import Event
from service.background import Background
from service.errors import UnknownGallery
from service.logs import RecurringErrors
from service.registry.placement import places_in
from service.registry.registry import Registry
from service.store import partitions
from service.store.blobs import Blobs
from service.store.database import Database
from service.store.deletion import deleted_galleries
from service.store.embeddings import first_held
from service.store.partitioned import in_gallery
from service.store.repository import gallery_row, take_seq
from service.store.rows import EMPTIED
from service.store.sql_arrays import key_range, listed
from service.store.tables import deployment, embedding, item
from service.upgrades.deployments.history import DeploymentState
from service.upgrades.deployments.retiring import holding
from service.upgrades.gallery_removal import free_gallery, free_small_gallery

logger = logging.getLogger(__name__)

BLOCK = 5_000
"""Embeddings freed in one transaction."""
SETTLE_SECONDS = 30.0
"""Between looks for embeddings that lie in no partition of their own."""
AGAIN_SECONDS = 10.0
"""Pause before what failed is tried again."""


class Reaper(Background):
    """Frees embeddings and galleries in one process: at once for its requests, on a thread what is left unfinished."""

    def __init__(self, database: Database, registry: Registry, blobs: Blobs) -> None:
        super().__init__("freeing")
        self._database, self._registry = database, registry
        self._blobs = blobs
        self._errors = RecurringErrors(logger)
        self._left = threading.Event()
        self._left.set()  # perhaps by a process that was killed

    def free(self, gallery_id: int, version_id: int) -> None:
        """Free a retired version's embeddings; harmless when it is done already. What fails is tried again later."""
        try:
            free(self._database, self._registry, gallery_id, version_id)
        except Exception:
            self._left.set()
            raise

    def free_gallery(self, gallery_id: int) -> None:
        """Free a deleted gallery: a small one now, another on the thread. What fails is tried again later."""
        try:
            done = free_small_gallery(self._database, self._blobs, gallery_id)
        except Exception:  # it is deleted all the same
            logger.exception(Event("freeing_failed"))
            done = False
        if not done:
            self._left.set()

    def _run(self) -> None:
        while True:
            self._left.wait(None if self._database.watched else SETTLE_SECONDS)
            self._left.clear()
            if self._stop.is_set():
                return
            if not self._go_on():
                self._left.set()
                self._stop.wait(AGAIN_SECONDS)

    def _wake(self) -> None:
        self._left.set()

    def _go_on(self) -> bool:
        """Free all that is left, each whatever becomes of the others; whether nothing failed."""
        try:
            settled = partitions.settle(self._database, self._stop)
            drop_left(self._database)
            left = self._unfinished()
        except Exception:
            self._errors.log(Event("freeing_failed"))
            return False
        went = [self._errors.attempt(Event("freeing_failed", gallery_id=number), work) for number, work in left]
        return all(went) and settled

    def _unfinished(self) -> list[tuple[int, Callable[[], object]]]:
        """The gallery and what frees it, of each retired version and deleted gallery."""
        columns = (deployment.c.gallery_id, deployment.c.version_id)
        with self._database.lookup() as connection:
            rows = connection.execute(select(*columns).where(deployment.c.to_free.is_not(None)).distinct()).all()
            deleted = deleted_galleries(connection)
        return [
            *((row.gallery_id, partial(free, self._database, self._registry, *row, self._stop)) for row in rows),
            *((number, partial(free_gallery, self._database, self._blobs, number, self._stop)) for number in deleted),
        ]


def free(
    database: Database, registry: Registry, gallery_id: int, version_id: int, stop: threading.Event | None = None
) -> None:
    """Free a retired version's embeddings until all are gone, or `stop` is set."""
    try:
        if _emptied(database, gallery_id, version_id):
            whole = _tell(database, gallery_id, version_id, stop)
        else:
            whole = _free(database, registry, gallery_id, version_id, stop)
    except UnknownGallery:
        return  # it took everything with it
    if whole:
        partitions.drop(database, gallery_id, version_id)


def drop_left(database: Database) -> None:
    """Drop the empty partitions of retired versions whose drop met a reader, or was cut off."""
    if database.watched:
        return
    columns = (deployment.c.gallery_id, deployment.c.version_id)
    last = select(func.max(deployment.c.id)).group_by(*columns)
    over = (deployment.c.state == DeploymentState.RETIRED, deployment.c.to_free.is_(None))
    with database.lookup() as connection:
        retired = connection.execute(select(*columns).where(deployment.c.id.in_(last), *over).order_by(*columns))
        left = partitions.empty_ones(connection, [(row.gallery_id, row.version_id) for row in retired])
    for place in left:
        partitions.drop(database, *place, attempts=1)


def _emptied(database: Database, gallery_id: int, version_id: int) -> bool:
    """Whether the embeddings went with their retirement, and only the replicas have still to hear of it."""
    emptied = select(deployment.c.id).where(*_retired(gallery_id, version_id), deployment.c.to_free == EMPTIED)
    with database.lookup() as connection:
        return connection.execute(emptied.limit(1)).first() is not None


def _tell(database: Database, gallery_id: int, version_id: int, stop: threading.Event | None) -> bool:
    """Have replicas look again at all items, block by block: which of them held something nobody knows any more."""
    after: int | None = 0
    while after is not None:
        if stop is not None and stop.is_set():
            return False
        with database.write() as connection:
            after = _tell_block(connection, gallery_id, version_id, after)
    return True


def _tell_block(connection: Connection, gallery_id: int, version_id: int, after: int) -> int | None:
    """Returns the last key; None: there was none behind `after`."""
    take_seq(connection, gallery_id, 0)
    mine = (item.c.gallery_id == gallery_id, item.c.id > after, item.c.deleted == false())
    keys = list(connection.execute(select(item.c.id).where(*mine).order_by(item.c.id).limit(BLOCK)).scalars())
    if not keys:
        connection.execute(update(deployment).where(*_retired(gallery_id, version_id)).values(to_free=None))
        return None
    seq, told = take_seq(connection, gallery_id, len(keys)), listed(connection, keys)
    connection.execute(update(item).where(item.c.id == told.key).values(seq=seq + told.place))
    return int(keys[-1])


def _free(
    database: Database, registry: Registry, gallery_id: int, version_id: int, stop: threading.Event | None
) -> bool:
    """Whether all went."""
    # Each block is looked for from where the last one ended, while nobody waits.
    keys = _next_holding(database, gallery_id, version_id, None)
    whole = False
    while not whole:
        if stop is not None and stop.is_set():
            return False
        following = _next_holding(database, gallery_id, version_id, int(keys[-1])) if len(keys) else keys
        whole = not len(following)
        with database.write() as connection:
            if not _free_block(connection, registry, gallery_id, version_id, keys.tolist(), last=whole):
                return False
        keys = following
    return True


def _next_holding(database: Database, gallery_id: int, version_id: int, behind: int | None) -> NDArray[np.int64]:
    with database.read() as connection:
        return key_range(connection, item.c.id, holding(gallery_id, version_id), BLOCK, behind)


def _free_block(
    connection: Connection, registry: Registry, gallery_id: int, version_id: int, keys: Sequence[int], *, last: bool
) -> bool:
    """False: another process ended the retirement, or the version was deployed again and keeps what is left."""
    seq = take_seq(connection, gallery_id, len(keys))
    if not _is_under_way(connection, gallery_id, version_id):
        connection.execute(update(deployment).where(*_retired(gallery_id, version_id)).values(to_free=None))
        return False
    gallery = gallery_row(connection, gallery_id)
    assert gallery is not None
    registry.sync_edges()
    # An item that the version serves since, because another was deployed, keeps what it lives on.
    served = first_held(places_in(registry, gallery).order)
    among = item.c.id.in_(listed(connection, keys).keys)
    idle = list(connection.execute(select(item.c.id).where(among, served.is_distinct_from(version_id))).scalars())
    freed = listed(connection, idle)
    mine = (in_gallery(embedding, gallery_id), embedding.c.version_id == version_id)
    count = connection.execute(delete(embedding).where(*mine, embedding.c.item_id.in_(freed.keys))).rowcount
    connection.execute(update(item).where(item.c.id == freed.key).values(seq=seq + freed.place))
    left = None if last else case((deployment.c.to_free > count, deployment.c.to_free - count), else_=1)
    connection.execute(update(deployment).where(*_retired(gallery_id, version_id)).values(to_free=left))
    return True


def _is_under_way(connection: Connection, gallery_id: int, version_id: int) -> bool:
    """Whether a retirement still frees; it took all ended deployments, so one that is not retired began since."""
    mine = (deployment.c.gallery_id == gallery_id, deployment.c.version_id == version_id)
    rows = connection.execute(select(deployment.c.state, deployment.c.to_free).where(*mine)).all()
    return all(row.state == DeploymentState.RETIRED for row in rows) and any(row.to_free is not None for row in rows)


def _retired(gallery_id: int, version_id: int) -> tuple[ColumnElement[bool], ...]:
    mine = (deployment.c.gallery_id == gallery_id, deployment.c.version_id == version_id)
    return (*mine, deployment.c.to_free.is_not(None))
