"""The indexer: a thread that seals, indexes and merges galleries' rows, concurrently with queries and writes.

Among processes that share a data folder, one at a time builds a gallery: the one that holds the lock of the gallery's
folder. The others adopt the segments that it built.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from index.engines.memory.segments import SETTLED_SECONDS
from index.events import CONTEXT, Event
from service.background import Background
from service.replica.index_files import locked
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica
from service.store.outages import RecurringFaults

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
ACTIVE_SECONDS = SETTLED_SECONDS + 5 * PAUSE_SECONDS
"""How long after its last change a gallery is checked, which is until its head has settled. Idle ones cost nothing."""
PAUSE_FACTOR, MAX_PAUSE_SECONDS = 9, 600.0
"""After a failure, such as a full disk, building a gallery pauses this many times as long as the failed step took."""
SWEEP_SECONDS = 600.0
"""How often index files of deleted galleries and retired versions are looked for: another machine may delete them."""
STOP_SECONDS = 2.0
"""How long a stop waits; an unfinished build is lost anyway, and FAISS checks for a stop every few thousand rows."""


class Indexer(Background):
    """A thread that finds galleries that changed, and builds the segments that are due."""

    def __init__(self, replica: Replica) -> None:
        super().__init__("indexer", STOP_SECONDS)
        self._replica = replica
        # Gallery -> its feed number, and when that was first seen; if it paused or was locked since, when that ended.
        self._unchanged_since: dict[int, tuple[int, float]] = {}
        # Gallery -> until when it pauses; and when the present step of a build began.
        self._paused_until: dict[int, float] = {}
        self._step_began = 0.0
        # Files that nobody reads again are removed: how many galleries were forgotten then, and when. Not at the start.
        self._swept: tuple[int, float] | None = None
        self._errors = RecurringFaults(logger)

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_SECONDS):
            self._round()

    def _round(self) -> None:
        self._errors.attempt(Event("memory_not_measured"), self._measure)
        now = time.monotonic()
        self._paused_until = {number: until for number, until in self._paused_until.items() if until > now}
        # Keep only numbers: a reference to a gallery would prevent that it is unloaded.
        self._unchanged_since = {loaded.id: self._seq_and_time(loaded) for loaded in self._replica.all()}
        self._sweep(now)
        for number in list(self._unchanged_since):
            loaded = self._replica.cache.in_use(number)
            if loaded is None:
                continue
            if not self._errors.attempt(
                Event("index_failed", gallery=loaded.name), partial(self._index_gallery, loaded)
            ):
                del self._unchanged_since[number]

    def _sweep(self, now: float) -> None:
        """Remove the files of deleted galleries and retired versions, if some may be left."""
        forgotten = self._replica.forgotten
        is_swept = self._swept is not None and self._swept[0] == forgotten and now - self._swept[1] < SWEEP_SECONDS
        if not is_swept and self._errors.attempt(Event("indexes_not_swept"), self._replica.sweep_indexes):
            self._swept = forgotten, now

    def _measure(self) -> None:
        """Measure galleries again: filters and indexes add to their size without a write."""
        for loaded in self._replica.all():
            loaded.bytes = loaded.gallery.bytes()
        self._replica.cache.make_room()

    def _seq_and_time(self, loaded: LoadedGallery) -> tuple[int, float]:
        before, seq = self._unchanged_since.get(loaded.id), loaded.seq
        is_unchanged = before is not None and before[0] == seq and loaded.id not in self._paused_until
        return before if before is not None and is_unchanged else (seq, time.monotonic())

    def _index_gallery(self, loaded: LoadedGallery) -> None:
        if not (loaded.gallery.is_large() or loaded.folder.exists()):
            return
        with locked(loaded.folder) as is_locked:
            # First adopt what another process built: nothing is built twice.
            loaded.gallery.adopt_segments()
            if not is_locked:
                # Another process may be building; if it dies, this one has to.
                self._unchanged_since[loaded.id] = loaded.seq, time.monotonic()
            elif self._is_due(loaded):
                self._work_or_pause(loaded)

    def _is_due(self, loaded: LoadedGallery) -> bool:
        is_active = time.monotonic() - self._unchanged_since[loaded.id][1] <= ACTIVE_SECONDS
        return is_active and loaded.id not in self._paused_until

    def _work_or_pause(self, loaded: LoadedGallery) -> None:
        """Build what is due; after a failure, the gallery pauses."""
        self._step_began = time.monotonic()
        try:
            self._work(loaded)
        except Exception as error:
            now = time.monotonic()
            self._paused_until[loaded.id] = now + min(PAUSE_FACTOR * (now - self._step_began), MAX_PAUSE_SECONDS)
            if isinstance(error, OSError):
                self._replica.refresh(loaded.id)
                if not self._is_known(loaded):  # files of a deleted gallery are removed while they are written
                    return
            raise

    def _work(self, loaded: LoadedGallery) -> None:
        self._build(loaded)
        # The gallery may have changed during the build, and it is not checked again once it is idle.
        seq, since = self._seq_and_time(loaded)
        settled = seq == loaded.seq and time.monotonic() - since > SETTLED_SECONDS
        self._replica.write_snapshot(loaded, settled=settled)

    def _is_known(self, loaded: LoadedGallery) -> bool:
        return self._replica.cache.in_use(loaded.id) is loaded

    def _build(self, loaded: LoadedGallery) -> None:
        self._replica.refresh(loaded.id)  # so that no files of another process look like those of a removed shard
        loaded.gallery.sweep_files()
        started = time.monotonic()

        def stopped() -> bool:
            return self._stop.is_set() or not self._is_known(loaded)

        token = CONTEXT.set({**CONTEXT.get(), "gallery": loaded.name})  # also for log lines about its segments
        try:
            while not stopped() and loaded.gallery.build_index(stopped):
                seconds = time.monotonic() - started
                logger.info(Event("indexed", items=loaded.gallery.indexed_count(), seconds=round(seconds, 1)))
                # The next build may take minutes; after a crash during it, the start needs the snapshot.
                self._replica.write_snapshot(loaded, settled=False)
                self._step_began = time.monotonic()
        finally:
            CONTEXT.reset(token)
