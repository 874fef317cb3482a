"""`Segment`: rows that do not change any more, which of them still count, and the index that was built over them.

A segment answers exactly from the moment it is made; `index_by` gives it an index beside running queries. An item that
is replaced or deleted is dead here: a bit; another says whether it is served from here. Rows with both are live. Shape
suffixes: Q queries, D dimension, R rows, W their width, K wanted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from index.engines import gpu
from index.engines.approximate import build
from index.engines.base import MISSING, Hits, Keys, Scanned, is_full
from index.engines.config import IndexConfig, IndexKind
from index.engines.digest import UNKNOWN, digests
from index.engines.exact import in_order, nearest_rows
from index.engines.tuning import Tuned, depth_of, most_of, only, search_index, tune, widened
from index.events import Event
from index.scan import COPY_COST, Mask, Rows
from index.space import Space, Vectors

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=np.generic)

MIN_APPROXIMATE = 10_000
"""A scan of fewer rows takes no longer than what surrounds it."""
KINDS_OF_AUTO = IndexKind.IVF, IndexKind.HNSW
"""What `auto` tries: inverted lists are built in a fifth of the time of a graph."""
FEW_LISTS = 8
"""Of lists that reach the recall aim with so few (`nprobe`), no graph is faster: none is built then."""
SAMPLES, SAMPLED = 2048, 0.25
"""So many rows, but no larger a share, stand for queries while an index over the others is measured, which takes three
or four seconds. With fewer, the margin for chance asks for a larger effort."""
SCANNED_COST = 1.5 / COPY_COST
"""Comparing every row in order takes so much of what it does to copy them together first; with a margin."""
REMEMBERED = 256
"""Ways to search that are remembered, of so many different depths and numbers of rows."""
BESIDE_BYTES = 5 * 8 + 3
"""Of a row: its key, slot, place in the order of keys, key in that order, digest; and three bits, a byte each."""


class _Way(NamedTuple):
    """How a segment is searched.

    Attributes:
        how: by what.
        sure: of so many of a list it is certain that they are found.
        depth: so many are wanted.
        wide: so many are asked of an index, which knows nothing of rows that may not be found.
    """

    how: Scanned
    sure: int
    depth: int
    wide: int


class Segment:
    """Immutable rows; see the module. Not thread-safe, except that `index_by` may run beside searches."""

    def __init__(
        self,
        space: Space,
        rows_RW: Vectors,
        keys_R: Keys,
        slots_R: Keys,
        served_R: Mask | None = None,
        digests_R: Keys | None = None,
    ) -> None:
        self.space = space
        self._order_R = np.argsort(keys_R, kind="stable")  # fast where they ascend, and as a rule they do
        self._sorted_R = keys_R[self._order_R]
        self.rows_RW, self.keys_R, self.slots_R = rows_RW, keys_R, slots_R
        self.alive_R: Mask = np.ones(len(keys_R), np.bool_)
        self.served_R = np.ones(len(keys_R), np.bool_) if served_R is None else served_R.copy()
        self.tuned: Tuned | None = None
        self.config: IndexConfig | None = None
        self.folder: Path | None = None
        self.apart = False
        """Whether it is not merged again: that was tried, and found too little or took too long."""
        self.provisional = False
        """Whether its lists were taken without trying a graph, which may take less."""
        self.stored_bytes = 0
        """Of its files, those that are not its rows."""
        self._digests_R = digests_R
        self._on_gpu: gpu.OnGpu | None = None
        self.refresh()

    def count(self) -> int:
        """Number of live rows."""
        return self._live

    def held(self) -> int:
        """Number of rows that are not dead."""
        return len(self.keys_R) - self.dead

    def refresh(self) -> None:
        """To be called when bits have changed: what follows from them is made once, not with each query."""
        self.dead = len(self.alive_R) - int(np.count_nonzero(self.alive_R))
        self._live_R: Mask = self.alive_R & self.served_R
        self._live = int(np.count_nonzero(self._live_R))
        self._all_live = None if self._live == len(self.keys_R) else self._live_R
        self._ways: dict[tuple[int, float, int, float | None], _Way] = {}

    def serve(self, served_S: Mask) -> None:
        """Which rows are served from here, by slot."""
        if self.held():  # what a dead row says matters to nobody, but its slot may be one that there was
            self.served_R = served_S.take(self.slots_R, mode="clip")
        self.refresh()

    def find(self, keys: Keys, *, dead: bool = False) -> Rows:
        """The rows of these keys that are not dead, or with `dead` any; MISSING where there is none."""
        if not len(self.keys_R):
            return np.full(len(keys), MISSING, np.int64)
        at = self._order_R[np.searchsorted(self._sorted_R, keys).clip(max=len(self.keys_R) - 1)]
        return np.where((self.keys_R[at] == keys) & (self.alive_R[at] | dead), at, MISSING)

    def sealed(self, keys_N: Keys, digests_N: Keys) -> Rows:
        """The row of each key that holds the vector of this digest, dead or not; MISSING where there is none."""
        at_N = self.find(keys_N, dead=True)
        same_N = (at_N != MISSING) & (digests_N != UNKNOWN) & (self.digests()[at_N] == digests_N)
        return np.where(same_N, at_N, MISSING)

    def digests(self) -> Keys:
        """The digest of each row's vector (R,), made when they are asked for."""
        if self._digests_R is None:
            self._digests_R = digests(self.rows_RW[:, : self.dim])
        return self._digests_R

    def bytes(self) -> int:
        """What rows, index and bits take of memory, mapped or not."""
        return self.stored_bytes + self.rows_RW.nbytes + len(self.keys_R) * BESIDE_BYTES

    def kill(self, keys: Keys) -> None:
        """These are dead from now on; unknown ones are ignored."""
        if not len(keys):
            return
        at = self.find(keys)
        at = at[at != MISSING]
        if len(at):
            self.alive_R[at] = False
            self.refresh()

    def take(self, keys_N: Keys, rows_NW: Vectors, slots_N: Keys, served_N: Mask) -> Mask:
        """Have the rows live on that are what these keys are given, and any other row of them not; which did (N,)."""
        at_N = self.find(keys_N, dead=True)
        (held_N,) = np.nonzero(at_N != MISSING)
        same_N = held_N[(self.rows_RW[at_N[held_N]] == rows_NW[held_N]).all(axis=1)]
        self.alive_R[at_N[held_N]] = False
        self.alive_R[at_N[same_N]] = True
        self.slots_R[at_N[same_N]], self.served_R[at_N[same_N]] = slots_N[same_N], served_N[same_N]
        if len(held_N):
            self.refresh()
        taken_N = np.zeros(len(keys_N), np.bool_)
        taken_N[same_N] = True
        return taken_N

    def kill_all(self) -> None:
        """Every row is dead."""
        self.alive_R[:] = False
        self.refresh()

    def count_as(self, other: Segment) -> None:
        """Be dead and served and look where the same rows of another one are."""
        self.alive_R, self.slots_R, self.served_R = other.alive_R, other.slots_R, other.served_R
        self.refresh()

    def search(
        self,
        queries_QD: Vectors,
        k: int,
        allowed_S: Mask | None,
        *,
        exact: bool = False,
        recall: float | None = None,
        part: float = 1.0,
    ) -> Hits:
        """As `Shard.search`."""
        allowed_R, among = self._allowed(allowed_S)
        way = self._way(k, part, among, recall) if among and not exact else _Way(Scanned(among), k, k, k)
        how, sure, depth, wide = way
        if (device := gpu.used()) and (found := self._by_gpu(device, queries_QD, depth, how.effort, allowed_R)):
            scores_QC, at_QC = found
        elif how.effort and self.tuned:
            found = in_order(*search_index(self.tuned.index, self.space, self.rows_RW, queries_QD, wide, how.effort))
            scores_QC, at_QC = found if allowed_R is None else only(allowed_R, found, depth)
        else:
            scores_QC, at_QC = nearest_rows(self.space, queries_QD, self.rows_RW, allowed_R, depth)
        if is_full(at_QC):
            return Hits(scores_QC, self.slots_R.take(at_QC), True, how, sure)
        least = min(sure, among)
        if least and len(few := np.flatnonzero(at_QC[:, least - 1] == MISSING)):  # more are there than the index found
            found = nearest_rows(self.space, queries_QD[few], self.rows_RW, allowed_R, depth)
            scores_QC[few], at_QC[few] = found
            how = replace(how, exact=among)
        none_QC = at_QC == MISSING
        slots_QC = self.slots_R.take(at_QC) if among else at_QC
        scores_QC, slots_QC = np.where(none_QC, np.float32(0), scores_QC), np.where(none_QC, MISSING, slots_QC)
        return Hits(scores_QC, slots_QC, is_full(at_QC), how, sure)

    def index_by(
        self,
        config: IndexConfig,
        queries_QD: Vectors | None,
        stopped: Callable[[], bool],
        *,
        missed: str,
        hurried: bool = False,
    ) -> bool:
        """Build an index as the gallery wants it, and measure what effort its recall takes; takes a while.

        `queries_QD`: what is asked of these rows lately; else the last rows stand for queries, which `merged` has drawn
        at random. Where no effort reaches the aim it is told, with what follows (`missed`), and the segment goes on
        being scanned. `hurried`: the first index that reaches it is enough. False: it was stopped before the end.
        """
        self.config = config
        if config.kind is IndexKind.EXACT or (config.kind is IndexKind.AUTO and len(self.keys_R) < MIN_APPROXIMATE):
            return True
        # A row that is asked for and is there is found too easily, and so is what lies between rows.
        rows_RW, held_out = self.rows_RW, _sampled(len(self.rows_RW))
        indexed_RW = rows_RW[: len(rows_RW) - held_out]
        if queries_QD is None:
            queries_QD = np.ascontiguousarray(rows_RW[-max(held_out, 1) :, : self.dim])
        enough = math.inf if hurried else FEW_LISTS
        found = self._cheapest(config, indexed_RW, queries_QD, stopped, enough)
        if found is None:
            return False
        best, reached = found
        if best is None:
            told = _told(config, reached, missed)
            logger.warning(Event("recall_not_reached", index=config.kind.value, items=len(rows_RW), **told))
            return True
        best.index.add(rows_RW[len(indexed_RW) :])
        self.tuned = best
        lists = best.efforts[0] if best.index.kind is IndexKind.IVF else 0
        self.provisional = config.kind is IndexKind.AUTO and FEW_LISTS < lists <= enough
        self._ways.clear()
        self._on_gpu = None
        return True

    def _cheapest(
        self, config: IndexConfig, rows_RW: Vectors, queries_QD: Vectors, stopped: Callable[[], bool], enough: float
    ) -> tuple[Tuned | None, float] | None:
        """Of the indexes to be tried what reaches the aim for least, None where none does, and the best recall of any.

        Where so many lists are `enough`, a graph is not tried. None: it was stopped.
        """
        best, reached = None, 0.0
        for kind in KINDS_OF_AUTO if config.kind is IndexKind.AUTO else (config.kind,):
            index = build(kind, config.storage, rows_RW, inner_product=self.space.inner_product, stopped=stopped)
            if index is None:
                return None
            efforts, recall, aims, long = tune(index, self.space, rows_RW, queries_QD, config.recall)
            reached = max(reached, recall)
            if efforts is not None and (best is None or index.cost(efforts[0]) < best.cost()):
                best = Tuned(index, efforts, recall, aims, long)
            if kind is IndexKind.IVF and best is not None and best.efforts[0] <= enough:
                break
        return best, reached

    def arrange(self) -> None:
        """Have rows lie as the index searches them best, which nobody does yet."""
        if self.tuned is None:
            return
        index = self.tuned.index
        if (kept_RW := index.rows()) is not None:
            self.rows_RW = kept_RW  # once, not beside a copy
        if (order_R := index.arrange()) is None:
            return
        arranged_RW = index.rows()
        self.rows_RW = self.rows_RW[order_R] if arranged_RW is None else arranged_RW
        self._order_R = np.argsort(order_R)[self._order_R]
        self.keys_R, self.slots_R = self.keys_R[order_R], self.slots_R[order_R]
        self.alive_R, self.served_R = self.alive_R[order_R], self.served_R[order_R]
        self.refresh()

    def cost(self, whole: Segment | None = None) -> float:
        """What a search takes, as so many rows compared; for its part of a list over all rows of `whole`, if given."""
        if self.tuned is None:
            return float(len(self.keys_R))
        return self.tuned.cost(1.0 if whole is None else min(1.0, len(self.keys_R) / len(whole.keys_R)))

    def _allowed(self, allowed_S: Mask | None) -> tuple[Mask | None, int]:
        """The live rows that are allowed (R,), None for all rows, and how many they are."""
        if allowed_S is None:
            return self._all_live, self._live
        allowed_R: Mask = allowed_S[self.slots_R]
        if self._live < len(self.keys_R):
            allowed_R &= self._live_R
        return allowed_R, int(np.count_nonzero(allowed_R))

    def _way(self, k: int, part: float, among: int, recall: float | None) -> _Way:
        """How `among` of the rows are best searched; it is worked out once until rows change."""
        if (found := self._ways.get((k, part, among, recall))) is None:
            if len(self._ways) >= REMEMBERED:
                self._ways.clear()
            wide = widened(k, among / len(self.keys_R))
            effort = self._effort(wide, part, among, recall)
            how = Scanned(0, among, effort) if effort else Scanned(among)
            is_part = 0 < effort < (self._effort(wide, 1.0, among, recall) or math.inf)
            asked = part if is_part else 1.0
            found = _Way(how, most_of(k, asked), depth_of(k, asked), depth_of(wide, asked))
            self._ways[k, part, among, recall] = found
        return found

    def _effort(self, k: int, part: float, among: int, recall: float | None) -> int:
        """What an approximate search for the k best takes; 0 where comparing `among` of the rows takes less."""
        if self.tuned is None or k > len(self.keys_R):
            return 0
        needed = self.tuned.effort_for(part, k, recall)
        scanned = min(among, SCANNED_COST * len(self.keys_R))
        return math.ceil(needed) if self.tuned.cost_for(self.space, needed, k) < scanned else 0

    def _by_gpu(
        self, device: gpu.Gpu, queries_QD: Vectors, k: int, effort: int, allowed_R: Mask | None
    ) -> tuple[Vectors, Rows] | None:
        """What the GPU finds; None: the CPU is to search."""
        if self._on_gpu is None:
            index = None if self.tuned is None else self.tuned.index
            self._on_gpu = gpu.OnGpu(device, self.space, self.rows_RW, index)
        return self._on_gpu.search(queries_QD, k, effort, allowed_R)

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return int(self.rows_RW.shape[1]) - (self.space.width(1) - 1)


