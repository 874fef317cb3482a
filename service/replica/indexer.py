"""Indexing: seals, indexes and merges what galleries took in, on a thread beside queries and writes.

Of the processes over one data folder that one builds which holds the lock of a file; the others take over what it
built.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from pathlib import Path

from index.engines.segments import SETTLED_SECONDS
from index.events import Event
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
LOOKED_AT_SECONDS = SETTLED_SECONDS + 5 * PAUSE_SECONDS
"""So long after its last change a gallery is looked at: until its head has settled. Idle ones cost nothing."""
STOP_SECONDS = 2.0
"""How long a stop waits for it: what it builds is lost anyway, and FAISS is asked between thousands of rows."""


class Indexer:
    """A thread that looks which shards have grown, and builds what is due."""

    def __init__(self, replica: Replica, lock: Path) -> None:
        self._replica = replica
        self._turn = Turn(lock)
        # Gallery -> its feed number, and when it was first seen to stand there.
        self._stands: dict[int, tuple[int, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="indexer", daemon=True)

    def start(self) -> None:
        """Begin looking."""
        self._thread.start()

    def stop(self) -> None:
        """Stop and wait for it."""
        self._stop.set()
        self._thread.join(STOP_SECONDS)
        self._turn.end()

    def _run(self) -> None:
        first = True
        while not self._stop.wait(PAUSE_SECONDS):
            galleries = {live.id: live for live in self._replica.all()}
            if not self._turn.mine:
                for live in galleries.values():
                    self._adopt(live)
                if not self._turn.take():
                    continue
            if first or self._stands.keys() - galleries.keys():
                self._replica.sweep_indexes()
            first = False
            self._stands = {number: self._stood(live) for number, live in galleries.items()}
            for number, live in galleries.items():
                if time.monotonic() - self._stands[number][1] > LOOKED_AT_SECONDS:
                    continue
                try:
                    self._build(live)
                except Exception:  # queries go on by what there is; the next look tries again
                    logger.exception(Event("index_failed", gallery=live.name))
                    del self._stands[number]

    def _adopt(self, live: LoadedGallery) -> None:
        try:
            live.gallery.adopt_segments()
        except Exception:  # queries go on by what there is
            logger.exception(Event("index_failed", gallery=live.name))

    def _stood(self, live: LoadedGallery) -> tuple[int, float]:
        before, seq = self._stands.get(live.id), live.seq
        return before if before is not None and before[0] == seq else (seq, time.monotonic())

    def _build(self, live: LoadedGallery) -> None:
        live.gallery.sweep_files()
        started = time.monotonic()
        while not self._stop.is_set() and live.gallery.build_index(self._stop.is_set):
            seconds = time.monotonic() - started
            logger.info(Event("indexed", gallery=live.name, items=live.gallery.indexed(), seconds=round(seconds, 1)))


class Turn:
    """To be the one process that builds: a lock on a file, which the system takes back however the process ends."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._file: int | None = None

    @property
    def mine(self) -> bool:
        """Whether this process has it."""
        return self._file is not None

    def take(self) -> bool:
        """Take it if nobody has it; whether this process has it now."""
        file = os.open(self._place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        except OSError:  # a file system without locks: everyone builds, as they did where each has a disk of its own
            pass
        self._file = file
        return True

    def end(self) -> None:
        """Leave it to others."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
