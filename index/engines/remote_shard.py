"""`RemoteShard`: the vectors of one version in one gallery, as they lie in an engine that is a server of its own.

Writes go to memory, as in every shard. Somebody else, one for all processes, brings them to the collection; `settle`
asks which rows are there, and from then on they count there and are forgotten here. So the answer is made of both parts
at every moment, and what the engine has not taken yet is found all the same.

The engine may hold rows that are stale, double or nobody's: `remote_search.py` says which candidates count. Locks are
as in `SegmentedShard`; `settle` takes them itself.

Shape suffixes: N items, D dimension, W width of a row, S slots, M rows that move.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from index.contents import HeldBySlot
from index.engines.base import MISSING, Hits, Keys, Scanned
from index.engines.config import IndexConfig
from index.engines.digest import digests
from index.engines.merge_parts import merge_by_score
from index.engines.remote import Collection, EngineUnavailable, Entries, held_there, same_entries
from index.engines.remote_answers import Answers
from index.engines.remote_check import RecallCheck
from index.engines.remote_rows import RemoteRows
from index.engines.remote_search import RemoteSearch
from index.engines.segments import Job, SegmentedShard
from index.engines.snapshot import remove
from index.events import Event
from index.retry import GalleryChanged
from index.scan import Mask
from index.space import Space, Vectors

logger = logging.getLogger(__name__)

UNKNOWN_YET = -1
TOLERATED = 0.05
"""So much less than the recall aim an engine may find: nothing here tells how to make it search more thoroughly."""
REST_SECONDS = 60.0
"""So long an engine that found less is not asked again."""

Lock = Callable[[], AbstractContextManager[None]]
NumbersOf = Callable[[Keys], Keys]
"""Slots -> the numbers of their items' last writes."""


