"""The worker: claim -> read -> encode or transform -> persist, chunk by chunk, until it is stopped; see `Worker`.

Three steps overlap (`pipeline`): while one chunk is computed, the next is read and decoded and the last is committed.
No transaction is open during computation, so a worker may be killed at any moment: uncommitted work is lost, and its
chunks are free again when their leases expire.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from index.encoders.decoding import Decoder
from index.events import Event
from service.backfills import chunks, leasing
from service.backfills.chunks import Chunk, ChunkLost
from service.backfills.embedder import Embedder
from service.backfills.outcome import Compute, Outcome
from service.backfills.pipeline import Pipeline
from service.backfills.planning import finish_or_replan
from service.backfills.states import BackfillState, Kind
from service.errors import UnknownGallery
from service.logs import configure
from service.registry.placement import version_order_to
from service.registry.registry import Registry
from service.settings import Settings
from service.store.blob_references import open_blobs
from service.store.database.connections import Database, without_password
from service.store.database.migration import upgrade
from service.store.galleries import partitions
from service.store.leases.heartbeats import Leases

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
"""The longest pause of an idle worker between two attempts to claim a chunk."""
RETRY_SECONDS = 5.0
"""The longest pause between two attempts while the database does not answer."""

T = TypeVar("T")


def run(settings: Settings, stop: threading.Event) -> None:
    """Work until `stop` is set; the chunk that is being computed is finished first."""
    configure(settings.log_format, settings.log_level)
    if upgrade(settings):  # probably not the database of the service, and then nothing will ever come
        place, hint = without_password(settings.database_url), "a worker needs its service's --data, or --url"
        logger.warning(Event("database_was_empty", database=place, hint=hint))
    worker = Worker(settings, stop)
    try:
        worker.work()
    finally:
        worker.close()


class Worker:
    """One worker. It shares only the database, the images and the version folders with others."""

    def __init__(self, settings: Settings, stop: threading.Event) -> None:
        self.owner = f"{socket.gethostname()[:64]}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._settings = settings
        self._stop = stop
        self._database = Database(settings.database_url, settings.connections)
        self._registry = Registry(self._database, settings)
        decoder = Decoder(settings.max_image_pixels, settings.max_decoded_bytes)
        self._embedder = Embedder(self._registry, open_blobs(self._database, settings.blobs_url), decoder)
        self._leases = Leases(self._extend, settings.lease_seconds)

    def work(self) -> None:
        """Work until `stop` is set."""
        self._log("worker_started")
        Pipeline(self._next, self._load, self._finish, self._return_chunk, self._stop).run()
        self._log("worker_stopped")

    def close(self) -> None:
        """Close the database."""
        self._leases.close()
        self._database.close()

    def _next(self) -> Chunk | None:
        """Wait for a chunk, with growing pauses, and claim it; None once `stop` is set."""
        idle = self._settings.poll_seconds
        while not self._stop.is_set():
            if chunk := self._retrying(self._claim):
                self._leases.hold(chunk)
                return chunk
            self._registry.drop_idle()
            if self._retrying(self._finish_backfills):
                continue
            self._stop.wait(idle)
            idle = min(2 * idle, IDLE_SECONDS)
        return None

    def _claim(self) -> Chunk | None:
        with self._database.lookup() as connection:
            if not leasing.claimable(connection):
                return None
        with self._database.write() as connection:
            return leasing.claim(connection, self.owner, self._settings.lease_seconds)

    def _load(self, chunk: Chunk) -> Iterator[Compute]:
        """Read a chunk step by step."""
        target = self._registry.by_id(chunk.version_id)
        self._registry.retry(target)
        if chunk.kind is Kind.REENCODE:
            return self._embedder.reencode(target, self._read(chunks.read_contents, chunk))
        version_order = self._retrying(lambda: version_order_to(self._registry, target.id))
        return self._embedder.transform(
            target, self._read(partial(chunks.read_embeddings, version_order=version_order), chunk)
        )

    def _finish(self, chunk: Chunk, outcome: Outcome) -> None:
        try:
            counts = self._retrying(lambda: self._persist(chunk, outcome))
        except (ChunkLost, UnknownGallery) as error:
            self._return_chunk(chunk, failed=False)
            self._log("chunk_lost", backfill=chunk.backfill_id, chunk=chunk.id, reason=error.message)
        else:
            self._leases.drop(chunk)
            self._log("chunk_done", backfill=chunk.backfill_id, chunk=chunk.id, **counts)

    def _return_chunk(self, chunk: Chunk, failed: bool) -> None:
        """Give a chunk back; one that failed can be claimed again only when its lease has expired."""
        self._leases.drop(chunk)
        try:
            self._retrying(lambda: self._give_back(chunk, failed))
        except SQLAlchemyError as error:  # stopped while the database is unreachable: the lease will expire
            self._log("chunk_not_released", chunk=chunk.id, reason=error)

    def _read(self, read: Callable[[Connection, Chunk], T], chunk: Chunk) -> T:
        def attempt() -> T:
            with self._database.read() as connection:
                return read(connection, chunk)

        return self._retrying(attempt)

    def _persist(self, chunk: Chunk, outcome: Outcome) -> dict[str, int]:
        partitions.make(self._database, chunk.gallery_id, chunk.version_id)
        with self._database.write() as connection:
            return chunks.commit(connection, chunk, *outcome)

    def _give_back(self, chunk: Chunk, failed: bool) -> None:
        with self._database.write() as connection:
            (leasing.abandon if failed else leasing.release)(connection, chunk)

    def _finish_backfills(self) -> bool:
        """End or replan backfills without chunks. Returns whether one has new chunks."""
        states = finish_or_replan(self._database, self._registry, self._embedder, self._stop)
        for number, state in states.items():
            self._log("backfill_done" if state is BackfillState.DONE else "backfill_extended", backfill=number)
        return BackfillState.RUNNING in states.values()

    def _extend(self, chunk: Chunk) -> None:
        try:
            with self._database.write() as connection:
                leasing.extend(connection, chunk, self._settings.lease_seconds)
        except SQLAlchemyError as error:
            self._log("lease_not_extended", chunk=chunk.id, reason=error)

    def _retrying(self, attempt: Callable[[], T]) -> T:
        """Retry while the database is locked or unreachable; raises once `stop` is set."""
        wait = self._settings.poll_seconds
        while True:
            try:
                return attempt()
            except OperationalError as error:
                self._log("database_busy", reason=error.orig)
                if self._stop.wait(wait):
                    raise
                wait = min(2 * wait, RETRY_SECONDS)

    def _log(self, action: str, **details: object) -> None:
        logger.info(Event(action, worker=self.owner, **details))
