"""`RemoteSearch`: search a remote collection for valid rows, deeper until enough are found, or restricted to keys.

A candidate is valid if its vector has the digest of its key in `RemoteRows`. If too many are invalid, the engine is
asked for more candidates, or to compare every allowed row. Scores are computed in this process, from the vectors of the
candidates.

Shape suffixes: Q queries, K results wanted, C candidates, N keys, D dimension, R remote rows, S slots, A allowed rows,
P a part of them, G valid candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from index.engines.base import MISSING, Hits, Keys, Scanned, is_full
from index.engines.digest import digests
from index.engines.exact import nearest_rows
from index.engines.remote.answers import Answer, Answers, Unanswered
from index.engines.remote.base import Candidates, Collection, EngineUnavailable
from index.engines.remote.rows import RemoteRows
from index.retry import GalleryChanged, may_retry_within
from index.scan import Mask, Rows
from index.space import Lorentz, Space, Vectors

EXTRA_CANDIDATES, OVERSAMPLING, DEPTH_FACTOR = 8, 1.2, 4
"""Candidates beyond the expected number, as a number and a factor; and the factor of the next, deeper search."""
MAX_RESTRICTED_SHARE = 0.5
"""A search is restricted to keys if at most this share of the rows is allowed."""
MAX_APPROXIMATE_SHARE = 0.5
"""If more than this share of the rows is wanted, every row is compared: a graph would be searched completely."""
PATIENCE_SECONDS = 1.0
"""How long a request is retried if the engine has other rows than this process; the change feed is usually faster."""


GalleryQuery = Callable[..., Answer]
"""`Answers.search`, or a search that waits for the engine."""


class _Request(NamedTuple):
    """A search: queries in both layouts, results wanted, the live rows, exact or not, and the search function."""

    queries_QD: Vectors
    queries_QW: Vectors
    k: int
    live_R: Mask
    exact: bool
    ask: GalleryQuery


class _Valid(NamedTuple):
    """The valid candidates of one query: their rows in `RemoteRows`, their vectors, and whether they suffice."""

    at_G: Rows
    rows_GW: Vectors
    enough: bool


class RemoteSearch:
    """Searches one collection; `rows` holds its valid rows."""

    def __init__(self, collection: Collection, rows: RemoteRows, dim: int, space: Space) -> None:
        self._collection, self._rows, self._dim, self._space = collection, rows, dim, space

    def search(
        self, queries_QD: Vectors, k: int, allowed_S: Mask | None, *, exact: bool, answers: Answers | None = None
    ) -> Hits:
        """As `Shard.search`; `answers`: cached answers of the engine; None: wait for the engine.

        Raises:
            Unanswered: the engine must be asked first.
            EngineUnavailable: the engine does not answer.
            GalleryChanged: the engine has newer rows than this process.
        """
        # A graph over inner products of hyperboloid points misses a third of the nearest rows. FAISS's does too, but
        # its recall is measured, and then it is not used.
        exact = exact or isinstance(self._space, Lorentz)
        live_R = self._rows.live(allowed_S)
        allowed = int(np.count_nonzero(live_R))
        wanted = min(k, allowed)
        exact = exact or wanted > MAX_APPROXIMATE_SHARE * self._rows.row_count()
        scores_QK = np.zeros((len(queries_QD), k), np.float32)
        slots_QK = np.full((len(queries_QD), k), MISSING, np.int64)
        if not wanted or not len(queries_QD):
            return Hits(scores_QK, slots_QK, is_full(slots_QK), Scanned(), k)
        queries_QW = np.ascontiguousarray(self._space.queries(queries_QD), np.float32)
        ask = self._search_now if answers is None else partial(answers.search, self._collection, self._rows)
        asked = _Request(queries_QD, queries_QW, wanted, live_R, exact, ask)
        by_keys = (
            allowed <= self._collection.capabilities.max_keys
            and allowed <= MAX_RESTRICTED_SHARE * self._rows.row_count()
        )
        depth = self._depth(wanted, allowed)
        found = (
            {} if by_keys else dict(enumerate(self._search_deeper(asked, np.arange(len(queries_QD)), wanted, depth)))
        )
        left_Q = np.array([n for n in range(len(queries_QD)) if n not in found or not found[n].enough], np.int64)
        if len(left_Q):
            found |= zip(left_Q.tolist(), self._search_by_keys(asked, left_Q), strict=True)
        for query, valid in found.items():
            scores_1K, best_1K = self._nearest(asked, query, valid)
            scores_QK[query, : scores_1K.shape[1]] = scores_1K[0]
            slots_QK[query, : scores_1K.shape[1]] = self._rows.slots_R[valid.at_G[best_1K[0]]]
        how = Scanned(allowed) if by_keys or exact else Scanned(0, allowed, depth)
        return Hits(scores_QK, slots_QK, is_full(slots_QK), how, k)

    def _search_now(self, queries_QW: Vectors, c: int, *, min_candidates: int, **options: Any) -> Answer:
        return Answer(c, self._collection.search(queries_QW, c, **options))

    def _depth(self, wanted: int, allowed: int) -> int:
        """The number of candidates to ask for first, assuming that allowed rows are randomly distributed."""
        needed = math.ceil(OVERSAMPLING * wanted * self._rows.row_count() / allowed) + EXTRA_CANDIDATES
        return min(self._collection.capabilities.max_k, needed)

    def _search_by_keys(self, asked: _Request, left_Q: Rows) -> list[_Valid]:
        """The valid candidates of some queries; the engine compares every allowed row, `max_keys` per call."""
        keys_A, most = self._rows.keys_R[asked.live_R], self._collection.capabilities.max_keys
        gathered: list[list[_Valid]] = [[] for _ in left_Q]
        unanswered: Unanswered | None = None
        for start in range(0, len(keys_A), most):
            keys_P = keys_A[start : start + most]
            least = min(len(keys_P), asked.k)
            try:
                found = self._search_deeper(asked, left_Q, least, least + EXTRA_CANDIDATES, keys_P)
            except Unanswered as error:  # collect the questions of the other parts, too
                unanswered = error
                continue
            for parts, valid in zip(gathered, found, strict=True):
                if not valid.enough:
                    self._raise_disagreement(f"{least - len(valid.at_G)} rows or more are missing in it")
                parts.append(valid)
        if unanswered is not None:
            raise unanswered
        columns = (zip(*parts, strict=True) for parts in gathered)
        return [_Valid(np.concatenate(at), np.concatenate(rows), True) for at, rows, _ in columns]

    def _search_deeper(
        self, asked: _Request, queries_P: Rows, least: int, depth: int, keys_N: Keys | None = None
    ) -> list[_Valid]:
        """The valid candidates of some queries, searched deeper until they suffice or there are no more."""
        found: dict[int, _Valid] = {}
        left_Q, most = queries_P, self._collection.capabilities.max_k
        depth, deep = min(depth, most), min(least, most)
        while len(left_Q):
            answer = asked.ask(asked.queries_QW[left_Q], depth, min_candidates=deep, keys_N=keys_N, exact=asked.exact)
            candidates, again = answer.candidates, []
            for query, exhausted, (at_G, rows_GW) in zip(
                left_Q.tolist(),
                _is_exhausted(candidates, answer.depth),
                self._valid(candidates, asked.live_R),
                strict=True,
            ):
                valid = found[query] = _Valid(at_G, rows_GW, True)
                if len(at_G) < least or not (exhausted or self._is_sure(asked, query, valid)):
                    found[query] = _Valid(at_G, rows_GW, False)
                    again += [] if exhausted or answer.depth == most else [query]
            left_Q, depth = np.array(again, np.int64), min(DEPTH_FACTOR * answer.depth, most)
            deep = depth
        return [found[query] for query in queries_P.tolist()]

    def _is_sure(self, asked: _Request, query: int, valid: _Valid) -> bool:
        """Whether no other row can be nearer; in a Lorentz space the engine's order is inexact."""
        if not isinstance(self._space, Lorentz):
            return True
        scores_1K, _ = self._nearest(asked, query, valid)
        last = float((valid.rows_GW @ asked.queries_QW[query]).min())
        return bool(self._space.nearest(asked.queries_QD[query], last) >= scores_1K[0, -1])

    def _nearest(self, asked: _Request, query: int, valid: _Valid) -> tuple[Vectors, Rows]:
        """Scores of the best candidates of a query (1, at most K), and their indices."""
        found = min(asked.k, len(valid.at_G))
        return nearest_rows(self._space, asked.queries_QD[query : query + 1], valid.rows_GW, None, found)

    def _valid(self, found: Candidates, live_R: Mask) -> list[tuple[Rows, Vectors]]:
        """The distinct valid candidates of each query: their rows in `RemoteRows`, and their vectors."""
        at_QC = self._rows.find(found.keys_QC.ravel()).reshape(found.keys_QC.shape)
        known_QC = at_QC != MISSING
        same_QC = np.zeros(at_QC.shape, np.bool_)
        same_QC[known_QC] = digests(found.rows_QCW[known_QC][:, : self._dim]) == self._rows.digests_R[at_QC[known_QC]]
        newer_QC = known_QC & ~same_QC & (found.seqs_QC > self._rows.seqs_R[at_QC])
        if newer_QC.any():
            self._raise_disagreement("it has newer rows than the database")
        good_QC = same_QC & live_R[at_QC]
        valid = []
        for good_C, at_C, rows_CW in zip(good_QC, at_QC, found.rows_QCW, strict=True):
            at_G, first_G = np.unique(at_C[good_C], return_index=True)
            valid.append((at_G, np.ascontiguousarray(rows_CW[good_C][first_G])))
        return valid

    def _raise_disagreement(self, how: str) -> None:
        """Raise: the engine has other rows than this process, usually from writes that the change feed will bring."""
        if may_retry_within(PATIENCE_SECONDS):
            raise GalleryChanged
        raise EngineUnavailable(f"the engine and the database disagree, {how}: run `regraft doctor --fix`")


def _is_exhausted(found: Candidates, depth: int) -> list[bool]:
    """Whether the engine has no more candidates, for each query."""
    if found.keys_QC.shape[1] < depth:
        return [True] * len(found.keys_QC)
    return [key == MISSING for key in found.keys_QC[:, -1].tolist()]