class RemoteShard(SegmentedShard):
    """See the module."""

    elsewhere = True

    def __init__(self, dim: int, space: Space, config: IndexConfig, collection: Collection) -> None:
        super().__init__(dim, space, config)
        self.collection, self.kind = collection, config.kind
        self.there = RemoteRows()
        self.covered = 0
        """The highest number that the collection was seen to cover: it never falls unless rows were lost."""
        # Of rows that lay here before they were to lie there: the number from which the collection has them all, when
        # its answers are compared; None: they were.
        self._whole: int | None = None
        self._again = 0.0
        # Why it is not known which of the rows in `there` the collection has: it was away when they were asked for.
        self._unasked: str | None = None
        self._search = RemoteSearch(collection, self.there, dim, space)

    @property
    def leaving(self) -> bool:
        """Whether its rows are to lie in this collection no more."""
        return self.config.kind is not self.kind

    @classmethod
    def over(cls, shard: SegmentedShard, collection: Collection) -> RemoteShard:
        """One that holds all that another does, which is not used any more, and brings it there."""
        made = cls(shard.dim, shard.space, shard.config, collection)
        made.take_over(shard)
        made._whole = UNKNOWN_YET
        return made

    def upsert(
        self,
        keys: Sequence[int] | Keys,
        vectors_ND: Vectors,
        slots_N: Keys | None = None,
        served_N: Mask | None = None,
    ) -> None:
        """Store or replace; see Shard. What the collection holds already only learns its slot, and if it is served."""
        keys_N = np.asarray(keys, np.int64)
        slots_N = keys_N if slots_N is None else slots_N
        served_N = np.ones(len(keys_N), np.bool_) if served_N is None else served_N
        if self.there.row_count():
            new_N = ~self.there.take(keys_N, digests(vectors_ND), slots_N, served_N)
            keys_N, vectors_ND, slots_N, served_N = keys_N[new_N], vectors_ND[new_N], slots_N[new_N], served_N[new_N]
        super().upsert(keys_N, vectors_ND, slots_N, served_N)

    def delete(self, keys: Sequence[int] | Keys) -> None:
        """Remove; see Shard."""
        super().delete(keys)
        self.there.kill(np.asarray(keys, np.int64))

    def serve(self, served_S: Mask) -> None:
        """Which rows are found; see Shard."""
        super().serve(served_S)
        self.there.serve(served_S)

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
        """The best of what is here and there; see Shard. `answers`: of the engine, None: it is waited for.

        Raises:
            Unanswered: the engine is to be asked first.
            EngineUnavailable: the engine does not answer.
            GalleryChanged: it holds newer rows than this process knows of.
        """
        parts = []
        if self.there.count():
            if self._unasked is not None:
                raise EngineUnavailable(self._unasked)
            parts.append(self._search.search(queries_QD, k, allowed_S, exact=exact, answers=answers))
        if super().count() or not self.there.count():
            parts.insert(0, super().search(queries_QD, k, allowed_S, exact=exact, recall=recall, share=share))
        if len(parts) == 1:
            return parts[0]
        merged = merge_by_score(parts, k, higher_is_better=self.space.higher_is_better)
        how = sum((hits.scanned for hits in parts), Scanned())
        return Hits(merged.raw_QK, merged.keys_QK, merged.full, how, min(hits.reliable for hits in parts))

    def fetch(self, keys: Sequence[int] | Keys) -> Vectors:
        """Stored rows; see Shard."""
        keys_N = np.asarray(keys, np.int64)
        at_N = self.there.find(keys_N)
        away_N = at_N != MISSING
        rows_NW = np.empty((len(keys_N), self.space.width(self.dim)), np.float32)
        rows_NW[~away_N] = super().fetch(keys_N[~away_N])
        if away_N.any():
            entries, found_FW = self.collection.fetch(keys_N[away_N])
            place = {int(key): n for n, key in enumerate(entries.keys_N)}
            rows_NW[away_N] = found_FW[[place[int(key)] for key in keys_N[away_N]]]
        return rows_NW

    def sealed(self, keys_N: Keys, digests_N: Keys, numbers_N: Keys) -> Mask:
        """Which of these vectors segments or the collection hold (N,).

        All of them where the engine is away, so that no vector is read: it is asked when it is back, see `settle`.
        """
        known_N = super().sealed(keys_N, digests_N, numbers_N)
        if self._unasked is None:
            try:
                self.covered = self.collection.covers()  # soon told where it hangs
                return known_N | held_there(self.collection, keys_N, digests_N, numbers_N)
            except EngineUnavailable as error:
                self._unasked = error.message
        return np.ones(len(keys_N), np.bool_)

    def revive(self, keys_N: Keys, digests_N: Keys, numbers_N: Keys, slots_N: Keys, served_N: Mask) -> None:
        """Have the rows of these keys and digests count, each in one place; they are all `sealed`."""
        here_N = super().sealed(keys_N, digests_N, numbers_N)
        for where_N, hold in ((here_N, super().revive), (~here_N, self.there.add)):
            hold(keys_N[where_N], digests_N[where_N], numbers_N[where_N], slots_N[where_N], served_N[where_N])

    def slots_and_digests(self) -> list[HeldBySlot]:
        """What is held, in parts; see SegmentedShard."""
        digests_N = self.there.digests_R[self.there.alive_R]
        return [*super().slots_and_digests(), (self.there.slots(), lambda: digests_N)]

    def bytes(self) -> int:
        """What it takes of memory."""
        return super().bytes() + self.there.bytes()

    def slots(self) -> Sequence[Keys]:
        """The slots of everything held; see Shard."""
        return [*super().slots(), self.there.slots()]

    def row_count(self) -> int:
        """Number of embeddings, served or not."""
        return super().row_count() + self.there.row_count()

    def count(self) -> int:
        """Number of served items."""
        return super().count() + self.there.count()

    def held_here(self) -> int:
        """Number of embeddings that lie in memory."""
        return super().row_count()

    def indexed_count(self) -> int:
        """Items that an approximate index answers for."""
        return super().indexed_count() + self.there.count()

    def is_large(self) -> bool:
        """Whether there is something to settle, or was."""
        return bool(self.row_count())

    def freeze(self) -> Job | None:
        """Nothing is sealed here as long as it goes to the collection."""
        return None if self.config.kind.elsewhere else super().freeze()

    def settle(self, read: Lock, change: Lock, numbers_of: NumbersOf) -> bool:
        """Have the rows count there that the collection has taken, and forget them here; beside queries and writes.

        Or the other way round, where they are to lie there no more.

        Args:
            read: the lock of whoever reads the shard.
            change: that of whoever changes it.
            numbers_of: asked under either.

        Returns:
            Whether what lies where is known: the collection has what it had, and was there when it was asked first.

        Raises:
            EngineUnavailable: the engine does not answer.
        """
        if self.leaving:
            if self._unasked is None:
                self._recall(read, change)
            return self._unasked is None and not self.there.row_count()
        covers, most = self.collection.covers(), self.collection.capabilities.max_rows
        if covers < self.covered or self._unasked is not None:
            return False
        self.covered = covers
        if self.held_here():
            with read():
                keys_N, slots_N, _ = self._here()
                numbers_N = numbers_of(slots_N)
            if not self._may_leave(read, int(numbers_N.max()), covers):
                return True
            due_N = np.sort(keys_N[numbers_N <= covers])
            for start in range(0, len(due_N), most):
                found = self.collection.entries(due_N[start : start + most])
                with change():
                    self._confirm(found, numbers_of)
        return True

    def _may_leave(self, read: Lock, newest: int, covers: int) -> bool:
        """Whether rows may be forgotten here; those that lay here before must all be there, and be found there."""
        if self._whole is None:
            return True
        self._whole = newest if self._whole == UNKNOWN_YET else self._whole
        if covers < self._whole or time.monotonic() < self._again:
            return False
        with read():
            keys_N, slots_N, served_N = self._here()
            head_H = digests(self.head.rows()[0][:, : self.dim])
            digests_N = np.concatenate([head_H, *(one.digests()[one.alive_R] for one in self.segments)])
            here = SegmentedShard(self.dim, self.space, self.config)
            here.take_over(self)
            check = RecallCheck(here, keys_N, digests_N, slots_N, served_N)
        try:
            recall = check.recall(self.collection)
        except GalleryChanged:
            return False
        if recall >= self.config.recall - TOLERATED:
            self._whole = None
            return True
        self._again = time.monotonic() + REST_SECONDS
        event = Event("engine_finds_too_little", recall=round(recall, 4), aim=self.config.recall, then="rows stay here")
        logger.warning(event)
        return False

    def is_settled(self) -> bool:
        """Whether every row is where it is to be."""
        if self.config.kind.elsewhere:
            return not (self.leaving or self.held_here())
        return not self.there.row_count()

    def _recall(self, read: Lock, change: Lock) -> None:
        """Bring the rows back, so many at a time."""
        with read():
            keys_N = self.there.keys_R[self.there.alive_R]
        most = self.collection.capabilities.max_rows
        for start in range(0, len(keys_N), most):
            entries, rows_FW = self.collection.fetch(keys_N[start : start + most])
            digests_F = digests(rows_FW[:, : self.dim])
            with change():
                at_F = self.there.find(entries.keys_N)
                right_F = (at_F != MISSING) & (self.there.digests_R[at_F] == digests_F)
                at_M = at_F[right_F]
                slots_M, served_M = self.there.slots_R[at_M].copy(), self.there.served_R[at_M].copy()
                self.there.kill(entries.keys_N[right_F])
                super().upsert(entries.keys_N[right_F], rows_FW[right_F][:, : self.dim], slots_M, served_M)

    def _here(self) -> tuple[Keys, Keys, Mask]:
        """Keys and slots of what is in memory, and whether it is served."""
        _, keys_N, _, served_N = self.head.rows()
        keys = [keys_N, *(one.keys_R[one.alive_R] for one in self.segments)]
        served = [served_N, *(one.served_R[one.alive_R] for one in self.segments)]
        return np.concatenate(keys), np.concatenate(SegmentedShard.slots(self)), np.concatenate(served)

    def _confirm(self, found: Entries, numbers_of: NumbersOf) -> None:
        """Have those rows count there that are the ones in memory, as new as the last write of their items."""
        _, keys_R, slots_R, served_R = self.head.rows()
        (at_M,) = np.nonzero(np.isin(keys_R, found.keys_N))
        self._move(found, self.head.rows()[0][at_M], keys_R[at_M], slots_R[at_M], served_R[at_M], numbers_of)
        for segment in self.segments:
            at_M = segment.find(found.keys_N)
            at_M = at_M[at_M != MISSING]
            columns = segment.keys_R[at_M], segment.slots_R[at_M], segment.served_R[at_M]
            self._move(found, segment.rows_RW[at_M], *columns, numbers_of)
        for segment in self.segments:
            if not segment.row_count():
                remove(segment)
        self.segments = tuple(segment for segment in self.segments if segment.row_count())

    def _move(
        self, found: Entries, rows_MW: Vectors, keys_M: Keys, slots_M: Keys, served_M: Mask, numbers_of: NumbersOf
    ) -> None:
        """Those of some rows in memory that were found."""
        digests_M, numbers_M = digests(rows_MW[:, : self.dim]), numbers_of(slots_M)
        same_M = same_entries(found, keys_M, digests_M, numbers_M)
        super().delete(keys_M[same_M])
        self.there.add(keys_M[same_M], digests_M[same_M], numbers_M[same_M], slots_M[same_M], served_M[same_M])
