"""`SegmentedShard`: a head for writes, which is scanned, and sealed segments, which may have an approximate index.

Writes go to the head. If it is large, `freeze` turns it into segments in one short step and returns a `Job`, which
builds an index or merges segments concurrently with queries and writes; `finish` swaps in the result.

The owner of the shard locks: `search` under a shared lock; `upsert`, `delete` and `freeze` under an exclusive one;
`reserve` and `finish` concurrently with searches but not with writers; `Job.run` without a lock.

Shape suffixes: Q queries, K results wanted, N items, D dimension, S slots.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np

from index.engines.base import MISSING, Hits, Keys, Scanned
from index.engines.config import IndexConfig, IndexKind
from index.engines.digest import UNKNOWN
from index.engines.memory import gpu
from index.engines.memory.flat import FlatShard
from index.engines.memory.job import Job
from index.engines.memory.segment import Segment
from index.engines.memory.snapshot import SegmentFiles
from index.engines.memory.tuning import max_expected
from index.engines.merge_parts import merge_by_score, parts_to_repeat, replace_rows
from index.scan import Mask
from index.space import Space, Vectors

SEAL_ROWS = 32_768
"""A head of this many rows is sealed; scanning it takes a millisecond."""
LARGEST_SEALED = 4 * SEAL_ROWS
"""A larger head (it grew during other jobs) becomes several segments: one large index may take far longer to build.

