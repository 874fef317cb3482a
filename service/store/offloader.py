"""Keeps vectors where the setting says: settled ones in files of the image store, or all of them in the database.

Of all processes one does it, by a lease. One that ran out while its holder was stopped is no danger: what two of them
move, the first moves, and the file of the other is dropped.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from index.engines.base import Keys
from index.events import Event
from service.background import Background
from service.logs import RecurringErrors
from service.settings import VectorStore
from service.store.blobs import Blobs
from service.store.database import Database
from service.store.job_leases import take_job
from service.store.offloading import bring_home, drop_unused, move_out, sweep
from service.store.repository import gallery_states
from service.store.vector_files import (
    any_file,
    changed_files,
    count_live,
    files,
    held_here,
    note_live,
    vector_file,
)
from service.store.vector_parquet import parquet

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 2.0
AGAIN_SECONDS = 10.0
"""Pause before what failed is tried again."""
LEASE_SECONDS = 120.0
JOB = "vectors"
FILE_ROWS = 65_536
"""Vectors in a file, at most."""
LEAST_ROWS = 16_384
"""Fewer of a gallery and version stay in the database."""
SETTLED_SECONDS = 60.0
"""So long a vector stays in the database after its item was written."""
SCANNED = 65_536
"""Numbers of the feed that are looked at at a time."""
COUNTED_SECONDS, COUNTED_FILES = 60.0, 8
"""How often the rows that speak of one file are counted, and in how many files at a time."""


@dataclass
class Progress:
    """How far one gallery is: `scanned` a number of the feed up to which all vectors were moved or are `waiting`.

    The feed stood at `marked` when it was looked at, at `at`: once that is long ago, all up to there has settled.
    """

    marked: int
    at: float
    scanned: int = 0
    waiting: dict[int, Keys] = field(default_factory=dict)

    def wait(self, version_id: int, keys: Keys) -> None:
        """Have more items of a version wait for their vectors to be moved."""
        held = self.waiting.get(version_id, np.empty(0, np.int64))
        self.waiting[version_id] = np.union1d(held, keys)


class Offloader(Background):
    """A thread that moves vectors."""

    def __init__(self, database: Database, blobs: Blobs, store: VectorStore) -> None:
        """`store`: where vectors are to be. Raises NoParquet."""
        if store == "objects":
            parquet()
        super().__init__("vectors")
        self._database, self._blobs, self._store = database, blobs, store
        self._owner, self._until = uuid.uuid4().hex, 0.0
        self._galleries: dict[int, Progress] = {}
        # Files of which something cannot be read: told once.
        self._stuck: set[int] = set()
        self._errors = RecurringErrors(logger)

    def _run(self) -> None:
        pause = PAUSE_SECONDS
        while not self._stop.wait(pause):
            went = self._errors.attempt(Event("vectors_not_moved"), self.look)
            pause = PAUSE_SECONDS if went else AGAIN_SECONDS

    def look(self) -> None:
        """Do all that is due now, if no other process does."""
        out = self._store == "objects"
        with self._database.lookup() as connection:
            if not (out or any_file(connection)):
                return
        if not self._leased():
            self._galleries.clear()
            return
        sweep(self._database, self._blobs)
        if out:
            self._blobs.check()
            self._thin_out()
            self._move_settled()
        else:
            self._bring_all_home()

    def _leased(self) -> bool:
        if time.monotonic() < self._until - LEASE_SECONDS / 2:
            return not self._stop.is_set()
        with self._database.write() as connection:
            condition = take_job(connection, JOB, self._owner, LEASE_SECONDS)
        self._until = time.monotonic() + LEASE_SECONDS if condition else 0.0
        return condition and not self._stop.is_set()

    def _move_settled(self) -> None:
        now = time.monotonic()
        with self._database.lookup() as connection:
            galleries = gallery_states(connection)
        self._galleries = {key: kept for key, kept in self._galleries.items() if key in galleries}
        for gallery_id, (next_seq, _) in galleries.items():
            progress = self._galleries.setdefault(gallery_id, Progress(next_seq - 1, now))
            if now - progress.at < SETTLED_SECONDS:
                continue
            settled, progress.marked, progress.at = progress.marked, next_seq - 1, now
            waiting = sum(map(len, progress.waiting.values()))
            # Vectors are as many as numbers of the feed, or fewer: a small gallery is never looked at.
            if settled - progress.scanned + waiting >= LEAST_ROWS:
                self._move(gallery_id, progress, settled)

    def _move(self, gallery_id: int, progress: Progress, settled: int) -> None:
        while progress.scanned < settled:
            upto = min(progress.scanned + SCANNED, settled)
            found: dict[int, list[int]] = defaultdict(list)
            with self._database.lookup() as connection:
                for key, version_id in held_here(connection, gallery_id, progress.scanned, upto):
                    found[version_id].append(key)
            for version_id, keys in found.items():
                progress.wait(version_id, np.array(keys))
            progress.scanned = upto
            if not self._cut(gallery_id, progress, settled, FILE_ROWS):
                return
        self._cut(gallery_id, progress, settled, LEAST_ROWS)

    def _cut(self, gallery_id: int, progress: Progress, settled: int, least: int) -> bool:
        """Move those that wait while there are so many; False: another process does, or it is to end."""
        waiting = progress.waiting
        for version_id in list(waiting):
            while len(waiting[version_id]) >= least:
                if not self._leased():
                    return False
                place, keys = (gallery_id, version_id), waiting[version_id]
                some = keys[:FILE_ROWS].tolist()
                few = move_out(self._database, self._blobs, place, some, settled, LEAST_ROWS, self._leased)
                waiting[version_id] = np.union1d(keys[FILE_ROWS:], few)
        return True

    def _thin_out(self) -> None:
        """Drop files of which no row speaks any more; where few do, bring those home, to be moved with others."""
        with self._database.lookup() as connection:
            some = changed_files(connection, time.time() - COUNTED_SECONDS, COUNTED_FILES)
        for file, seq in some:
            if not self._leased():
                return
            with self._database.lookup() as connection:
                live = count_live(connection, file)
            with self._database.write() as connection:
                note_live(connection, file.id, live, seq)
            if 0 < 2 * live < file.rows:
                brought, _ = bring_home(self._database, file, self._stop)
                if file.gallery_id in self._galleries:
                    self._galleries[file.gallery_id].wait(file.version_id, np.array(brought, np.int64))
            if 2 * live < file.rows:
                drop_unused(self._database, file)

    def _bring_all_home(self) -> None:
        with self._database.lookup() as connection:
            there = files(connection, vector_file.c.state == "kept")
        for file in there:
            if file.id in self._stuck:
                continue
            if not self._leased():
                return
            brought, damaged = bring_home(self._database, file, self._stop)
            logger.info(Event("vectors_brought_home", file=file.key, items=len(brought)))
            if damaged:
                self._stuck.add(file.id)
                logger.error(Event("vectors_not_brought_home", file=file.key, items=damaged))
            elif not self._stop.is_set():
                drop_unused(self._database, file)
