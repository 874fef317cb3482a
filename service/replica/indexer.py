"""Indexing: seals, indexes and merges what galleries took in, on a thread beside queries and writes.

Of the processes over one data folder one at a time builds a gallery: whoever of those that have loaded it holds the
lock of its folder. The others take over what it built.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from index.engines.segments import SETTLED_SECONDS
from index.events import CONTEXT, Event
from service.background import Background
from service.logs import RecurringErrors
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
LOOKED_AT_SECONDS = SETTLED_SECONDS + 5 * PAUSE_SECONDS
"""So long after its last change a gallery is looked at: until its head has settled. Idle ones cost nothing."""
STOP_SECONDS = 2.0
"""How long a stop waits for it: what it builds is lost anyway, and FAISS is asked between thousands of rows."""


class Indexer(Background):
    """A thread that looks which shards have grown, and builds what is due."""

    def __init__(self, replica: Replica) -> None:
        super().__init__("indexer", STOP_SECONDS)
        self._replica = replica
        # Gallery -> its feed number, and when it was first seen to stand there.
        self._stands: dict[int, tuple[int, float]] = {}
        # Whether there may be files of galleries that went: some while nothing ran here.
        self._unswept = True
        self._errors = RecurringErrors(logger)

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_SECONDS):
            self._round()

    def _round(self) -> None:
        self._errors.attempt(Event("memory_not_measured"), self._measure)
        # Numbers alone: what this thread held on to, in a pause or while it builds, could not be unloaded.
        before, self._stands = self._stands, {live.id: self._stood(live) for live in self._replica.all()}
        self._unswept |= bool(before.keys() - self._stands.keys())
        if self._unswept:
            self._unswept = not self._errors.attempt(Event("indexes_not_swept"), self._replica.sweep_indexes)
        for number in list(self._stands):
            live = self._replica.cache.in_use(number)
            if live is None:
                continue
            if not self._errors.attempt(Event("index_failed", gallery=live.name), partial(self._look_at, live)):
                del self._stands[number]

    def _measure(self) -> None:
        """Ask galleries anew what they take: filters and indexes add to it without a write."""
        for live in self._replica.all():
            live.bytes = live.gallery.bytes()
        self._replica.cache.make_room()

    def _stood(self, live: LoadedGallery) -> tuple[int, float]:
        before, seq = self._stands.get(live.id), live.seq
        return before if before is not None and before[0] == seq else (seq, time.monotonic())

    def _look_at(self, live: LoadedGallery) -> None:
        if not (live.gallery.is_large() or live.folder.exists()):
            return
        with locked(live.folder) as mine:
            # Also what was built before it was our turn: nothing is built twice.
            live.gallery.adopt_segments()
            if mine and time.monotonic() - self._stands[live.id][1] <= LOOKED_AT_SECONDS:
                try:
                    self._work(live)
                except OSError:
                    self._replica.refresh(live.id)
                    if self._is_known(live):  # the files of one that was deleted go while they are written
                        raise

    def _work(self, live: LoadedGallery) -> None:
        self._build(live)
        # It may have changed while something was built, and nobody looks again once it has stood for long.
        seq, since = self._stood(live)
        settled = seq == live.seq and time.monotonic() - since > SETTLED_SECONDS
        self._replica.keep_snapshot(live, settled=settled)

    def _is_known(self, live: LoadedGallery) -> bool:
        return self._replica.cache.in_use(live.id) is live

    def _build(self, live: LoadedGallery) -> None:
        self._replica.refresh(live.id)  # so that no other process's files look like those of a shard that is gone
        live.gallery.sweep_files()
        started = time.monotonic()

        def stopped() -> bool:
            return self._stop.is_set() or not self._is_known(live)

        before = CONTEXT.set({**CONTEXT.get(), "gallery": live.name})  # of what is said about its segments too
        try:
            while not stopped() and live.gallery.build_index(stopped):
                seconds = time.monotonic() - started
                logger.info(Event("indexed", items=live.gallery.indexed_count(), seconds=round(seconds, 1)))
                # The next one may take minutes, and whoever starts after a crash in them needs it.
                self._replica.keep_snapshot(live, settled=False)
        finally:
            CONTEXT.reset(before)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock if nobody else does; whether it is held. The system takes it back from who dies."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _lock(file)
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: everyone builds, as they did where each has a disk of its own
        pass
    return True
