"""Free the embeddings of retired versions, and deleted galleries, block by block, so that no writer waits long.

A request frees what it retired, and a small gallery, before it answers. The thread of `Reaper` frees the rest, and what
a killed process left, which it finds by a deployment's `to_free` or the row of a deleted gallery.
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
from service.registry.placement import placement_in
from service.registry.registry import Registry
from service.store.database.connections import Database
from service.store.galleries import partitions
from service.store.galleries.deletion import deleted_galleries
from service.store.galleries.embeddings import first_held
from service.store.galleries.gallery import gallery_row, take_seq
from service.store.image_store.blobs import Blobs
from service.store.outages import RecurringFaults, log_failure
from service.store.rows import EMPTIED
from service.store.sql.arrays import key_range, key_table
from service.store.sql.partitioned import in_gallery
from service.store.tables import deployment, embedding, item
from service.upgrades.deployments.history import DeploymentState
from service.upgrades.deployments.retiring import holds_version
from service.upgrades.gallery_removal import free_gallery, free_small_gallery

logger = logging.getLogger(__name__)

BLOCK = 5_000
"""Embeddings freed in one transaction."""
SETTLE_SECONDS = 30.0
"""Pause between two attempts to move rows out of PostgreSQL's default partition."""
RETRY_SECONDS = 10.0
"""Pause before a retry."""


class Reaper(Background):
    """Frees embeddings and galleries: within the requests of its process, and the rest on a thread."""

    def __init__(self, database: Database, registry: Registry, blobs: Blobs) -> None:
        super().__init__("freeing")
        self._database, self._registry = database, registry
        self._blobs = blobs
        self._errors = RecurringFaults(logger)
        self._work_left = threading.Event()
        self._work_left.set()  # a killed process may have left work

    def free(self, gallery_id: int, version_id: int) -> None:
        """Free a retired version's embeddings; idempotent. A failure is raised, and retried on the thread."""
        try:
            free(self._database, self._registry, gallery_id, version_id)
        except Exception:
            self._work_left.set()
            raise

    def free_gallery(self, gallery_id: int) -> None:
        """Free a deleted gallery: a small one now, a large one on the thread. A failure is retried there."""
        try:
            done = free_small_gallery(self._database, self._blobs, gallery_id)
        except Exception as error:  # the gallery is deleted nevertheless
            log_failure(logger, Event("freeing_failed"), error)
            done = False
        if not done:
            self._work_left.set()

    def _run(self) -> None:
        while True:
            self._work_left.wait(None if self._database.is_sqlite else SETTLE_SECONDS)
            self._work_left.clear()
            if self._stop.is_set():
                return
            if not self._free_rest():
                self._work_left.set()
                self._stop.wait(RETRY_SECONDS)

    def _wake(self) -> None:
        self._work_left.set()

    def _free_rest(self) -> bool:
        """Free all unfinished retirements and galleries, each independently. Returns whether nothing failed."""
        try:
            settled = partitions.settle(self._database, self._stop)
            drop_empty_partitions(self._database)
            unfinished = self._unfinished()
        except Exception:
            self._errors.log(Event("freeing_failed"))
            return False
        succeeded = [
            self._errors.attempt(Event("freeing_failed", gallery_id=number), work) for number, work in unfinished
        ]
        return all(succeeded) and settled

    def _unfinished(self) -> list[tuple[int, Callable[[], object]]]:
        """For each retired version and deleted gallery: the gallery's number, and a function that frees it."""
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
            all_freed = _announce(database, gallery_id, version_id, stop)
        else:
            all_freed = _free(database, registry, gallery_id, version_id, stop)
    except UnknownGallery:
        return  # the gallery was deleted, with everything in it
    if all_freed:
        partitions.drop(database, gallery_id, version_id)


def drop_empty_partitions(database: Database) -> None:
    """Drop the empty partitions of retired versions that a reader or a kill kept from being dropped."""
    if database.is_sqlite:
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
    """Whether the retirement itself removed the embeddings, so that only replicas must still be notified."""
    emptied = select(deployment.c.id).where(*_retired(gallery_id, version_id), deployment.c.to_free == EMPTIED)
    with database.lookup() as connection:
        return connection.execute(emptied.limit(1)).first() is not None


