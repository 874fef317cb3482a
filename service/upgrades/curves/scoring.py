"""Search the loaded gallery with the probes, block by block, and compute the metric; start at `measure`.

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
from index.metadata.filter import value_at, value_text
from index.space import Vectors
from index.version import Score
from service.registry.loaded_version import LoadedVersion
from service.replica.loaded import LoadedGallery
from service.store.database.connections import STREAMED
from service.store.tables import item
from service.upgrades.curves.probes import FULL_RANKINGS, CurveIn, Probes
from service.upgrades.gates.relevance import live_keys, relevant_numbers
from service.upgrades.gates.samples import read_entries

BLOCK_QUERIES = 64
BLOCK_SCORES = 1 << 19
"""Most queries and scores of a block; small, since changes of the gallery wait for a block, and queries for them."""

UNKNOWN = -2
"""The code of a label that no item has; -1 stands for an item without label, or no item."""

NOTHING_RELEVANT = "no query has a relevant item in the gallery"

Codes = NDArray[np.int64]
Rankings = Iterator[tuple[slice, Keys]]
"""Blocks of queries: their rows, and the keys that they found (B, K)."""
Pause = Callable[[float], None]
"""Called after each block with the seconds it took, and waits as long: measuring pauses half of the time."""


@dataclass(frozen=True)
class Measurement:
    """A metric with its interval, over the `queries` that have something relevant to find."""

    score: Score
    queries: int


@dataclass(frozen=True)
class Relevance:
    """For a block of queries, how many other items are relevant to each, and which of the found items are."""

    others: Callable[[slice], Codes]
    relevant: Callable[[slice, Keys], NDArray[np.bool_]]


class GroundTruth(Protocol):
    """Which items are relevant to queries, kept up to date with the gallery."""

    def follow(self, connection: Connection) -> None:
        """Read the changes since the last call, before a mark is measured."""

    def catch_up(self, connection: Connection) -> None:
        """Update the `Relevance` in use by the changes that a block may have found already."""

    def relevance(self, probes: Probes) -> Relevance:
        """The items that are relevant to these queries now."""


class RelevantItems:
    """Relevance by the live items that entries of an evaluation set name."""

    def __init__(self, gallery_id: int, evaluation_id: int) -> None:
        self._gallery_id = gallery_id
        self._evaluation_id = evaluation_id
        self._keys: dict[str, int] = {}

    def follow(self, connection: Connection) -> None:
        """Read which of these items exist."""
        self._keys = live_keys(connection, self._gallery_id, read_entries(connection, self._evaluation_id, None))

    def catch_up(self, connection: Connection) -> None:
        """Do nothing: a named item that is added while a mark is measured changes little."""

    def relevance(self, probes: Probes) -> Relevance:
        """The items that are relevant to these queries now."""
        item_keys = relevant_numbers(probes.entries, self._keys)

        def relevant(rows: slice, keys: Keys) -> NDArray[np.bool_]:
            pairs = zip(keys, item_keys[rows], strict=True)
            return np.stack([np.isin(found, listed[listed >= 0]) for found, listed in pairs])

        others = (item_keys >= 0).sum(axis=1)
        return Relevance(lambda rows: others[rows], relevant)


class ItemLabels:
    """Relevance by the label of each live item, following the gallery's change feed from mark to mark."""

    def __init__(self, gallery_id: int, field: str) -> None:
        self._gallery_id = gallery_id
        self._field = field
        self._seq = 0
        self._vocabulary: dict[str, int] = {}
        self._code_of: dict[int, int] = {}
        self._counts: Counter[int] = Counter()
        self._table = _sorted({})
        # Items whose label changed since the table was built; deleted items keep their label in the table.
        self._since: dict[int, int] = {}

    def follow(self, connection: Connection) -> None:
        """Read the changes since the last call and rebuild the table."""
        self.catch_up(connection)
        self._table, self._since = _sorted(self._code_of), {}

    def catch_up(self, connection: Connection) -> None:
        """Read the changes since the last call, without rebuilding the table."""
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
            # Most were only moved, with the same label. One without a label may have been deleted and added again.
            if not row.deleted and (code is None or code != before):
                self._since[row.id] = -1 if code is None else code

    def of_items(self, keys: Keys) -> Codes:
        """(B, K) the code of each item's label, -1 where it has none."""
        since, known = _looked_up(_sorted(self._since), keys), _looked_up(self._table, keys)
        return np.where(np.isin(keys, list(self._since)), since, known)

    def relevance(self, probes: Probes) -> Relevance:
        """The items that are relevant to these queries now."""
        labels, keys = probes.labels, probes.keys.tolist()

        def codes(rows: slice) -> Codes:
            return np.array([self._vocabulary.get(label, UNKNOWN) for label in labels[rows]], np.int64)

        def others(rows: slice) -> Codes:
            wanted = codes(rows).tolist()
            live = [self._counts[code] for code in wanted]
            itself = [self._code_of.get(key) == code for key, code in zip(keys[rows], wanted, strict=True)]
            return np.array(live, np.int64) - np.array(itself, np.int64)

        return Relevance(others, lambda rows, found: self.of_items(found) == codes(rows)[:, None])


