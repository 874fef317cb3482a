"""What the live gallery answers to the probes, and what that is worth. Asks as queries do, a few at a time.

Shapes: Q queries, B one block of them, K places of a ranking.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, select

from index.engines.base import MISSING, Keys
from index.errors import InvalidArgument
from index.evaluation.measures import first_items, recall
from index.evaluation.metrics import Compared, mean_interval, retrieval_from_rankings
from index.filter import value_at
from index.space import Vectors
from index.version import Score
from service.registry.registry import LoadedVersion
from service.replica.loaded import LoadedGallery
from service.store.repository import STREAMED
from service.store.tables import item
from service.upgrades.curves.probes import FULL_RANKINGS, CurveIn, Probes
from service.upgrades.gates.relevance import live_keys, right_keys
from service.upgrades.gates.samples import as_text, read_entries

BLOCK_QUERIES = 64
BLOCK_SCORES = 1 << 19
"""Queries asked at once, and their scores: changes of the gallery wait for a block, and new queries for changes."""

UNKNOWN = -2
"""The code of a label that no item has; -1 is an item without label, or no item."""

NOTHING_RIGHT = "no item of the gallery has the label of any query, or is named as relevant to one"

Codes = NDArray[np.int64]
Rankings = Iterator[tuple[slice, Keys]]
"""Blocks of queries with the keys they find, (B, K)."""
Rest = Callable[[float], None]
"""Called between two blocks with the seconds the last one took: measuring takes half of the time at most."""


@dataclass(frozen=True)
class Worth:
    """A metric with its interval over the `queries` that counted."""

    score: Score
    queries: int


@dataclass(frozen=True)
class Judge:
    """How many items (Q,) are right for each query, itself left out, and which of those that a block of them found."""

    others: Codes
    relevant: Callable[[slice, Keys], NDArray[np.bool_]]


class Judging(Protocol):
    """What is right for queries at a moment."""

    def follow(self, connection: Connection) -> None:
        """Read what was written since the last time."""

    def judge(self, probes: Probes) -> Judge:
        """What is right for these queries now."""


class RelevantItems:
    """The live items that entries of an evaluation set name."""

    def __init__(self, gallery_id: int, evaluation_id: int) -> None:
        self._gallery_id = gallery_id
        self._evaluation_id = evaluation_id
        self._keys: dict[str, int] = {}

    def follow(self, connection: Connection) -> None:
        """Look which of them are there."""
        self._keys = live_keys(connection, self._gallery_id, read_entries(connection, self._evaluation_id, None))

    def judge(self, probes: Probes) -> Judge:
        """What is right for these queries now."""
        right_of = right_keys(probes.entries, self._keys)

        def relevant(rows: slice, keys: Keys) -> NDArray[np.bool_]:
            pairs = zip(keys, right_of[rows], strict=True)
            return np.stack([np.isin(found, right[right >= 0]) for found, right in pairs])

        return Judge((right_of >= 0).sum(axis=1), relevant)


class ItemLabels:
    """Which label each live item has, following the gallery's change feed from mark to mark."""

    def __init__(self, gallery_id: int, field: str) -> None:
        self._gallery_id = gallery_id
        self._field = field
        self._seq = 0
        self._vocabulary: dict[str, int] = {}
        self._code_of: dict[int, int] = {}
        self._table: tuple[Keys, Codes] | None = None

    def follow(self, connection: Connection) -> None:
        """Read what was written since the last time."""
        columns = (item.c.id, item.c.seq, item.c.deleted, item.c.metadata)
        changed = select(*columns).where(item.c.gallery_id == self._gallery_id, item.c.seq > self._seq)
        self._table = None
        for row in connection.execute(changed.order_by(item.c.seq), execution_options=STREAMED):
            value = None if row.deleted else value_at(row.metadata, self._field)
            self._seq = row.seq
            if value is None:
                self._code_of.pop(row.id, None)
            else:
                self._code_of[row.id] = self._vocabulary.setdefault(as_text(value), len(self._vocabulary))

    def of_items(self, keys: Keys) -> Codes:
        """(B, K) the code of each item's label, -1 where it has none."""
        if self._table is None:
            known, codes = np.array(sorted(self._code_of.items()), np.int64).reshape(-1, 2).T
            self._table = known, codes
        known, codes = self._table
        if not len(known):
            return np.full(keys.shape, -1, np.int64)
        at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        return np.where(known[at] == keys, codes[at], -1)

    def of_queries(self, probes: Probes) -> tuple[Codes, Codes]:
        """(Q,) the code of each query's label, and (Q,) how many other items have it."""
        codes = np.array([self._vocabulary.get(label, UNKNOWN) for label in probes.labels], np.int64)
        counts = Counter(self._code_of.values())
        itself = [int(key in self._code_of) for key in probes.keys.tolist()]
        others = [counts[code] - own for code, own in zip(codes.tolist(), itself, strict=True)]
        return codes, np.array(others, np.int64)

    def judge(self, probes: Probes) -> Judge:
        """What is right for these queries now."""
        codes, others = self.of_queries(probes)
        return Judge(others, lambda rows, keys: self.of_items(keys) == codes[rows, None])


