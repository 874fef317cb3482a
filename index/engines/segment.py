"""`Segment`: rows that do not change any more, which of them still count, and the index that was built over them.

A segment answers exactly from the moment it is made; `index_by` gives it an index beside running queries. An item that
is replaced or deleted is dead here: a bit; another says whether it is served from here. Rows with both are live. Shape
suffixes: Q queries, D dimension, R rows, W their width, K wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from index.engines.approximate import Approximate, Selection, build
from index.engines.base import MISSING, Hits, Keys, Scanned
from index.engines.config import IndexConfig, IndexKind
from index.engines.digest import UNKNOWN, digests
from index.engines.exact import nearest_rows, score_rows
from index.scan import Mask, Rows
from index.space import Lorentz, Space, Vectors

MIN_APPROXIMATE = 10_000
"""A scan of fewer rows takes no longer than what surrounds it."""
REFINED = 2
"""So many times the candidates wanted are scored exactly, where the index keeps codes or the space rounds."""
AIM_K = 10
"""The recall aim is of so many best."""
SAMPLES = 256
"""Queries the recall of an index is measured with."""
SURE = 2.0
"""Standard errors of the sample by which its recall is to be above the aim."""
NEAR = 32
"""Rows around one that a query is drawn from."""
THIN = 0.1
"""The share of rows that a filter leaves at which recall is measured a second time."""
REMEMBERED = 256
"""Ways to search that are remembered, of so many different depths and numbers of rows."""
BESIDE_BYTES = 5 * 8 + 3
"""Of a row: its key, slot, place in the order of keys, key in that order, digest; and three bits, a byte each."""


@dataclass(frozen=True)
class Tuned:
    """An index, and what was measured of it.

    Attributes:
        index: over the rows of one segment.
        effort: the least that reaches the recall aim at k = 10.
        recall: what was measured with it.
        thin_effort: the least that reaches it where one row in ten may be found.
    """

    index: Approximate
    effort: int
    recall: float
    thin_effort: int

    def effort_for(self, share: float) -> float:
        """What reaches the aim where a share of the rows may be found: a power through the two that were measured."""
        return self.effort * math.pow(self.thin_effort / self.effort, math.log(share) / math.log(THIN))


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
        self.stored_bytes = 0
        """Of its files, those that are not its rows."""
        self._digests_R = digests_R
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
        self._selection: Selection | None = None
        self._ways: dict[tuple[int, int], Scanned] = {}

    def serve(self, served_S: Mask) -> None:
        """Which rows are served from here, by slot."""
        alive_R = self.alive_R
        self.served_R[alive_R] = served_S[self.slots_R[alive_R]]
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

    def search(self, queries_QD: Vectors, k: int, allowed_S: Mask | None, *, exact: bool = False) -> Hits:
        """As `Shard.search`."""
        allowed_R = self._allowed(allowed_S)
        among = self._live if allowed_S is None or allowed_R is None else int(np.count_nonzero(allowed_R))
        how = Scanned(among) if exact or not among else self._how(k, among)
        found = self._approximate(queries_QD, k, how.effort, allowed_R, among) if how.effort else None
        if found is None:
            found, how = nearest_rows(self.space, queries_QD, self.rows_RW, allowed_R, k), Scanned(among)
        scores_QK, at_QK = found
        if among >= k:  # as nearly always: then nothing is missing
            return Hits(scores_QK, self.slots_R[at_QK], how)
        none_QK = at_QK == MISSING
        slots_QK = np.where(none_QK, MISSING, self.slots_R[at_QK]) if len(self.slots_R) else at_QK
        return Hits(np.where(none_QK, np.float32(0), scores_QK), slots_QK, how)

    def index_by(
        self, config: IndexConfig, queries_QD: Vectors | None = None, stopped: Callable[[], bool] = lambda: False
    ) -> bool:
        """Build an index as the gallery wants it, and measure what effort its recall takes; takes a while.

        `queries_QD`: what is asked of these rows lately; else rows stand for queries. Where no effort reaches the aim,
        the segment goes on being scanned. False: it was stopped before the end.
        """
        self.config = config
        kind = IndexKind.HNSW if config.kind is IndexKind.AUTO else config.kind
        if kind is IndexKind.EXACT or (config.kind is IndexKind.AUTO and len(self.keys_R) < MIN_APPROXIMATE):
            return True
        index = build(kind, config.storage, self.rows_RW, inner_product=self.space.inner_product, stopped=stopped)
        if index is None:
            return False
        self.tuned = self._tune(index, config.recall, queries_QD)
        self._ways.clear()
        if self.tuned is not None and (rows_RW := index.rows()) is not None:
            self.rows_RW = rows_RW  # once, not beside a copy
        return True

    def _allowed(self, allowed_S: Mask | None) -> Mask | None:
        whole = self._live == len(self.keys_R)
        if allowed_S is None:
            return None if whole else self._live_R
        allowed_R: Mask = allowed_S[self.slots_R]
        return allowed_R if whole else allowed_R & self._live_R

    def _how(self, k: int, among: int) -> Scanned:
        """How `among` of the rows are best searched; worked out once for as long as the rows do not change."""
        if (how := self._ways.get((k, among))) is None:
            if len(self._ways) >= REMEMBERED:
                self._ways.clear()
            effort = self._effort(k, among)
            how = self._ways[k, among] = Scanned(0, among, effort) if effort else Scanned(among)
        return how

    def _effort(self, k: int, among: int) -> int:
        """What an approximate search of `among` of the rows takes; 0 where comparing them all takes less."""
        if self.tuned is None:
            return 0
        index, share = self.tuned.index, among / len(self.keys_R)
        needed = self.tuned.effort_for(share)
        if k > AIM_K:  # which nothing was measured of
            needed = max(needed * math.sqrt(k / AIM_K), REFINED * k / share)
        return math.ceil(needed) if index.cost(needed) < among else 0

    def _approximate(
        self, queries_QD: Vectors, k: int, effort: int, allowed_R: Mask | None, among: int
    ) -> tuple[Vectors, Rows] | None:
        """None: it found fewer than there are."""
        assert self.tuned is not None
        scores_QK, at_QK = self._search(self.tuned.index, queries_QD, k, effort, self._selected(allowed_R))
        short = MISSING in at_QK[:, min(k, among) - 1].tolist()
        return None if short else (scores_QK, at_QK)

    def _search(
        self, index: Approximate, queries_QD: Vectors, k: int, effort: int, among: Selection
    ) -> tuple[Vectors, Rows]:
        queries_QW = np.ascontiguousarray(self.space.queries(queries_QD))
        if index.lossy or isinstance(self.space, Lorentz):
            candidates_QC = index.search(queries_QW, REFINED * k, effort, among)[1]
            return score_rows(self.space, queries_QD, self.rows_RW, candidates_QC, k)
        scanned_QK, at_QK = index.search(queries_QW, k, effort, among)
        return self.space.score(scanned_QK), at_QK

    def _selected(self, allowed_R: Mask | None) -> Selection:
        """These rows; those that are live are said once a change."""
        if allowed_R is not None and allowed_R is not self._live_R:
            return Selection(allowed_R)
        if self._selection is None:
            self._selection = Selection(allowed_R)
        return self._selection

    def _tune(self, index: Approximate, aim: float, queries_QD: Vectors | None) -> Tuned | None:
        sample_QD = self._sample() if queries_QD is None else queries_QD
        whole = self._reaching(index, aim, sample_QD, None, 0)
        if whole is None:
            return None
        thin_R: Mask = np.random.default_rng(0).random(len(self.keys_R)) < THIN
        thin = self._reaching(index, aim, sample_QD, thin_R, whole[0]) if thin_R.any() else None
        return Tuned(index, *whole, thin[0] if thin else int(whole[0] / THIN**2))

    def _reaching(
        self, index: Approximate, aim: float, sample_QD: Vectors, allowed_R: Mask | None, least: int
    ) -> tuple[int, float] | None:
        """The first effort that reaches the aim among some rows, and its recall."""
        k = min(AIM_K, len(self.keys_R) if allowed_R is None else int(np.count_nonzero(allowed_R)))
        right_QK = nearest_rows(self.space, sample_QD, self.rows_RW, allowed_R, k)[1]
        among = Selection(allowed_R)
        for effort in (effort for effort in index.efforts if effort >= least):
            found_QK = self._search(index, sample_QD, k, effort, among)[1]
            hits = [np.isin(right, found).mean() for right, found in zip(right_QK, found_QK, strict=True)]
            recall = float(np.mean(hits))
            if recall - SURE * float(np.std(hits)) / math.sqrt(len(hits)) >= aim:
                return effort, recall
        return None

    def _sample(self) -> Vectors:
        """Queries as rows yet to come would be: drawn from a normal distribution that has the spread of near rows.

        A row itself, or what lies between rows, is found too easily.
        """
        random, count = np.random.default_rng(0), len(self.rows_RW)
        chosen = np.sort(random.choice(count, min(SAMPLES, count), replace=False))
        rows_QD = np.ascontiguousarray(self.rows_RW[chosen, : self.dim])
        near_QN = nearest_rows(self.space, rows_QD, self.rows_RW, None, min(NEAR, count))[1]
        near_QND = self.rows_RW[near_QN, : self.dim]
        centre_Q1D = near_QND.mean(axis=1, keepdims=True)
        weight_Q1N = random.normal(scale=near_QN.shape[1] ** -0.5, size=(len(chosen), 1, near_QN.shape[1]))
        drawn_QD = (centre_Q1D + weight_Q1N @ (near_QND - centre_Q1D))[:, 0]
        return self.space.normalise(np.ascontiguousarray(drawn_QD, np.float32))

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return int(self.rows_RW.shape[1]) - (self.space.width(1) - 1)


def merged(segments: Sequence[Segment]) -> Segment:
    """One segment of the rows of several that are not dead now."""
    alive = [one.alive_R.copy() for one in segments]
    rows_RW, keys_R, slots_R, served_R = (
        np.concatenate([getattr(one, name)[alive_R] for one, alive_R in zip(segments, alive, strict=True)])
        for name in ("rows_RW", "keys_R", "slots_R", "served_R")
    )
    return Segment(segments[0].space, rows_RW, keys_R, slots_R, served_R)