def _sorted(code_of: Mapping[int, int]) -> tuple[Keys, Codes]:
    known, codes = np.array(sorted(code_of.items()), np.int64).reshape(-1, 2).T
    return known, codes


def _looked_up(table: tuple[Keys, Codes], keys: Keys) -> Codes:
    """The codes of keys, -1 for keys that are not in the table."""
    known, codes = table
    if not len(known):
        return np.full(keys.shape, -1, np.int64)
    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[at] == keys, codes[at], -1)


def measure(
    loaded: LoadedGallery,
    target: LoadedVersion,
    probes: Probes,
    request: CurveIn,
    ground_truth: GroundTruth | None,
    pause: Pause,
    caught_up: Callable[[], None],
) -> Measurement:
    """Measure the metric on the loaded gallery; `ground_truth` None: against the target's own ranking.

    `caught_up` calls `ground_truth.catch_up`, after each block is searched and before its relevance is computed.

    Raises:
        InvalidArgument: no query has anything relevant to find.
    """
    depth = int(request.measured.removeprefix("cmc@")) if request.measured not in FULL_RANKINGS else None
    rankings = _rankings(loaded, target, probes, depth, pause)
    values = (
        _by_recall(rankings, target, probes, request.k)
        if ground_truth is None
        else _by_relevance(rankings, request, ground_truth.relevance(probes), caught_up)
    )
    if not len(values):
        raise InvalidArgument(NOTHING_RELEVANT, pointer="/label")
    return Measurement(mean_interval(values, request.seed), len(values))


def _by_relevance(
    rankings: Rankings, request: CurveIn, relevance: Relevance, caught_up: Callable[[], None]
) -> NDArray[np.float64]:
    """The metric of each query that has something relevant to find."""
    values, valid = [np.empty(0)], [np.empty(0, bool)]
    for rows, keys in rankings:
        caught_up()
        relevant = relevance.relevant(rows, keys)
        # An item that was deleted after it was found is relevant, but not counted in `others`.
        others = np.maximum(relevance.others(rows), relevant.sum(axis=1))
        judged = retrieval_from_rankings(relevant, np.ones(len(keys), bool), others)
        values.append(judged.per_query(request.measured))
        valid.append(judged.valid)
    found: NDArray[np.float64] = np.concatenate(values)[np.concatenate(valid)]
    return found


def _by_recall(rankings: Rankings, target: LoadedVersion, probes: Probes, k: int) -> NDArray[np.float64]:
    """recall@k of each query over the sampled items, against the ranking by the target version alone.

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


def _rankings(
    loaded: LoadedGallery, target: LoadedVersion, probes: Probes, depth: int | None, pause: Pause
) -> Rankings:
    """The ranking of each query without itself, in blocks; `depth` None: of every item."""
    items = sum(loaded.gallery.items_by_version().values())
    places = (items if depth is None else depth) + 1
    size = max(1, min(BLOCK_QUERIES, BLOCK_SCORES // max(items, 1)))
    for start in range(0, len(probes), size):
        rows, started = slice(start, start + size), time.perf_counter()
        keys = _ask(loaded, target, probes, rows, places)
        yield rows, _without_itself(keys, probes.keys[rows])[:, : places - 1]
        pause(time.perf_counter() - started)


def _ask(loaded: LoadedGallery, target: LoadedVersion, probes: Probes, rows: slice, k: int) -> Keys:
    def encode(version: str) -> Vectors:
        return probes.vectors[version][rows]

    return loaded.gallery.search(target.name, encode, k, encoders=frozenset(probes.vectors)).keys_QK


def _without_itself(keys: Keys, own: Keys) -> Keys:
    """The rankings without each query's own item, which becomes MISSING at the end."""
    itself = (keys == own[:, None]) & (keys != MISSING)
    return np.take_along_axis(np.where(itself, MISSING, keys), np.argsort(itself, 1, kind="stable"), axis=1)