def worth(
    live: LoadedGallery, target: LoadedVersion, probes: Probes, asked: CurveIn, judging: Judging | None, rest: Rest
) -> Worth:
    """What the metric is now, over the gallery that answers queries; `judging` where the metric needs it.

    Raises:
        InvalidArgument: no query has anything right to find.
    """
    depth = int(asked.measured.removeprefix("cmc@")) if asked.measured not in FULL_RANKINGS else None
    rankings = _rankings(live, target, probes, depth, rest)
    found = (
        _recalled(rankings, target, probes, asked.k)
        if judging is None
        else _found(rankings, asked, judging.judge(probes))
    )
    if not len(found):
        raise InvalidArgument(NOTHING_RIGHT, pointer="/label")
    return Worth(mean_interval(found, asked.seed), len(found))


def _found(rankings: Rankings, asked: CurveIn, judge: Judge) -> NDArray[np.float64]:
    """The metric of each query that has something right to find."""
    values, valid = [np.empty(0)], [np.empty(0, bool)]
    for rows, keys in rankings:
        judged = retrieval_from_rankings(judge.relevant(rows, keys), np.ones(len(keys), bool), judge.others[rows])
        values.append(judged.per_query(asked.measured))
        valid.append(judged.valid)
    found: NDArray[np.float64] = np.concatenate(values)[np.concatenate(valid)]
    return found


def _recalled(rankings: Rankings, target: LoadedVersion, probes: Probes, k: int) -> NDArray[np.float64]:
    """recall@k of each query: what it finds of the sampled items, against how the target alone would rank them.

    Raises:
        InvalidArgument: k or fewer of the sampled items are left.
    """
    vectors, space = probes.vectors[target.name], target.space
    truth = first_items(Compared(vectors, vectors, space), k, np.arange(len(probes)))
    values = []
    for rows, keys in rankings:
        others = np.isin(keys, probes.keys)
        first = np.take_along_axis(keys, np.argsort(~others, axis=1, kind="stable")[:, :k], axis=1)
        values.append(recall(first, probes.keys[truth[rows]]).per_query(f"recall@{k}"))
    return np.concatenate(values)


def _rankings(live: LoadedGallery, target: LoadedVersion, probes: Probes, depth: int | None, rest: Rest) -> Rankings:
    """What each query finds besides itself, a block at a time; `depth` None: every item."""
    items = sum(live.gallery.items_by_version().values())
    wanted = (items if depth is None else depth) + 1
    size = max(1, min(BLOCK_QUERIES, BLOCK_SCORES // max(items, 1)))
    for start in range(0, len(probes), size):
        rows, started = slice(start, start + size), time.perf_counter()
        keys = _ask(live, target, probes, rows, wanted)
        yield rows, _without_itself(keys, probes.keys[rows])[:, : wanted - 1]
        rest(time.perf_counter() - started)


def _ask(live: LoadedGallery, target: LoadedVersion, probes: Probes, rows: slice, k: int) -> Keys:
    def encode(version: str) -> Vectors:
        return probes.vectors[version][rows]

    return live.gallery.search(target.name, encode, k, encoders=frozenset(probes.vectors)).keys_QK


def _without_itself(keys: Keys, own: Keys) -> Keys:
    """The rankings without each query's own item, which goes to the end as a place that nothing holds."""
    itself = (keys == own[:, None]) & (keys != MISSING)
    return np.take_along_axis(np.where(itself, MISSING, keys), np.argsort(itself, 1, kind="stable"), axis=1)
