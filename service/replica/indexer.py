"""Indexing: seals, indexes and merges what galleries took in, on a thread beside queries and writes."""

from __future__ import annotations

import logging
import threading
import time

from index.engines.segments import SETTLED_SECONDS
from index.events import Event
from service.replica.replica import LoadedGallery, Replica

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
LOOKED_AT_SECONDS = SETTLED_SECONDS + 5 * PAUSE_SECONDS
"""So long after its last change a gallery is looked at: until its head has settled. Idle ones cost nothing."""
STOP_SECONDS = 2.0
"""How long a stop waits for it: what it builds is lost anyway, and FAISS is asked between thousands of rows."""


class Indexer:
    """A thread that looks which shards have grown, and builds what is due."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
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

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_SECONDS):
            galleries = {live.id: live for live in self._replica.all()}
            if not self._stands or self._stands.keys() - galleries.keys():
                self._replica.sweep_indexes()
            self._stands = {number: self._stood(live) for number, live in galleries.items()}
            for number, live in galleries.items():
                if time.monotonic() - self._stands[number][1] > LOOKED_AT_SECONDS:
                    continue
                try:
                    self._build(live)
                except Exception:  # queries go on by what there is; the next look tries again
                    logger.exception(Event("index_failed", gallery=live.name))
                    del self._stands[number]

    def _stood(self, live: LoadedGallery) -> tuple[int, float]:
        before, seq = self._stands.get(live.id), live.seq
        return before if before is not None and before[0] == seq else (seq, time.monotonic())

    def _build(self, live: LoadedGallery) -> None:
        live.gallery.sweep_files()
        started = time.monotonic()
        while not self._stop.is_set() and live.gallery.build_index(self._stop.is_set):
            seconds = time.monotonic() - started
            logger.info(Event("indexed", gallery=live.name, items=live.gallery.indexed(), seconds=round(seconds, 1)))
