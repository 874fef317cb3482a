"""Move vectors to where the setting requires: settled ones into files of the image store, or all into the database.

One process does this, the one with the lease. A lease that expired while its holder was suspended does no harm: of two
processes, the first moves a vector, and the other's file is dropped.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from index.engines.base import Keys
from index.events import Event
from service.background import Background
from service.settings import VectorStore
from service.store.database.connections import Database
from service.store.galleries.gallery import gallery_states
from service.store.image_store.blobs import Blobs
from service.store.leases.heartbeats import Leases
from service.store.leases.jobs import acquire_job
from service.store.offloading.moves import drop_unused, load_back, offload, sweep
from service.store.outages import RecurringFaults
from service.store.vectors.files import (
    VectorFileRow,
    any_file,
    changed_files,
    count_live,
    files,
    set_counted,
    vector_file,
    vectors_in_database,
)
from service.store.vectors.parquet import parquet

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 2.0
RETRY_SECONDS = 10.0
"""Pause before a retry."""
LEASE_SECONDS = 120.0
JOB = "vectors"
FILE_ROWS = 65_536
"""Most vectors in a file."""
LEAST_ROWS = 16_384
"""Fewer vectors of a gallery and version stay in the database."""
SETTLED_SECONDS = 60.0
"""How long a vector stays in the database after its item was written."""
SCANNED = 65_536
"""Feed numbers that are scanned at a time."""
COUNTED_SECONDS, COUNTED_FILES = 60.0, 8
"""How often the rows that refer to a file are counted, and for how many files at a time."""


@dataclass
class Progress:
    """The progress of one gallery: all vectors up to feed number `scanned` were moved or are `waiting`.

    At time `at`, the feed was at number `marked`: SETTLED_SECONDS later, all items up to `marked` have settled.
    """

    marked: int
    at: float
    scanned: int = 0
    waiting: dict[int, Keys] = field(default_factory=dict)

    def wait(self, version_id: int, keys: Keys) -> None:
        """Add items (keys) of a version whose vectors wait to be moved."""
        held = self.waiting.get(version_id, np.empty(0, np.int64))
        self.waiting[version_id] = np.union1d(held, keys)


class Offloader(Background):
    """A thread that moves vectors."""

    def __init__(self, database: Database, blobs: Blobs, store: VectorStore) -> None:
        """`store`: where to move vectors. Raises NoParquet."""
        if store == "objects":
            parquet()
        super().__init__("vectors")
        self._database, self._blobs, self._store = database, blobs, store
        self._owner, self._until, self._was_lost = uuid.uuid4().hex, 0.0, False
        self._galleries: dict[int, Progress] = {}
        # Files that cannot be read completely, which are logged once.
        self._stuck: set[int] = set()
        self._errors = RecurringFaults(logger)

    def _run(self) -> None:
        pause = PAUSE_SECONDS
        while not self._stop.wait(pause):
            went = self._errors.attempt(Event("vectors_not_moved"), self.look)
            pause = PAUSE_SECONDS if went else RETRY_SECONDS

    def look(self) -> None:
        """Do all work that is due, unless another process holds the lease."""
        out = self._store == "objects"
        with self._database.lookup() as connection:
            if not (out or any_file(connection)):
                return
        if not self._holds_lease():
            return
        sweep(self._database, self._blobs)
        if out:
            self._blobs.check()
            self._compact()
            self._move_settled()
        else:
            self._load_all_back()

    def _holds_lease(self) -> bool:
        if time.monotonic() < self._until - LEASE_SECONDS / 2:
            return not self._stop.is_set()
        has_lease = self._acquire()
        if self._was_lost:
            self._galleries.clear()  # another process moves vectors: search again for what it leaves
            self._was_lost = False
        return has_lease and not self._stop.is_set()

    def _acquire(self) -> bool:
        with self._database.write() as connection:
            has_lease = acquire_job(connection, JOB, self._owner, LEASE_SECONDS)
        self._until = time.monotonic() + LEASE_SECONDS if has_lease else 0.0
        self._was_lost = self._was_lost or not has_lease
        return has_lease

    @contextmanager
    def _keeping_lease(self) -> Iterator[None]:
        """Renew the lease meanwhile: another process would drop a file that is being uploaded, and upload its own."""

        def extend(_: str) -> None:
            self._acquire()

        leases: Leases[str] = Leases(extend, LEASE_SECONDS)
        leases.hold(JOB)
        try:
            yield
        finally:
            leases.close()

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
            # There are at least as many feed numbers as items, so a small gallery is never scanned.
            if settled - progress.scanned + waiting >= LEAST_ROWS:
                self._move(gallery_id, progress, settled)

    def _move(self, gallery_id: int, progress: Progress, settled: int) -> None:
        while progress.scanned < settled:
            upto = min(progress.scanned + SCANNED, settled)
            found: dict[int, list[int]] = defaultdict(list)
            with self._database.lookup() as connection:
                for key, version_id in vectors_in_database(connection, gallery_id, progress.scanned, upto):
                    found[version_id].append(key)
            for version_id, keys in found.items():
                progress.wait(version_id, np.array(keys))
            progress.scanned = upto
            if not self._cut(gallery_id, progress, settled, FILE_ROWS):
                return
        self._cut(gallery_id, progress, settled, LEAST_ROWS)

    def _cut(self, gallery_id: int, progress: Progress, settled: int, least: int) -> bool:
        """Move waiting vectors while there are at least `least`; False: the lease is lost, or the thread stops."""
        waiting = progress.waiting
        for version_id in list(waiting):
            while len(waiting[version_id]) >= least:
                if not self._holds_lease():
                    return False
                place, keys = (gallery_id, version_id), waiting[version_id]
                batch = keys[:FILE_ROWS].tolist()
                limits = (batch, settled, LEAST_ROWS, self._holds_lease, self._keeping_lease)
                kept_back = offload(self._database, self._blobs, place, *limits)
                waiting[version_id] = np.union1d(keys[FILE_ROWS:], kept_back)
        return True

    def _compact(self) -> None:
        """Drop files to which no row refers; if few rows do, load their vectors back, to be moved with others."""
        with self._database.lookup() as connection:
            candidates = changed_files(connection, COUNTED_SECONDS, COUNTED_FILES)
        for file, seq in candidates:
            if not self._holds_lease():
                return
            try:
                self._compact_file(file)
            except Exception:
                self._set_counted(file, file.counted_seq)  # again in a while, after the others
                raise
            if self._stop.is_set():
                return  # perhaps in the middle: the next process continues, also if nobody writes any more
            self._set_counted(file, seq)

    def _compact_file(self, file: VectorFileRow) -> None:
        with self._database.lookup() as connection:
            live = count_live(connection, file)
        if 0 < 2 * live < file.rows:
            brought, _ = load_back(self._database, file, self._stop)
            if file.gallery_id in self._galleries:
                self._galleries[file.gallery_id].wait(file.version_id, np.array(brought, np.int64))
        if 2 * live < file.rows:
            drop_unused(self._database, file)

    def _set_counted(self, file: VectorFileRow, seq: int) -> None:
        with self._database.write() as connection:
            set_counted(connection, file.id, seq)

    def _load_all_back(self) -> None:
        with self._database.lookup() as connection:
            kept_files = files(connection, vector_file.c.state == "kept")
        for file in kept_files:
            if file.id in self._stuck:
                continue
            if not self._holds_lease():
                return
            brought, damaged = load_back(self._database, file, self._stop)
            logger.info(Event("vectors_brought_home", file=file.key, items=len(brought)))
            if damaged:
                self._stuck.add(file.id)
                logger.error(Event("vectors_not_brought_home", file=file.key, items=damaged))
            elif not self._stop.is_set():
                drop_unused(self._database, file)
