"""`SegmentedShard`: an exact head that takes writes, and sealed segments that an approximate index may serve.

Writes go to the head. When it is large, `freeze` turns it into a segment in one short step; the `Job` it gives builds
indexes and merges segments beside queries and writes, and `finish` swaps in what it made. Whoever owns the shard locks:
`search` under a shared lock, `upsert`, `delete` and `freeze` alone, `reserve` and `finish` beside searches and nothing
else, `Job.run` under no lock.

Shape suffixes: Q queries, K results wanted, N items, D dimension, S slots.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np

from index.engines import gpu
from index.engines.base import MISSING, Hits, Keys, Scanned
from index.engines.config import IndexConfig, IndexKind
from index.engines.digest import UNKNOWN
from index.engines.flat import FlatShard
from index.engines.joined import best_of, unsure, with_whole
from index.engines.segment import Segment, merged
from index.engines.snapshot import SegmentFiles, remove
from index.engines.tuning import most_of
from index.scan import Mask
from index.space import Space, Vectors

SEAL_ROWS = 32_768
"""A head of so many rows is sealed: a scan of it takes a millisecond."""
LARGEST_SEALED = 4 * SEAL_ROWS
"""A head that outgrew it while others were built becomes several: one index of many more may take far longer.

Segments of no more rows together become one when nothing is written any more, whatever their sizes.
"""
SETTLED_ROWS, SETTLED_SECONDS = 10_000, 10.0
"""One of so many is, too, once nothing was written for so long."""
FILLED_SECONDS = 60.0
"""Where a head fills in less, items come faster than graphs are built: lists do for now (decision 0046)."""
REMEMBERED, FEWEST_ASKED = 256, 64
"""So many queries are remembered; so many of them, if they differ, say how good an index is, fewer are no sample."""
MERGED_TOGETHER = 4
"""So many segments of about one size become one, where that takes a search less."""
MOST_DEAD = 0.3
"""A segment with a larger share of dead rows is written anew."""
SCANNED, KEPT = "every item is compared", "segments stay apart"
"""What follows where an index misses the recall aim."""


@dataclass
class Job:
    """Segments to be replaced by one with an index; `run` takes seconds to minutes, and touches nothing served."""

    replaced: tuple[Segment, ...]
    counted: tuple[Mask, ...]
    """Which rows of each of them were not dead when the job began: those are merged, whatever happens meanwhile."""
    config: IndexConfig
    asked: Sequence[Vectors]
    """Queries that were asked lately (D,), the last one last."""
    files: SegmentFiles | None
    hurried: bool = False
    """Whether the first index that reaches the recall aim is enough for now."""
    made: Segment = field(init=False)
    apart: bool = field(default=False, init=False)
    """Whether they stay as they are: one index of all of them misses the aim, or takes a search more than theirs do."""

    def run(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Merge what counts, index it and write it down; False: it was stopped, and there is nothing to swap in."""
        self.made = made = merged(self.replaced, self.counted)
        if not made.keys_R.size:
            return True
        kept = len(self.replaced) > 1 and any(one.tuned for one in self.replaced)
        missed = KEPT if kept else SCANNED
        if not made.index_by(self.config, self.sample(), stopped, missed=missed, hurried=self.hurried):
            return False
        self.apart = kept and (made.tuned is None or made.cost() > sum(one.cost(made) for one in self.replaced))
        if self.apart:
            if self.files is not None:
                self.files.keep_apart(self.replaced)
            return True
        made.arrange()
        self.made = made if self.files is None else self.files.keep(made)
        return True

    def sample(self) -> Vectors | None:
        """What an index is to be measured with, None: too few. A query that is repeated is one query."""
        if len(self.asked) < FEWEST_ASKED:
            return None
        queries_QD: Vectors = np.unique(np.stack(self.asked), axis=0)
        return queries_QD if len(queries_QD) >= FEWEST_ASKED else None

    def clear(self) -> None:
        """Remove the files of what was replaced; after `finish`."""
        for segment in () if self.apart else self.replaced:
            remove(segment)


