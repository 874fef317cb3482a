"""`RemoteShard`: the vectors of one shard in a remote engine.

Writes go to memory, as in every shard. One writer for all processes (`service.replica.engine_writer`) copies them to
the collection. `settle` then asks which rows the collection has, marks these valid there and drops them from memory. A
search merges both parts, so it also finds rows that the engine does not have yet.

The engine may hold stale, duplicate or unknown rows: `RemoteSearch` decides which candidates are valid. Locks are as in
`SegmentedShard`; `settle` acquires them itself.

Shape suffixes: N items, D dimension, W width of a row, S slots, M rows that move.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from index.contents import SlotsAndDigests
from index.engines.base import MISSING, Hits, Keys, Scanned
from index.engines.config import IndexConfig
from index.engines.digest import digests
from index.engines.memory.job import Job
from index.engines.memory.segments import SegmentedShard
from index.engines.memory.snapshot import remove
from index.engines.merge_parts import merge_by_score
from index.engines.remote.answers import Answers
from index.engines.remote.base import Collection, EngineUnavailable, Entries, find_up_to_date, is_up_to_date
from index.engines.remote.check import RecallCheck
from index.engines.remote.rows import RemoteRows
from index.engines.remote.search import RemoteSearch
from index.events import Event
from index.retry import GalleryChanged
from index.scan import Mask
from index.space import Space, Vectors

logger = logging.getLogger(__name__)

UNKNOWN_YET = -1
RECALL_TOLERANCE = 0.05
"""How far an engine's recall may be below the aim, as its search effort cannot be tuned from here."""
REST_SECONDS = 60.0
"""Seconds until an engine with too low a recall is checked again."""

Lock = Callable[[], AbstractContextManager[None]]
SeqsOf = Callable[[Keys], Keys]
"""Slots -> the feed numbers of their items' last writes."""


