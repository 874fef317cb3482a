"""`FakeEngine`: collections in memory that guarantee only what an engine must (`index.engines.remote.base`).

Writes may be late, duplicated and out of order. Each feed number of a key has its own row until lower ones are removed,
which may be late too. A search that does not compare every row finds fewer rows than there are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import numpy as np

from index.engines.base import MISSING
from index.engines.remote.base import Candidates, Capabilities, EngineUnavailable, Entries, Metric
from index.version import ShardKey

LIMITS = Capabilities(max_k=16, max_keys=5, max_rows=3, max_width=100)


class FakeCollection:
    def __init__(self, width: int, metric: Metric, random: Random | None = None, limits: Capabilities = LIMITS) -> None:
        """`random`: decides which writes are late, duplicated and out of order; None: none."""
        self.capabilities, self.width, self.metric, self._random = limits, width, metric, random
        self.rows: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
        self.seq = 0
        self.away = False
        self.late: list[Callable[[], None]] = []

    def upsert(self, entries: Entries, rows_NW: np.ndarray) -> None:
        self._asked(len(entries.keys_N))
        assert rows_NW.shape == (len(entries.keys_N), self.width)
        assert rows_NW.dtype == np.float32
        assert len(set(entries.keys_N.tolist())) == len(entries.keys_N)
        for key, number, digest, row in zip(*map(np.ndarray.tolist, entries), rows_NW.copy(), strict=True):
            self._do(partial(self._put, key, number, digest, row))

    def delete(self, keys_N: np.ndarray, seqs_N: np.ndarray) -> None:
        self._asked(len(keys_N))
        for key, number in zip(keys_N.tolist(), seqs_N.tolist(), strict=True):
            self._do(partial(self._remove, key, number))

    def search(
        self, queries_QW: np.ndarray, c: int, *, keys_N: np.ndarray | None = None, exact: bool = False
    ) -> Candidates:
        self._asked(0 if keys_N is None else len(keys_N), most=self.capabilities.max_keys)
        assert 1 <= c <= self.capabilities.max_k
        if self._random is not None and keys_N is None and not exact:
            c = self._random.randint(1, c)
        among = [at for at in sorted(self.rows) if keys_N is None or at[0] in keys_N]
        found = Candidates(
            np.full((len(queries_QW), c), MISSING, np.int64),
            np.zeros((len(queries_QW), c), np.int64),
            np.zeros((len(queries_QW), c, self.width), np.float32),
        )
        for query, query_W in enumerate(queries_QW):
            if not among:
                break
            rows_RW = np.stack([self.rows[at][1] for at in among])
            near = self.metric is Metric.INNER_PRODUCT
            far_R = -(rows_RW @ query_W) if near else np.square(rows_RW - query_W).sum(axis=1)
            for place, row in enumerate(np.argsort(far_R, kind="stable")[:c]):
                found.keys_QC[query, place], found.seqs_QC[query, place] = among[row]
                found.rows_QCW[query, place] = rows_RW[row]
        return found

    def entries(self, keys_N: np.ndarray) -> Entries:
        self._asked(len(keys_N))
        wanted = set(keys_N.tolist())
        newest = {key: number for key, number in sorted(self.rows) if key in wanted}
        return _entries([(key, number, self.rows[key, number][0]) for key, number in newest.items()])

    def listed(self, after: int, limit: int) -> Entries:
        self._asked(limit)
        newest = [(key, number) for key, number in dict(sorted(self.rows)).items() if key > after]
        return _entries([(key, number, self.rows[key, number][0]) for key, number in newest[:limit]])

    def fetch(self, keys_N: np.ndarray) -> tuple[Entries, np.ndarray]:
        found = self.entries(keys_N)
        at = zip(found.keys_N.tolist(), found.seqs_N.tolist(), strict=True)
        return found, np.array([self.rows[one][1] for one in at], np.float32).reshape(-1, self.width)

    def covered_seq(self) -> int:
        self._asked(0)
        return self.seq

    def set_covered_seq(self, seq: int, *, more: bool = False) -> None:
        self._asked(0)
        self.seq = seq

    def count(self) -> int:
        self._asked(0)
        return len(self.rows)

    def drop(self) -> None:
        self._asked(0)
        self.rows, self.late, self.seq = {}, [], 0

    def deliver(self) -> None:
        """Apply some of the late writes, in any order; applied ones may be repeated."""
        assert self._random is not None
        for work in self._random.sample(self.late, self._random.randint(0, len(self.late))):
            work()
            if self._random.random() < 0.7:
                self.late.remove(work)

    def _asked(self, count: int, most: int | None = None) -> None:
        if self.away:
            raise EngineUnavailable
        assert count <= (self.capabilities.max_rows if most is None else most)

    def _do(self, work: Callable[[], None]) -> None:
        if self._random is None:
            work()
        else:
            self.late.append(work)

    def _put(self, key: int, number: int, digest: int, row: np.ndarray) -> None:
        self.rows[key, number] = digest, row
        self._do(partial(self._remove, key, number - 1))

    def _remove(self, key: int, number: int) -> None:
        for at in [at for at in self.rows if at[0] == key and at[1] <= number]:
            del self.rows[at]


class FakeEngine:
    """A server of these collections."""

    def __init__(self, random: Random | None = None, limits: Capabilities = LIMITS) -> None:
        self._random, self._limits = random, limits
        self.collections: dict[tuple[str, ShardKey], FakeCollection] = {}

    def collection(self, gallery: str, place: ShardKey, width: int, metric: Metric) -> FakeCollection:
        made = FakeCollection(width, metric, self._random, self._limits)
        return self.collections.setdefault((gallery, place), made)

    def places(self, gallery: str) -> list[ShardKey]:
        return [place for name, place in self.collections if name == gallery]

    def drop(self, gallery: str, place: ShardKey) -> None:
        self.collections.pop((gallery, place), None)

    def check(self) -> None:
        if any(one.away for one in self.collections.values()):
            raise EngineUnavailable

    def close(self) -> None:
        pass


def _entries(rows: list[tuple[int, int, int]]) -> Entries:
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    return Entries(*columns)