def _announce(database: Database, gallery_id: int, version_id: int, stop: threading.Event | None) -> bool:
    """Give all items new feed numbers, block by block, as it is no longer known which of them held an embedding."""
    after: int | None = 0
    while after is not None:
        if stop is not None and stop.is_set():
            return False
        with database.write() as connection:
            after = _announce_block(connection, gallery_id, version_id, after)
    return True


def _announce_block(connection: Connection, gallery_id: int, version_id: int, after: int) -> int | None:
    """Announce up to BLOCK items after key `after`; returns the last key, or None if there were none."""
    take_seq(connection, gallery_id, 0)
    conditions = (item.c.gallery_id == gallery_id, item.c.id > after, item.c.deleted == false())
    keys = list(connection.execute(select(item.c.id).where(*conditions).order_by(item.c.id).limit(BLOCK)).scalars())
    if not keys:
        connection.execute(update(deployment).where(*_retired(gallery_id, version_id)).values(to_free=None))
        return None
    seq, keys_listed = take_seq(connection, gallery_id, len(keys)), key_table(connection, keys)
    connection.execute(update(item).where(item.c.id == keys_listed.key).values(seq=seq + keys_listed.place))
    return int(keys[-1])


def _free(
    database: Database, registry: Registry, gallery_id: int, version_id: int, stop: threading.Event | None
) -> bool:
    """Free embeddings block by block. Returns whether all are freed."""
    # Each block is searched from where the last one ended, without a lock.
    keys = _next_keys(database, gallery_id, version_id, None)
    is_last = False
    while not is_last:
        if stop is not None and stop.is_set():
            return False
        next_keys = _next_keys(database, gallery_id, version_id, int(keys[-1])) if len(keys) else keys
        is_last = not len(next_keys)
        with database.write() as connection:
            if not _free_block(connection, registry, gallery_id, version_id, keys.tolist(), last=is_last):
                return False
        keys = next_keys
    return True


def _next_keys(database: Database, gallery_id: int, version_id: int, after: int | None) -> NDArray[np.int64]:
    with database.read() as connection:
        return key_range(connection, item.c.id, holds_version(gallery_id, version_id), BLOCK, after)


def _free_block(
    connection: Connection, registry: Registry, gallery_id: int, version_id: int, keys: Sequence[int], *, last: bool
) -> bool:
    """Free the items `keys`. False: another process ended the retirement, or the version was deployed again."""
    seq = take_seq(connection, gallery_id, len(keys))
    if not _is_under_way(connection, gallery_id, version_id):
        connection.execute(update(deployment).where(*_retired(gallery_id, version_id)).values(to_free=None))
        return False
    gallery = gallery_row(connection, gallery_id)
    assert gallery is not None
    registry.sync_edges()
    # An item that the version serves again, because another version was deployed since, keeps its embedding.
    served = first_held(placement_in(registry, gallery).version_order)
    in_block = item.c.id.in_(key_table(connection, keys).keys)
    idle = list(connection.execute(select(item.c.id).where(in_block, served.is_distinct_from(version_id))).scalars())
    freed = key_table(connection, idle)
    conditions = (in_gallery(embedding, gallery_id), embedding.c.version_id == version_id)
    count = connection.execute(delete(embedding).where(*conditions, embedding.c.item_id.in_(freed.keys))).rowcount
    connection.execute(update(item).where(item.c.id == freed.key).values(seq=seq + freed.place))
    left = None if last else case((deployment.c.to_free > count, deployment.c.to_free - count), else_=1)
    connection.execute(update(deployment).where(*_retired(gallery_id, version_id)).values(to_free=left))
    return True


def _is_under_way(connection: Connection, gallery_id: int, version_id: int) -> bool:
    """Whether the retirement goes on: it retired all ended deployments, so one in another state began later."""
    conditions = (deployment.c.gallery_id == gallery_id, deployment.c.version_id == version_id)
    rows = connection.execute(select(deployment.c.state, deployment.c.to_free).where(*conditions)).all()
    return all(row.state == DeploymentState.RETIRED for row in rows) and any(row.to_free is not None for row in rows)


def _retired(gallery_id: int, version_id: int) -> tuple[ColumnElement[bool], ...]:
    conditions = (deployment.c.gallery_id == gallery_id, deployment.c.version_id == version_id)
    return (*conditions, deployment.c.to_free.is_not(None))
