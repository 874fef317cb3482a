"""What the live gallery answers to the probes, and what that is worth. Asks as queries do, a few at a time.

Shapes: Q queries, B one block of them, K places of a ranking.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, select

from index.engines.base import MISSING, Keys
from index.errors import InvalidArgument
from index.evaluation.measures import first_items, recall
from index.evaluation.metrics import Compared, mean_interval, retrieval_from_rankings
from index.filter import value_at, value_text
from index.space import Vectors
from index.version import Score
from service.registry.registry import LoadedVersion
from service.replica.loaded import LoadedGallery
from service.store.repository import STREAMED
from service.store.tables import item
from service.upgrades.curves.probes import FULL_RANKINGS, CurveIn, Probes
from service.upgrades.gates.relevance import live_keys, right_keys
from service.upgrades.gates.samples import read_entries

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
    """Of a block of queries: how many items are right for each, itself left out, and which of those that they found."""

    others: Callable[[slice], Codes]
    relevant: Callable[[slice, Keys], NDArray[np.bool_]]


class Judging(Protocol):
    """What is right for queries at a moment."""

    def follow(self, connection: Connection) -> None:
        """Read what was written since the last time."""

    def catch_up(self, connection: Connection) -> None:
        """The same between two blocks, for the judge that there is: a block finds what was written while it waited."""

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

    def catch_up(self, connection: Connection) -> None:
        """Nothing: an item that was not there cannot be right, or it changes little."""

    def judge(self, probes: Probes) -> Judge:
        """What is right for these queries now."""
        right_of = right_keys(probes.entries, self._keys)

        def relevant(rows: slice, keys: Keys) -> NDArray[np.bool_]:
            pairs = zip(keys, right_of[rows], strict=True)
            return np.stack([np.isin(found, right[right >= 0]) for found, right in pairs])

        others = (right_of >= 0).sum(axis=1)
        return Judge(lambda rows: others[rows], relevant)


class ItemLabels:
    """Which label each live item has, following the gallery's change feed from mark to mark."""

    def __init__(self, gallery_id: int, field: str) -> None:
        self._gallery_id = gallery_id
        self._field = field
        self._seq = 0
        self._vocabulary: dict[str, int] = {}
        self._code_of: dict[int, int] = {}
        self._counts: Counter[int] = Counter()
        self._table = _sorted({})
        # Of what got another label since the table was made; what was deleted since keeps its label in the table.
        self._since: dict[int, int] = {}

    def follow(self, connection: Connection) -> None:
        """Read what was written since the last time."""
        self.catch_up(connection)
        self._table, self._since = _sorted(self._code_of), {}

    def catch_up(self, connection: Connection) -> None:
        """The same, in less time."""
        columns = (item.c.id, item.c.seq, item.c.deleted, item.c.metadata)
        changed = select(*columns).where(item.c.gallery_id == self._gallery_id, item.c.seq > self._seq)
        for row in connection.execute(changed.order_by(item.c.seq), execution_options=STREAMED):
            value = None if row.deleted else value_at(row.metadata, self._field)
            self._seq = row.seq
            if (before := self._code_of.pop(row.id, None)) is not None:
                self._counts[before] -= 1
            code = None
            if value is not None:
                code = self._vocabulary.setdefault(value_text(value), len(self._vocabulary))
                self._code_of[row.id] = code
                self._counts[code] += 1
            if not row.deleted and code != before:  # most were only moved
                self._since[row.id] = -1 if code is None else code

    def of_items(self, keys: Keys) -> Codes:
        """(B, K) the code of each item's label, -1 where it has none."""
        since, known = _looked_up(_sorted(self._since), keys), _looked_up(self._table, keys)
        return np.where(np.isin(keys, list(self._since)), since, known)

    def judge(self, probes: Probes) -> Judge:
        """What is right for these queries now."""
        labels, keys = probes.labels, probes.keys.tolist()

        def codes(rows: slice) -> Codes:
            return np.array([self._vocabulary.get(label, UNKNOWN) for label in labels[rows]], np.int64)

        def others(rows: slice) -> Codes:
            wanted = codes(rows).tolist()
            live = [self._counts[code] for code in wanted]
            itself = [self._code_of.get(key) == code for key, code in zip(keys[rows], wanted, strict=True)]
            return np.array(live, np.int64) - np.array(itself, np.int64)

        return Judge(others, lambda rows, found: self.of_items(found) == codes(rows)[:, None])


def _sorted(code_of: Mapping[int, int]) -> tuple[Keys, Codes]:
    known, codes = np.array(sorted(code_of.items()), np.int64).reshape(-1, 2).T
    return known, codes


def _looked_up(table: tuple[Keys, Codes], keys: Keys) -> Codes:
    """The codes of keys, -1 of those that the table lacks."""
    known, codes = table
    if not len(known):
        return np.full(keys.shape, -1, np.int64)
    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[at] == keys, codes[at], -1)


def worth(
    live: LoadedGallery,
    target: LoadedVersion,
    probes: Probes,
    asked: CurveIn,
    judging: Judging | None,
    rest: Rest,
    caught_up: Callable[[], None],
) -> Worth:
    """What the metric is now, over the gallery that answers queries; `judging` where the metric needs it.

    `caught_up`: has `judging` catch up; called with what each block found, before it is judged.

    Raises:
        InvalidArgument: no query has anything right to find.
    """
    depth = int(asked.measured.removeprefix("cmc@")) if asked.measured not in FULL_RANKINGS else None
    rankings = _rankings(live, target, probes, depth, rest)
    found = (
        _recalled(rankings, target, probes, asked.k)
        if judging is None
        else _found(rankings, asked, judging.judge(probes), caught_up)
    )
    if not len(found):
        raise InvalidArgument(NOTHING_RIGHT, pointer="/label")
    return Worth(mean_interval(found, asked.seed), len(found))


def _found(rankings: Rankings, asked: CurveIn, judge: Judge, caught_up: Callable[[], None]) -> NDArray[np.float64]:
    """The metric of each query that has something right to find."""
    values, valid = [np.empty(0)], [np.empty(0, bool)]
    for rows, keys in rankings:
        caught_up()
        relevant = judge.relevant(rows, keys)
        # What was found and then deleted is right, but not among what is there now.
        others = np.maximum(judge.others(rows), relevant.sum(axis=1))
        judged = retrieval_from_rankings(relevant, np.ones(len(keys), bool), others)
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
