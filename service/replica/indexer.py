"""Indexing: seals, indexes and merges what galleries took in, on a thread beside queries and writes."""

from __future__ import annotations

import logging
import threading
import time

from index.events import Event
from service.replica.replica import LoadedGallery, Replica

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
STOP_SECONDS = 2.0
"""How long a stop waits for it: what it builds is lost anyway, and FAISS is asked between thousands of rows."""


class Indexer:
    """A thread that looks which shards have grown, and builds what is due."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
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
            self._replica.sweep_indexes()
            for live in self._replica.all():
                try:
                    self._build(live)
                except Exception:  # queries go on by what there is; the next look tries again
                    logger.exception(Event("index_failed", gallery=live.name))

    def _build(self, live: LoadedGallery) -> None:
        live.gallery.sweep_files()
        started = time.monotonic()
        while not self._stop.is_set() and live.gallery.build_index(self._stop.is_set):
            seconds = time.monotonic() - started
            logger.info(Event("indexed", gallery=live.name, items=live.gallery.indexed(), seconds=round(seconds, 1)))