class SegmentedShard:
    """The vectors of one version in one gallery, at any size; see the module."""

    elsewhere = False

    def __init__(self, dim: int, space: Space, config: IndexConfig, folder: Path | None = None) -> None:
        """`folder`: where segments are kept; those there are count as soon as `upsert` brings their rows again."""
        self.space, self.dim, self.config = space, dim, config
        self.head = FlatShard(dim, space)
        self._files = SegmentFiles(folder) if folder else None
        self.segments = tuple(self._files.load(space, dim)) if self._files else ()
        self._written = self._began = time.monotonic()
        # The last queries (D,).
        self._asked: deque[Vectors] = deque(maxlen=REMEMBERED)

    def take_over(self, other: SegmentedShard) -> None:
        """Hold all that another one does, which is not used any more; other segments that this one found stay, too."""
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
        """Store or replace; see Shard. What a segment holds already only learns its slot, and whether it is served."""
        self._written = time.monotonic()
        keys_N = np.asarray(keys, np.int64)
        slots_N = keys_N if slots_N is None else slots_N
        served_N = np.ones(len(keys_N), np.bool_) if served_N is None else served_N
        if self.segments:
            new_N = ~self._take(keys_N, self.space.items(vectors_ND), slots_N, served_N)
            self.head.delete(keys_N[~new_N])
            keys_N, vectors_ND, slots_N, served_N = keys_N[new_N], vectors_ND[new_N], slots_N[new_N], served_N[new_N]
        self.head.upsert(keys_N, vectors_ND, slots_N, served_N)

    def reserve(self, more: int) -> None:
        """Make room in the head; see Shard."""
        self.head.reserve(more)

    def delete(self, keys: Sequence[int] | Keys) -> None:
        """Remove; see Shard."""
        self.head.delete(keys)
        for segment in self.segments:
            segment.kill(np.asarray(keys, np.int64))

    def serve(self, served_S: Mask) -> None:
        """Which rows are found; see Shard."""
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
        part: float = 1.0,
    ) -> Hits:
        """The best of head and segments, see Shard; of several each gives its share, see `index.engines.joined`."""
        if not self.segments:
            return self.head.search(queries_QD, k, allowed_S)
        self._asked.extend(queries_QD[-REMEMBERED:].copy())  # a view would keep all that its request came with
        held: tuple[FlatShard | Segment, ...] = self.head, *self.segments
        searched = [one for one in held if one.count()] or [self.head]
        if len(searched) == 1:
            return searched[0].search(queries_QD, k, allowed_S, exact=exact, recall=recall, part=part)
        count, higher_is_better = sum([one.count() for one in searched]), self.space.higher_is_better
        found = [
            one.search(queries_QD, k, allowed_S, exact=exact, recall=recall, part=part * one.count() / count)
            for one in searched
        ]
        sure = k if min([hits.sure for hits in found]) == k else most_of(k, part)
        merged = best_of(found, k, higher_is_better=higher_is_better)
        if any(again := unsure(merged, found, sure)):
            for number, rows in enumerate(again):
                if rows:
                    whole = searched[number].search(queries_QD[rows], k, allowed_S, exact=exact, recall=recall)
                    found[number] = with_whole(found[number], rows, whole)
            merged = best_of(found, k, higher_is_better=higher_is_better)
        how = sum((hits.how for hits in found), Scanned())
        return Hits(merged.raw_QK, merged.keys_QK, merged.full, how, sure)

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
        """Which of these keys have a row in this process (N,), and the vectors of those (M, D), in order."""
        here_N = self.head.has(keys_N)
        for segment in self.segments:
            here_N |= segment.find(keys_N) != MISSING
        return here_N, SegmentedShard.fetch(self, keys_N[here_N])[:, : self.dim]

    def sealed(self, keys_N: Keys, digests_N: Keys, numbers_N: Keys) -> Mask:
        """Which of these vectors segments hold by their digests, dead or not (N,).

        `numbers_N`: of the items' last writes in the change feed, which say nothing about a row that never changes.
        """
        left = np.arange(len(keys_N))
        for segment in self.segments:
            left = left[segment.sealed(keys_N[left], digests_N[left]) == MISSING]
        known_N = np.ones(len(keys_N), np.bool_)
        known_N[left] = False
        return known_N

    def revive(self, keys_N: Keys, digests_N: Keys, numbers_N: Keys, slots_N: Keys, served_N: Mask) -> None:
        """Have the rows of these keys and digests live on, each in one segment; they are all `sealed`, and dead."""
        left = np.arange(len(keys_N))
        for segment in self.segments:
            at_L = segment.sealed(keys_N[left], digests_N[left])
            here_L = at_L != MISSING
            at_H, mine_H = at_L[here_L], left[here_L]
            segment.alive_R[at_H] = True
            segment.slots_R[at_H], segment.served_R[at_H] = slots_N[mine_H], served_N[mine_H]
            segment.refresh()
            left = left[~here_L]

    def copied(self) -> list[tuple[Keys, Callable[[], Keys]]]:
        """What is held, in parts: slots, and what gives the digests of those that files hold, or soon will."""
        head_N = self.head.slots()[0].copy()
        return [
            (head_N, lambda: np.full(len(head_N), UNKNOWN)),
            *((one.slots_R[one.alive_R], partial(_digests, one, one.alive_R.copy())) for one in self.segments),
        ]

    def bytes(self) -> int:
        """What rows and indexes take of memory, mapped or not."""
        return self.head.bytes() + sum(segment.bytes() for segment in self.segments)

    def slots(self) -> Sequence[Keys]:
        """The slots of everything held; see Shard."""
        sealed = (one.slots_R[one.alive_R] if one.dead else one.slots_R for one in self.segments)
        return [*self.head.slots(), *sealed]

    def held(self) -> int:
        """Number of embeddings, served or not."""
        return self.head.held() + sum(segment.held() for segment in self.segments)

    def count(self) -> int:
        """Number of served items."""
        return self.head.count() + sum(segment.count() for segment in self.segments)

    def indexed(self) -> int:
        """Items that an approximate index answers for."""
        return sum(segment.count() for segment in self.segments if segment.tuned)

    def is_large(self) -> bool:
        """Whether it has segments, or so many rows that they may become one."""
        return bool(self.segments) or self.head.held() >= min(SETTLED_ROWS, SEAL_ROWS)

    def freeze(self) -> Job | None:
        """Seal the head if it is large, and say what is to be built next; None: nothing is."""
        now = time.monotonic()
        settled = now - self._written > SETTLED_SECONDS
        hurried = not settled and now - self._began < FILLED_SECONDS
        # One array is scanned fastest, so that an exact shard is its head; but a GPU scans what does not change.
        sealed = self.config.kind is not IndexKind.EXACT or gpu.used() is not None
        if self.head.held() >= (SETTLED_ROWS if settled else SEAL_ROWS) and sealed:
            self.segments += tuple(_sealed(self.space, self.head))
            self.head = FlatShard(self.dim, self.space)
            self._began = now
        due = self._due(settled, hurried)
        if not due:
            return None
        counted = tuple(segment.alive_R.copy() for segment in due)
        return Job(due, counted, self.config, tuple(self._asked), self._files, hurried)

    def finish(self, job: Job) -> None:
        """Swap in what was built, in one assignment; what died meanwhile is dead in it, what came back beside it."""
        if job.apart:
            for segment in job.replaced:
                segment.apart = True
            return
        made = job.made
        made.alive_R[:] = False
        revived = []
        for old, counted_R in zip(job.replaced, job.counted, strict=True):
            stayed_R, back_R = old.alive_R & counted_R, old.alive_R & ~counted_R
            at = made.find(old.keys_R[stayed_R], dead=True)
            made.alive_R[at] = True
            made.slots_R[at], made.served_R[at] = old.slots_R[stayed_R], old.served_R[stayed_R]
            # Of an item whose vector is again what it was before the one that was merged.
            rows = (old.rows_RW[back_R], old.keys_R[back_R], old.slots_R[back_R], old.served_R[back_R])
            revived.append(Segment(self.space, *rows))
        made.refresh()
        left = tuple(one for one in self.segments if one not in job.replaced)
        self.segments = (*left, *(one for one in (made, *revived) if one.keys_R.size))

    def unseen(self) -> list[Segment]:
        """Segments on disk that are not among these, no row of which counts yet; they are another process's."""
        known = {segment.folder for segment in self.segments if segment.folder is not None}
        return [] if self._files is None else self._files.load(self.space, self.dim, known)

    def adopt(self, made: Segment, rows: slice) -> None:
        """Have rows of one of the segments count where the same ones were held elsewhere, and only there."""
        keys_N = made.keys_R[rows]
        rows_RW, keys_R, slots_R, served_R = self.head.rows()
        (at_N,) = np.nonzero(np.isin(keys_R, keys_N))
        taken_N = made.take(keys_R[at_N], rows_RW[at_N], slots_R[at_N], served_R[at_N])
        self.head.delete(keys_R[at_N][taken_N][::-1])
        for other in self.segments:
            if other is not made:
                at_N = other.find(keys_N)
                at_N = at_N[at_N != MISSING]
                held = (other.keys_R[at_N], other.rows_RW[at_N], other.slots_R[at_N], other.served_R[at_N])
                other.kill(other.keys_R[at_N][made.take(*held)])

    def has_left(self) -> bool:
        """Whether a segment holds nothing any more, and whoever built it removed its files."""
        return any(map(_has_left, self.segments))

    def drop_left(self) -> None:
        """Forget those."""
        self.segments = tuple(segment for segment in self.segments if not _has_left(segment))

    def _take(self, keys_N: Keys, rows_NW: Vectors, slots_N: Keys, served_N: Mask) -> Mask:
        """Have segments hold the rows that are the same there, each in one, and drop what was; which they do (N,)."""
        new_N = np.ones(len(keys_N), np.bool_)
        for segment in self.segments:
            segment.kill(keys_N[~new_N])
            (left,) = np.nonzero(new_N)
            # Queries wait meanwhile: only rows that are held are copied.
            held = left[segment.find(keys_N[left], dead=True) != MISSING]
            if len(held):
                new_N[held] = ~segment.take(keys_N[held], rows_NW[held], slots_N[held], served_N[held])
        return ~new_N

    def _due(self, settled: bool, hurried: bool) -> tuple[Segment, ...]:
        """The segments to be made one, or made anew, next."""
        for segment in self.segments:  # first, so that what is merged says what a search of it takes
            if segment.config != self.config:
                return (segment,)
        mergeable = sorted((segment for segment in self.segments if not segment.apart), key=Segment.held)
        tiers: dict[int, list[Segment]] = {}
        for segment in mergeable:
            tiers.setdefault(int(math.log(max(segment.held(), 1), MERGED_TOGETHER)), []).append(segment)
        for _, alike in sorted(tiers.items()):
            if len(alike) >= MERGED_TOGETHER:
                return tuple(alike[:MERGED_TOGETHER])
        fitting = sum(held <= LARGEST_SEALED for held in accumulate(map(Segment.held, mergeable)))
        if settled and fitting > 1:
            return tuple(mergeable[:fitting])
        for segment in self.segments:
            if segment.dead > MOST_DEAD * len(segment.keys_R) or (segment.provisional and not hurried):
                return (segment,)
        return ()


def _sealed(space: Space, head: FlatShard) -> Iterator[Segment]:
    """Its rows as segments of about one size."""
    pieces = math.ceil(head.held() / LARGEST_SEALED)
    split = [np.array_split(part, pieces) for part in head.rows()]
    return (Segment(space, *piece) for piece in zip(*split, strict=True))


def _digests(segment: Segment, alive_R: Mask) -> Keys:
    return segment.digests()[alive_R]


def _has_left(segment: Segment) -> bool:
    return not segment.held() and segment.folder is not None and not segment.folder.exists()