def merged(segments: Sequence[Segment], counted: Sequence[Mask]) -> Segment:
    """One segment of some rows of several, in random order: as graphs are built best.

    `index_by` takes the last for those that queries are like. `counted`: which rows of each (R,), one of a key.
    """
    taken = [np.flatnonzero(counted_R) for counted_R in counted]
    places = np.random.default_rng(0).permutation(sum(map(len, taken)))
    split = np.split(places, np.cumsum([len(at) for at in taken])[:-1])

    def together(parts: Sequence[NDArray[T]]) -> NDArray[T]:
        made = np.empty((len(places), *parts[0].shape[1:]), parts[0].dtype)
        for part, at, to in zip(parts, taken, split, strict=True):
            made[to] = part[at]
        return made

    return Segment(
        segments[0].space,
        together([one.rows_RW for one in segments]),
        together([one.keys_R for one in segments]),
        together([one.slots_R for one in segments]),
        together([one.served_R for one in segments]),
    )


def _told(config: IndexConfig, recall: float, missed: str) -> dict[str, object]:
    advice = "a lower recall aim, another index or float32 storage, see `regraft gallery index`"
    return {"aim": config.recall, "reached": round(recall, 4), "then": missed, "instead": advice}


def _sampled(rows: int) -> int:
    return min(SAMPLES, int(rows * SAMPLED))