class RemoteShard(SegmentedShard):
    """See the module."""

    is_remote = True

    def __init__(self, dim: int, space: Space, config: IndexConfig, collection: Collection) -> None:
        super().__init__(dim, space, config)
        self.collection, self.kind = collection, config.kind
        self.remote_rows = RemoteRows()
        self.covered_seq = 0
        """The highest covered feed number seen; a lower one means that the engine lost rows."""
        # If rows were in memory before the collection: the feed number that the collection must cover before its recall
        # is checked; None: it was checked, or there were none.
        self._verify_at_seq: int | None = None
        self._verify_after = 0.0
        # If it is unknown which of `remote_rows` the collection has: the error when it was asked for them.
        self._unavailable: str | None = None
        self._search = RemoteSearch(collection, self.remote_rows, dim, space)

    @property
    def is_leaving(self) -> bool:
        """Whether its rows are being moved out of this collection."""
        return self.config.kind is not self.kind

    @classmethod
    def from_shard(cls, shard: SegmentedShard, collection: Collection) -> RemoteShard:
        """A shard that takes over all rows of `shard`, to be moved to the collection."""
        made = cls(shard.dim, shard.space, shard.config, collection)
        made.take_over(shard)
        made._verify_at_seq = UNKNOWN_YET
        return made

    def upsert(
        self,
        keys: Sequence[int] | Keys,
        vectors_ND: Vectors,
        slots_N: Keys | None = None,
        served_N: Mask | None = None,
    ) -> None:
        """Store or replace; see Shard. A row that is already in the collection only gets its slot and `served` bit."""
        keys_N = np.asarray(keys, np.int64)
        slots_N = keys_N if slots_N is None else slots_N
        served_N = np.ones(len(keys_N), np.bool_) if served_N is None else served_N
        if self.remote_rows.row_count():
            new_N = ~self.remote_rows.keep_matching(keys_N, digests(vectors_ND), slots_N, served_N)
            keys_N, vectors_ND, slots_N, served_N = keys_N[new_N], vectors_ND[new_N], slots_N[new_N], served_N[new_N]
        super().upsert(keys_N, vectors_ND, slots_N, served_N)

    def delete(self, keys: Sequence[int] | Keys) -> None:
        """Remove; see Shard."""
        super().delete(keys)
        self.remote_rows.mark_dead(np.asarray(keys, np.int64))

    def serve(self, served_S: Mask) -> None:
        """Set which rows are served; see Shard."""
        super().serve(served_S)
        self.remote_rows.serve(served_S)

    def search(
        self,
        queries_QD: Vectors,
        k: int,
        allowed_S: Mask | None = None,
        *,
        exact: bool = False,
        recall: float | None = None,
        share: float = 1.0,
        answers: Answers | None = None,
    ) -> Hits:
        """The best of memory and the collection; see Shard. `answers`: cached answers; None: wait for the engine.

        Raises:
            Unanswered: the engine must be asked first.
            EngineUnavailable: the engine does not answer.
            GalleryChanged: the engine has newer rows than this process.
        """
        parts = []
        if self.remote_rows.count():
            if self._unavailable is not None:
                raise EngineUnavailable(self._unavailable)
            parts.append(self._search.search(queries_QD, k, allowed_S, exact=exact, answers=answers))
        if super().count() or not self.remote_rows.count():
            parts.insert(0, super().search(queries_QD, k, allowed_S, exact=exact, recall=recall, share=share))
        if len(parts) == 1:
            return parts[0]
        merged = merge_by_score(parts, k, higher_is_better=self.space.higher_is_better)
        how = sum((hits.scanned for hits in parts), Scanned())
        return Hits(merged.raw_QK, merged.keys_QK, merged.full, how, min(hits.reliable for hits in parts))

    def fetch(self, keys: Sequence[int] | Keys) -> Vectors:
        """Stored rows; see Shard."""
        keys_N = np.asarray(keys, np.int64)
        at_N = self.remote_rows.find(keys_N)
        away_N = at_N != MISSING
        rows_NW = np.empty((len(keys_N), self.space.width(self.dim)), np.float32)
        rows_NW[~away_N] = super().fetch(keys_N[~away_N])
        if away_N.any():
            entries, found_FW = self.collection.fetch(keys_N[away_N])
            place = {int(key): n for n, key in enumerate(entries.keys_N)}
            rows_NW[away_N] = found_FW[[place[int(key)] for key in keys_N[away_N]]]
        return rows_NW

    def sealed(self, keys_N: Keys, digests_N: Keys, seqs_N: Keys) -> Mask:
        """Whether each vector (N,) is in a segment or the collection.

        If the engine is unavailable, True for all, so that no vectors are read from SQL; `settle` then has the shard
        loaded again.
        """
        known_N = super().sealed(keys_N, digests_N, seqs_N)
        if self._unavailable is None:
            try:
                self.covered_seq = self.collection.covered_seq()  # first, as it has the shortest time limit
                return known_N | find_up_to_date(self.collection, keys_N, digests_N, seqs_N)
            except EngineUnavailable as error:
                self._unavailable = error.message
        return np.ones(len(keys_N), np.bool_)

    def revive(self, keys_N: Keys, digests_N: Keys, seqs_N: Keys, slots_N: Keys, served_N: Mask) -> None:
        """Mark the rows of these keys and digests alive, in a segment or the collection; all must be `sealed`."""
        here_N = super().sealed(keys_N, digests_N, seqs_N)
        for where_N, hold in ((here_N, super().revive), (~here_N, self.remote_rows.add)):
            hold(keys_N[where_N], digests_N[where_N], seqs_N[where_N], slots_N[where_N], served_N[where_N])

    def slots_and_digests(self) -> list[SlotsAndDigests]:
        """See SegmentedShard."""
        digests_N = self.remote_rows.digests_R[self.remote_rows.alive_R]
        return [*super().slots_and_digests(), (self.remote_rows.slots(), lambda: digests_N)]

    def bytes(self) -> int:
        """Memory in bytes."""
        return super().bytes() + self.remote_rows.bytes()

    def slots(self) -> Sequence[Keys]:
        """The slots of all embeddings; see Shard."""
        return [*super().slots(), self.remote_rows.slots()]

    def row_count(self) -> int:
        """Number of embeddings, served or not."""
        return super().row_count() + self.remote_rows.row_count()

    def count(self) -> int:
        """Number of served items."""
        return super().count() + self.remote_rows.count()

    def local_row_count(self) -> int:
        """Number of embeddings in memory."""
        return super().row_count()

    def indexed_count(self) -> int:
        """Number of served items in an approximate index."""
        return super().indexed_count() + self.remote_rows.count()

    def is_large(self) -> bool:
        """Whether it has any rows, which `settle` may move."""
        return bool(self.row_count())

    def freeze(self) -> Job | None:
        """See SegmentedShard; None while rows move to the collection."""
        return None if self.config.kind.is_remote else super().freeze()

    def settle(self, read: Lock, change: Lock, seqs_of: SeqsOf) -> bool:
        """Drop rows from memory that the collection has; or move them back, if `is_leaving`. Queries and writes go on.

        Args:
            read: the lock for reading the shard.
            change: the lock for changing it.
            seqs_of: slots -> feed numbers; called under either lock.

        Returns:
            False if the shard must be loaded again: the collection lost rows, or did not answer in `sealed`.

        Raises:
            EngineUnavailable: the engine does not answer.
        """
        if self.is_leaving:
            if self._unavailable is None:
                self._bring_back(read, change)
            return self._unavailable is None and not self.remote_rows.row_count()
        covered_seq, most = self.collection.covered_seq(), self.collection.capabilities.max_rows
        if covered_seq < self.covered_seq or self._unavailable is not None:
            return False
        self.covered_seq = covered_seq
        if self.local_row_count():
            with read():
                keys_N, slots_N, _ = self._local_rows()
                seqs_N = seqs_of(slots_N)
            if not self._may_leave(read, int(seqs_N.max()), covered_seq):
                return True
            due_N = np.sort(keys_N[seqs_N <= covered_seq])
            for start in range(0, len(due_N), most):
                found = self.collection.entries(due_N[start : start + most])
                with change():
                    self._move_confirmed(found, seqs_of)
        return True

    def _may_leave(self, read: Lock, newest: int, covered_seq: int) -> bool:
        """Whether rows may be dropped from memory: if any were there before the move, only after the recall check."""
        if self._verify_at_seq is None:
            return True
        self._verify_at_seq = newest if self._verify_at_seq == UNKNOWN_YET else self._verify_at_seq
        if covered_seq < self._verify_at_seq or time.monotonic() < self._verify_after:
            return False
        with read():
            keys_N, slots_N, served_N = self._local_rows()
            head_H = digests(self.head.rows()[0][:, : self.dim])
            digests_N = np.concatenate([head_H, *(one.digests()[one.alive_R] for one in self.segments)])
            here = SegmentedShard(self.dim, self.space, self.config)
            here.take_over(self)
            check = RecallCheck(here, keys_N, digests_N, slots_N, served_N)
        try:
            recall = check.recall(self.collection)
        except GalleryChanged:
            return False
        if recall >= self.config.recall - RECALL_TOLERANCE:
            self._verify_at_seq = None
            return True
        self._verify_after = time.monotonic() + REST_SECONDS
        event = Event("engine_finds_too_little", recall=round(recall, 4), aim=self.config.recall, then="rows stay here")
        logger.warning(event)
        return False

    def is_settled(self) -> bool:
        """Whether no row has to be moved."""
        if self.config.kind.is_remote:
            return not (self.is_leaving or self.local_row_count())
        return not self.remote_rows.row_count()

    def _bring_back(self, read: Lock, change: Lock) -> None:
        """Move the rows back to memory, `max_rows` at a time."""
        with read():
            keys_N = self.remote_rows.keys_R[self.remote_rows.alive_R]
        most = self.collection.capabilities.max_rows
        for start in range(0, len(keys_N), most):
            entries, rows_FW = self.collection.fetch(keys_N[start : start + most])
            digests_F = digests(rows_FW[:, : self.dim])
            with change():
                at_F = self.remote_rows.find(entries.keys_N)
                current_F = (at_F != MISSING) & (self.remote_rows.digests_R[at_F] == digests_F)
                at_M = at_F[current_F]
                slots_M, served_M = self.remote_rows.slots_R[at_M].copy(), self.remote_rows.served_R[at_M].copy()
                self.remote_rows.mark_dead(entries.keys_N[current_F])
                super().upsert(entries.keys_N[current_F], rows_FW[current_F][:, : self.dim], slots_M, served_M)

    def _local_rows(self) -> tuple[Keys, Keys, Mask]:
        """Keys, slots and `served` bits of the rows in memory."""
        _, keys_N, _, served_N = self.head.rows()
        keys = [keys_N, *(one.keys_R[one.alive_R] for one in self.segments)]
        served = [served_N, *(one.served_R[one.alive_R] for one in self.segments)]
        return np.concatenate(keys), np.concatenate(SegmentedShard.slots(self)), np.concatenate(served)

    def _move_confirmed(self, found: Entries, seqs_of: SeqsOf) -> None:
        """Move the rows in memory that are up to date in the collection (`found`)."""
        _, keys_R, slots_R, served_R = self.head.rows()
        (at_M,) = np.nonzero(np.isin(keys_R, found.keys_N))
        self._move(found, self.head.rows()[0][at_M], keys_R[at_M], slots_R[at_M], served_R[at_M], seqs_of)
        for segment in self.segments:
            at_M = segment.find(found.keys_N)
            at_M = at_M[at_M != MISSING]
            columns = segment.keys_R[at_M], segment.slots_R[at_M], segment.served_R[at_M]
            self._move(found, segment.rows_RW[at_M], *columns, seqs_of)
        for segment in self.segments:
            if not segment.row_count():
                remove(segment)
        self.segments = tuple(segment for segment in self.segments if segment.row_count())

    def _move(
        self, found: Entries, rows_MW: Vectors, keys_M: Keys, slots_M: Keys, served_M: Mask, seqs_of: SeqsOf
    ) -> None:
        """Move the given rows in memory that are up to date in the collection."""
        digests_M, seqs_M = digests(rows_MW[:, : self.dim]), seqs_of(slots_M)
        same_M = is_up_to_date(found, keys_M, digests_M, seqs_M)
        super().delete(keys_M[same_M])
        self.remote_rows.add(keys_M[same_M], digests_M[same_M], seqs_M[same_M], slots_M[same_M], served_M[same_M])