Once writes have stopped, segments with at most this many rows together are merged, whatever their sizes.
"""
SETTLED_ROWS, SETTLED_SECONDS = 10_000, 10.0
"""A head of this many rows is sealed if nothing was written for this long."""
FILLED_SECONDS = 60.0
"""If a head fills in less time, items arrive faster than graphs are built: use lists for now (decision 0046)."""
RECENT_QUERIES = 256
"""Number of recent queries kept, to measure an index with them."""
MERGE_FACTOR = 4
"""This many segments of similar size are merged, if that makes searches cheaper."""
MAX_DEAD_SHARE = 0.3
"""A segment with a larger share of dead rows is rebuilt."""


class SegmentedShard:
    """The vectors of one version in one gallery, at any size; see the module."""

    is_remote = False

    def __init__(self, dim: int, space: Space, config: IndexConfig, folder: Path | None = None) -> None:
        """`folder`: of segment files, whose rows are dead until `upsert` or `revive` confirms them."""
        self.space, self.dim, self.config = space, dim, config
        self.head = FlatShard(dim, space)
        self._files = SegmentFiles(folder) if folder else None
        self.segments = tuple(self._files.load(space, dim)) if self._files else ()
        self._written = self._began = time.monotonic()
        # Queries (D,), oldest first.
        self._recent_queries: deque[Vectors] = deque(maxlen=RECENT_QUERIES)

    def take_over(self, other: SegmentedShard) -> None:
        """Take over the head and segments of `other`; keep other segments found on disk."""
        known = {segment.folder for segment in other.segments}
        found = tuple(segment for segment in self.segments if segment.folder not in known)
        self.head, self.segments = other.head, other.segments + found

    def upsert(
        self,
        keys: Sequence[int] | Keys,
        vectors_ND: Vectors,
        slots_N: Keys | None = None,
        served_N: Mask | None = None,
    ) -> None:
        """Store or replace; see Shard. A row that is already in a segment is revived there, with its new slot."""
        self._written = time.monotonic()
        keys_N = np.asarray(keys, np.int64)
        slots_N = keys_N if slots_N is None else slots_N
        served_N = np.ones(len(keys_N), np.bool_) if served_N is None else served_N
        if self.segments:
            new_N = ~self._revive_matching(keys_N, self.space.items(vectors_ND), slots_N, served_N)
            self.head.delete(keys_N[~new_N])
            keys_N, vectors_ND, slots_N, served_N = keys_N[new_N], vectors_ND[new_N], slots_N[new_N], served_N[new_N]
        self.head.upsert(keys_N, vectors_ND, slots_N, served_N)

    def reserve(self, more: int) -> None:
        """Allocate memory in the head; see Shard."""
        self.head.reserve(more)

    def delete(self, keys: Sequence[int] | Keys) -> None:
        """Remove; see Shard."""
        self.head.delete(keys)
        for segment in self.segments:
            segment.mark_dead(np.asarray(keys, np.int64))

    def serve(self, served_S: Mask) -> None:
        """Set which rows are served; see Shard."""
        self.head.serve(served_S)
        for segment in self.segments:
            segment.serve(served_S)

    def search(
        self,
        queries_QD: Vectors,
        k: int,
        allowed_S: Mask | None = None,
        *,
        exact: bool = False,
        recall: float | None = None,
        share: float = 1.0,
    ) -> Hits:
        """The best of head and segments, see Shard; merged as in `index.engines.merge_parts`."""
        if not self.segments:
            return self.head.search(queries_QD, k, allowed_S)
        self._recent_queries.extend(queries_QD[-RECENT_QUERIES:].copy())  # a view would keep the whole request
        held: tuple[FlatShard | Segment, ...] = self.head, *self.segments
        searched = [one for one in held if one.count()] or [self.head]
        if len(searched) == 1:
            return searched[0].search(queries_QD, k, allowed_S, exact=exact, recall=recall, share=share)
        count, higher_is_better = sum([one.count() for one in searched]), self.space.higher_is_better
        found = [
            one.search(queries_QD, k, allowed_S, exact=exact, recall=recall, share=share * one.count() / count)
            for one in searched
        ]
        reliable = k if min([hits.reliable for hits in found]) == k else max_expected(k, share)
        merged = merge_by_score(found, k, higher_is_better=higher_is_better)
        if any(again := parts_to_repeat(merged, found, reliable)):
            for number, rows in enumerate(again):
                if rows:
                    whole = searched[number].search(queries_QD[rows], k, allowed_S, exact=exact, recall=recall)
                    found[number] = replace_rows(found[number], rows, whole)
            merged = merge_by_score(found, k, higher_is_better=higher_is_better)
        scanned = sum((hits.scanned for hits in found), Scanned())
        return Hits(merged.raw_QK, merged.keys_QK, merged.full, scanned, reliable)

    def fetch(self, keys: Sequence[int] | Keys) -> Vectors:
        """Stored rows; see Shard."""
        keys_N = np.asarray(keys, np.int64)
        rows_NW = np.empty((len(keys_N), self.space.width(self.dim)), np.float32)
        left_N = np.ones(len(keys_N), np.bool_)
        for segment in self.segments:
            at_N = segment.find(keys_N)
            rows_NW[at_N != MISSING] = segment.rows_RW[at_N[at_N != MISSING]]
            left_N &= at_N == MISSING
        rows_NW[left_N] = self.head.fetch(keys_N[left_N])
        return rows_NW

    def in_memory(self, keys_N: Keys) -> tuple[Mask, Vectors]:
        """Whether each key (N,) has a row in this process, and the vectors (M, D) of those that have, in order."""
        here_N = self.head.has(keys_N)
        for segment in self.segments:
            here_N |= segment.find(keys_N) != MISSING
        return here_N, SegmentedShard.fetch(self, keys_N[here_N])[:, : self.dim]

    def sealed(self, keys_N: Keys, digests_N: Keys, seqs_N: Keys) -> Mask:
        """Whether each vector (N,) is in a segment, alive or dead, by its digest.

        `seqs_N`: feed numbers of the last writes of the items; only remote shards use them.
        """
        left = np.arange(len(keys_N))
        for segment in self.segments:
            left = left[segment.find_by_digest(keys_N[left], digests_N[left]) == MISSING]
        known_N = np.ones(len(keys_N), np.bool_)
        known_N[left] = False
        return known_N

    def revive(self, keys_N: Keys, digests_N: Keys, seqs_N: Keys, slots_N: Keys, served_N: Mask) -> None:
        """Mark the rows of these keys and digests alive, each in one segment; all must be `sealed` and dead."""
        left = np.arange(len(keys_N))
        for segment in self.segments:
            at_L = segment.find_by_digest(keys_N[left], digests_N[left])
            here_L = at_L != MISSING
            at_H, found_H = at_L[here_L], left[here_L]
            segment.alive_R[at_H] = True
            segment.slots_R[at_H], segment.served_R[at_H] = slots_N[found_H], served_N[found_H]
            segment.refresh()
            left = left[~here_L]

    def slots_and_digests(self) -> list[tuple[Keys, Callable[[], Keys]]]:
        """The slots of all rows, in parts, each with a function that returns their digests (UNKNOWN in the head)."""
        head_N = self.head.slots()[0].copy()
        return [
            (head_N, lambda: np.full(len(head_N), UNKNOWN)),
            *((one.slots_R[one.alive_R], partial(_digests, one, one.alive_R.copy())) for one in self.segments),
        ]

    def bytes(self) -> int:
        """Memory of rows and indexes, mapped files included."""
        return self.head.bytes() + sum(segment.bytes() for segment in self.segments)

    def slots(self) -> Sequence[Keys]:
        """The slots of all embeddings; see Shard."""
        sealed = (one.slots_R[one.alive_R] if one.dead else one.slots_R for one in self.segments)
        return [*self.head.slots(), *sealed]

    def row_count(self) -> int:
        """Number of embeddings, served or not."""
        return self.head.row_count() + sum(segment.row_count() for segment in self.segments)

    def count(self) -> int:
        """Number of served items."""
        return self.head.count() + sum(segment.count() for segment in self.segments)

    def indexed_count(self) -> int:
        """Number of served items in an approximate index."""
        return sum(segment.count() for segment in self.segments if segment.tuned)

    def is_large(self) -> bool:
        """Whether it has segments, or enough rows to seal."""
        return bool(self.segments) or self.head.row_count() >= min(SETTLED_ROWS, SEAL_ROWS)

    def freeze(self) -> Job | None:
        """Seal the head if it is large; returns the next job, None: there is none."""
        now = time.monotonic()
        settled = now - self._written > SETTLED_SECONDS
        accept_first = not settled and now - self._began < FILLED_SECONDS
        # A single array is scanned fastest, so an exact shard is never sealed; but a GPU needs immutable rows.
        sealed = self.config.kind is not IndexKind.EXACT or gpu.used() is not None
        if self.head.row_count() >= (SETTLED_ROWS if settled else SEAL_ROWS) and sealed:
            self.segments += tuple(_sealed(self.space, self.head))
            self.head = FlatShard(self.dim, self.space)
            self._began = now
        due = self._next_to_replace(settled, accept_first)
        if not due:
            return None
        alive_at_start = tuple(segment.alive_R.copy() for segment in due)
        return Job(due, alive_at_start, self.config, tuple(self._recent_queries), self._files, accept_first)

    def finish(self, job: Job) -> None:
        """Swap in the built segment in one assignment, updated by rows deleted or revived since the job began."""
        if job.merge_rejected:
            for segment in job.replaced:
                segment.merge_rejected = True
            return
        made = job.made
        made.alive_R[:] = False
        revived = []
        for old, alive_R in zip(job.replaced, job.alive_at_start, strict=True):
            stayed_R, back_R = old.alive_R & alive_R, old.alive_R & ~alive_R
            at = made.find(old.keys_R[stayed_R], dead=True)
            made.alive_R[at] = True
            made.slots_R[at], made.served_R[at] = old.slots_R[stayed_R], old.served_R[stayed_R]
            # Rows revived since the start: their item got back an older vector.
            rows = (old.rows_RW[back_R], old.keys_R[back_R], old.slots_R[back_R], old.served_R[back_R])
            revived.append(Segment(self.space, *rows))
        made.refresh()
        left = tuple(one for one in self.segments if one not in job.replaced)
        self.segments = (*left, *(one for one in (made, *revived) if one.keys_R.size))

    def load_new_segments(self) -> list[Segment]:
        """Load segments that another process wrote to disk, with all rows dead."""
        known = {segment.folder for segment in self.segments if segment.folder is not None}
        return [] if self._files is None else self._files.load(self.space, self.dim, known)

    def adopt(self, made: Segment, rows: slice) -> None:
        """Mark rows of a new segment alive if this shard has the same rows, and remove these."""
        keys_N = made.keys_R[rows]
        rows_RW, keys_R, slots_R, served_R = self.head.rows()
        (at_N,) = np.nonzero(np.isin(keys_R, keys_N))
        taken_N = made.revive_matching(keys_R[at_N], rows_RW[at_N], slots_R[at_N], served_R[at_N])
        self.head.delete(keys_R[at_N][taken_N][::-1])
        for other in self.segments:
            if other is not made:
                at_N = other.find(keys_N)
                at_N = at_N[at_N != MISSING]
                held = (other.keys_R[at_N], other.rows_RW[at_N], other.slots_R[at_N], other.served_R[at_N])
                other.mark_dead(other.keys_R[at_N][made.revive_matching(*held)])

    def has_abandoned(self) -> bool:
        """Whether a segment has no alive rows and its files were removed by the process that built it."""
        return any(map(_is_abandoned, self.segments))

    def drop_abandoned(self) -> None:
        """Drop the segments of `has_abandoned`."""
        self.segments = tuple(segment for segment in self.segments if not _is_abandoned(segment))

    def _revive_matching(self, keys_N: Keys, rows_NW: Vectors, slots_N: Keys, served_N: Mask) -> Mask:
        """Revive rows that are already in a segment, and mark other rows of their keys dead; returns which (N,)."""
        new_N = np.ones(len(keys_N), np.bool_)
        for segment in self.segments:
            segment.mark_dead(keys_N[~new_N])
            (left,) = np.nonzero(new_N)
            # Queries are blocked here, so only rows of known keys are copied.
            held = left[segment.find(keys_N[left], dead=True) != MISSING]
            if len(held):
                new_N[held] = ~segment.revive_matching(keys_N[held], rows_NW[held], slots_N[held], served_N[held])
        return ~new_N

    def _next_to_replace(self, settled: bool, accept_first: bool) -> tuple[Segment, ...]:
        """The segments to merge next, or the single segment to rebuild."""
        for segment in self.segments:  # first, so that the search costs of segments to merge are known
            if segment.config != self.config:
                return (segment,)
        mergeable = sorted((segment for segment in self.segments if not segment.merge_rejected), key=Segment.row_count)
        tiers: dict[int, list[Segment]] = {}
        for segment in mergeable:
            tiers.setdefault(int(math.log(max(segment.row_count(), 1), MERGE_FACTOR)), []).append(segment)
        for _, alike in sorted(tiers.items()):
            if len(alike) >= MERGE_FACTOR:
                return tuple(alike[:MERGE_FACTOR])
        fitting = sum(held <= LARGEST_SEALED for held in accumulate(map(Segment.row_count, mergeable)))
        if settled and fitting > 1:
            return tuple(mergeable[:fitting])
        for segment in self.segments:
            if segment.dead > MAX_DEAD_SHARE * len(segment.keys_R) or (segment.provisional and not accept_first):
                return (segment,)
        return ()


def _sealed(space: Space, head: FlatShard) -> Iterator[Segment]:
    """The rows of a head as segments of similar size."""
    pieces = math.ceil(head.row_count() / LARGEST_SEALED)
    split = [np.array_split(share, pieces) for share in head.rows()]
    return (Segment(space, *piece) for piece in zip(*split, strict=True))


def _digests(segment: Segment, alive_R: Mask) -> Keys:
    return segment.digests()[alive_R]


def _is_abandoned(segment: Segment) -> bool:
    return not segment.row_count() and segment.folder is not None and not segment.folder.exists()
