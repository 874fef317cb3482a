"""Copy galleries to their external engines along the feed; see `EngineWriter`.

One process copies the rows of a gallery: the one that holds its lease. It continues from the feed number that a
collection has recorded, and every step is idempotent, so it may be killed at any moment. Every process checks what the
engine holds, and drops those vectors from its own memory.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from index.engines.base import Keys
from index.engines.config import IndexKind
from index.engines.digest import digests
from index.engines.remote.base import Collection, Entries, keep_only
from index.engines.remote.shard import RemoteShard
from index.errors import RegraftError
from index.events import Event
from index.space import Space
from index.version import ShardKey
from service.background import Background
from service.registry.registry import Registry
from service.replica.engines import ALL, Engines
from service.replica.feed import FeedChanges, gather_changes
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica
from service.store.database.connections import Database
from service.store.galleries.change_feed import FeedRow, changes
from service.store.galleries.gallery import galleries_of_kinds, gallery_row, index_of
from service.store.galleries.items import live_keys
from service.store.leases.engines import EngineLeaseRow, acquire_engine_lease, delete_engine_lease, engine_leases
from service.store.outages import RecurringFaults

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.2
IDLE_SECONDS = 5.0
"""How often galleries without writes are checked, and unused collections are searched for."""
LEASE_SECONDS = 30.0
STOP_SECONDS = 5.0


class EngineWriter(Background):
    """A thread that copies galleries to their engines."""

    def __init__(self, database: Database, registry: Registry, replica: Replica, engines: Engines) -> None:
        super().__init__("engine-writer", STOP_SECONDS)
        self._database, self._registry, self._replica, self._engines = database, registry, replica, engines
        self._owner = uuid.uuid4().hex
        # Gallery -> the feed number at which all its shards were settled, and when that was seen.
        self._settled_at: dict[int, tuple[int, float]] = {}
        self._swept_at = 0.0
        # Gallery -> why it could not be followed at the last attempt.
        self._failures: dict[int, str] = {}
        self._errors = RecurringFaults(logger)

    def problems(self) -> Iterator[str]:
        """A sentence for each gallery whose engine this process lacks, or could not use at its last attempt."""
        with self._database.lookup() as connection:
            rows = galleries_of_kinds(connection, ALL)
        for row in rows:
            if why := self._engines.unusable(index_of(row).kind) or self._failures.get(row.id):
                yield f"gallery {row.name}: its vectors in {index_of(row).kind.value} cannot be searched: {why}"

    def _run(self) -> None:
        self._errors.attempt(Event("engines_not_checked"), self._log_problems)
        while not self._stop.wait(PAUSE_SECONDS):
            self._round()

    def _log_problems(self) -> None:
        for problem in self.problems():
            logger.error(Event("engine_missing", reason=problem))

    def _round(self) -> None:
        galleries = self._replica.all()
        self._failures = {loaded.id: self._failures[loaded.id] for loaded in galleries if loaded.id in self._failures}
        for loaded in galleries:
            self._errors.attempt(
                Event("engine_not_followed", gallery=loaded.name), partial(self._try_to_follow, loaded)
            )
        if self._engines.any() and time.monotonic() - self._swept_at > IDLE_SECONDS:
            self._swept_at = time.monotonic()
            self._errors.attempt(Event("engine_not_swept"), self._sweep)

    def _try_to_follow(self, loaded: LoadedGallery) -> None:
        try:
            self._follow_gallery(loaded)
        except RegraftError as error:
            self._failures[loaded.id] = error.message
            raise
        self._failures.pop(loaded.id, None)

    def _follow_gallery(self, loaded: LoadedGallery) -> None:
        remote, seq = loaded.gallery.remote, loaded.seq
        if not (shards := remote.shards()):
            return
        before = self._settled_at.get(loaded.id)
        if before is not None and before[0] == seq and time.monotonic() - before[1] < IDLE_SECONDS:
            return
        intact = remote.settle()  # before anything is written, which would hide lost rows
        if intact and loaded.gallery.config.kind.is_remote:
            self._copy_rows(loaded)
            intact = remote.settle()
        if not intact:
            then = "the gallery is loaded anew, and what the engine does not have is written"
            logger.warning(Event("engine_was_away_or_lost_rows", gallery=loaded.name, then=then))
            self._replica.cache.drop(loaded.id)
            return
        loaded.bytes = loaded.gallery.bytes()
        if all(shard.is_settled() for shard in shards.values()):
            self._settled_at[loaded.id] = seq, time.monotonic()

    def _copy_rows(self, loaded: LoadedGallery) -> None:
        """Write the rows that the collections lack, a block of the feed at a time."""
        kind, compared_purge = loaded.gallery.config.kind, 0
        covered_seq = {place: shard.collection.covered_seq() for place, shard in _going_to(kind, loaded).items()}
        while not self._stop.is_set() and (after := min(covered_seq.values(), default=loaded.seq)) < loaded.seq:
            if not self._take_lease(loaded, kind):
                return
            with self._database.read() as connection:
                row = gallery_row(connection, loaded.id)
                # A feed read from 0 omits deleted items, which a collection with rows may still hold: read from -1.
                block = next(changes(connection, loaded.id, after or -any(covered_seq.values())), [])
                # Deletions that were purged from the feed are found by comparing keys.
                missed_purge = (
                    row is not None and any(covered_seq.values()) and after < row.purged_seq != compared_purge
                )
                existing_keys = live_keys(connection, loaded.id) if missed_purge else None
            if row is None:
                return
            compared_purge = row.purged_seq
            last_seq = block[-1][6] if block else row.next_seq - 1
            self._replica.refresh(loaded.id)  # so that there is a shard for each place in the block
            shards = _going_to(kind, loaded)
            found = gather_changes(self._registry, [block] if block else [])
            for place, shard in shards.items():
                if existing_keys is not None and covered_seq.get(place, after) < row.purged_seq:
                    keep_only(shard.collection, existing_keys, row.next_seq - 1)
                if covered_seq.get(place, after) < last_seq:
                    write_block(shard.collection, place, shard.space, block, found)
                    shard.collection.set_covered_seq(last_seq, more=last_seq < loaded.seq)
            covered_seq = {place: max(covered_seq.get(place, after), last_seq) for place in shards}

    def _take_lease(self, loaded: LoadedGallery, kind: IndexKind) -> bool:
        with self._database.write() as connection:
            return acquire_engine_lease(
                connection, loaded.id, kind.value, loaded.engine_name, self._owner, LEASE_SECONDS
            )

    def _sweep(self) -> None:
        """Remove the collections of retired versions, and of galleries that were deleted or moved elsewhere."""
        with self._database.lookup() as connection:
            leases = engine_leases(connection)
            galleries = {lease.gallery_id: gallery_row(connection, lease.gallery_id) for lease in leases}
        for lease in leases:
            row, kind = galleries[lease.gallery_id], IndexKind(lease.kind)
            if kind not in ALL:
                continue
            if row is not None and index_of(row).kind is kind:
                self._drop_retired(lease, kind)
            elif row is not None and self._is_searched(lease, kind):
                continue
            elif lease.over_seconds > LEASE_SECONDS:  # by then slow processes have moved the vectors that they need
                self._remove(lease, kind)

    def _drop_retired(self, lease: EngineLeaseRow, kind: IndexKind) -> None:
        """Drop collections of retired versions, if this process copies the gallery."""
        loaded = self._replica.cache.peek(lease.gallery_id)
        if loaded is not None and lease.owner == self._owner and loaded.gallery.config.kind is kind:
            engine = self._engines.get(kind)
            for place in set(engine.places(lease.name)) - loaded.gallery.remote.shards().keys():
                engine.drop(lease.name, place)

    def _is_searched(self, lease: EngineLeaseRow, kind: IndexKind) -> bool:
        """Whether this process still searches a shard in that engine."""
        loaded = self._replica.cache.peek(lease.gallery_id)
        return loaded is not None and any(shard.kind is kind for shard in loaded.gallery.remote.shards().values())

    def _remove(self, lease: EngineLeaseRow, kind: IndexKind) -> None:
        engine = self._engines.get(kind)
        for place in engine.places(lease.name):
            engine.drop(lease.name, place)
        with self._database.write() as connection:
            delete_engine_lease(connection, lease.gallery_id, lease.kind)


def _going_to(kind: IndexKind, loaded: LoadedGallery) -> dict[ShardKey, RemoteShard]:
    """The shards whose rows belong in an engine of this kind and are not leaving it."""
    shards = loaded.gallery.remote.shards().items()
    return {place: shard for place, shard in shards if shard.kind is kind and not shard.is_leaving}


def write_block(
    collection: Collection, place: ShardKey, space: Space, block: Sequence[FeedRow], found: FeedChanges
) -> None:
    """Write one collection's part of a block of the feed: upserts and deletions."""
    seqs = {row[0]: row[6] for row in block}
    keys, vectors = found.placed.get(place, ((), np.empty((0, 0), np.float32)))
    max_rows = collection.capabilities.max_rows
    for start in range(0, len(keys), max_rows):
        block_keys, block_vectors = keys[start : start + max_rows], vectors[start : start + max_rows]
        collection.upsert(
            Entries(np.array(block_keys), _seqs_of(seqs, block_keys), digests(block_vectors)),
            space.items(block_vectors),
        )
    leaving = sorted(seqs.keys() - set(keys))
    for start in range(0, len(leaving), max_rows):
        block_keys = leaving[start : start + max_rows]
        collection.delete(np.array(block_keys), _seqs_of(seqs, block_keys))


def _seqs_of(seqs: Mapping[int, int], keys: Sequence[int]) -> Keys:
    return np.array([seqs[key] for key in keys], np.int64)
