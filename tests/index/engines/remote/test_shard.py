"""`RemoteShard` beside an engine that is late, double, out of order and away, compared with a scan of memory."""

from __future__ import annotations

import math
from contextlib import nullcontext
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index.engines.base import MISSING, Scanned
from index.engines.config import IndexConfig, IndexKind
from index.engines.digest import digests
from index.engines.memory.flat import FlatShard
from index.engines.remote import search as remote_search
from index.engines.remote.base import Capabilities, EngineUnavailable, Entries, Metric
from index.engines.remote.check import RecallCheck
from index.engines.remote.rows import RemoteRows
from index.engines.remote.search import RemoteSearch
from index.engines.remote.shard import RemoteShard
from index.retry import GalleryChanged
from index.space import Cosine, Euclidean, Lorentz, Space
from staging.external.fake_engine import FakeCollection

DIM, KEYS = 3, 6
SPACES: list[Space] = [Cosine(), Euclidean(), Lorentz()]

keys = st.sets(st.integers(0, KEYS - 1), max_size=4)
step = st.tuples(st.sampled_from(["upsert", "upsert", "touch", "delete", "serve", "away"]), keys)


def vectors(space: Space, numbers: Any) -> np.ndarray:
    """Of few different ones, so that some come back."""
    kinds = np.random.default_rng(0).normal(size=(7, DIM)).astype(np.float32)
    return space.normalise(kinds[np.asarray(numbers, np.int64) % 7])


def metric_of(space: Space) -> Metric:
    return Metric.INNER_PRODUCT if space.inner_product else Metric.L2


class Life:
    """A shard, its twin in memory, the collection, and whoever follows the feed into it."""

    def __init__(self, space: Space, random: Random | None) -> None:
        self.space, self.random = space, random
        self.collection = FakeCollection(space.width(DIM), metric_of(space), random)
        self.shard = RemoteShard(DIM, space, IndexConfig(kind=IndexKind.PGVECTOR), self.collection)
        self.twin = FlatShard(DIM, space)
        self.held: dict[int, np.ndarray] = {}
        self.seq, self.written = 0, dict.fromkeys(range(KEYS), 0)

    def upsert(self, some: list[int], numbers: Any = None) -> None:
        draw = self.random or Random(0)
        given_ND = vectors(self.space, [draw.randint(0, 6) for _ in some] if numbers is None else numbers)
        self._write(some)
        self.held.update(zip(some, given_ND, strict=True))
        slots = np.array([KEYS - key for key in some], np.int64)
        served = np.array([key % 3 > 0 for key in some], np.bool_)
        for one in (self.shard, self.twin):
            one.upsert(some, given_ND.copy(), slots, served)

    def touch(self, some: list[int]) -> None:
        """Other metadata: the same vector again, with another number."""
        some = [key for key in some if key in self.held]
        given_ND = np.array([self.held[key] for key in some], np.float32).reshape(-1, DIM)
        self._write(some)
        slots = np.array([KEYS - key for key in some], np.int64)
        for one in (self.shard, self.twin):
            one.upsert(some, given_ND, slots, np.ones(len(some), np.bool_))

    def delete(self, some: list[int]) -> None:
        self._write(some)
        for key in some:
            self.held.pop(key, None)
        for one in (self.shard, self.twin):
            one.delete(some)

    def serve(self, some: list[int]) -> None:
        served_S = np.array([KEYS - slot in some for slot in range(KEYS + 1)])
        for one in (self.shard, self.twin):
            one.serve(served_S)

    def follow(self, _: Any = None) -> None:
        """What the indexer does, killed anywhere: it begins again where the collection says."""
        due = sorted((number, key) for key, number in self.written.items() if number > self.collection.seq)
        for number, key in due[: None if self.random is None else self.random.randint(0, len(due))]:
            one, numbers = np.array([key]), np.array([number])
            if key in self.held:
                row_1D = self.held[key][None]
                self.collection.upsert(Entries(one, numbers, digests(row_1D)), self.space.items(row_1D))
            else:
                self.collection.delete(one, numbers)
            if self.random is None or self.random.random() < 0.5:
                self.collection.set_covered_seq(number)

    def deliver(self, _: Any = None) -> None:
        if self.random is not None:
            self.collection.deliver()

    def settle(self, _: Any = None) -> None:
        numbers = np.array([0, *(self.written[KEYS - slot] for slot in range(1, KEYS + 1))])
        self.shard.settle(nullcontext, nullcontext, lambda slots: numbers[slots])

    def away(self, _: Any = None) -> None:
        self.collection.away = True
        if self.shard.remote_rows.count():
            with pytest.raises(EngineUnavailable):
                self.shard.search(vectors(self.space, [0]), 1)
        self.collection.away = False

    def check(self, query: int, k: int, allowed: set[int], *, exact: bool) -> None:
        queries_QD = vectors(self.space, [query, query + 1])
        allowed_S = np.array([KEYS - slot in allowed for slot in range(KEYS + 1)]) if allowed else None
        found = self.shard.search(queries_QD, k, allowed_S, exact=exact)
        right = self.twin.search(queries_QD, k, allowed_S)
        every = self.twin.search(queries_QD, KEYS)
        np.testing.assert_array_equal(found.scores_QK, right.scores_QK)
        for query, slots_K in enumerate(found.slots_QK.tolist()):
            there = [slot for slot in slots_K if slot != MISSING]
            assert len(set(there)) == len(there) == np.count_nonzero(right.slots_QK[query] != MISSING)
            scores = dict(zip(every.slots_QK[query].tolist(), every.scores_QK[query].tolist(), strict=True))
            assert [scores[slot] for slot in there] == found.scores_QK[query, : len(there)].tolist()
        assert (self.shard.count(), self.shard.row_count()) == (self.twin.count(), self.twin.row_count())
        assert sorted(np.concatenate(self.shard.slots())) == sorted(np.concatenate(self.twin.slots()))

    def _write(self, some: list[int]) -> None:
        for key in some:
            self.seq += 1
            self.written[key] = self.seq


@given(
    steps=st.lists(step, max_size=16),
    space=st.sampled_from(SPACES),
    seed=st.integers(0, 2**16),
    k=st.integers(1, KEYS + 2),
    allowed=keys,
    exact=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_match_is_wrong_double_or_missing_however_writes_arrive(
    steps: list[tuple[str, set[int]]], space: Space, seed: int, k: int, allowed: set[int], exact: bool
) -> None:
    life = Life(space, Random(seed))
    for name, some in steps:
        getattr(life, name)(sorted(some))
        for work in (life.follow, life.deliver, life.settle):
            life.check(seed, k, allowed, exact=exact)
            work()
    life.check(seed, k, allowed, exact=exact)


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
def test_what_was_taken_is_forgotten_here_and_found_there(space: Space) -> None:
    life = Life(space, None)
    life.upsert(list(range(KEYS)), range(KEYS))
    life.follow()
    life.settle()

    assert (life.shard.head.row_count(), life.shard.remote_rows.row_count(), life.shard.indexed_count()) == (
        0,
        KEYS,
        life.twin.count(),
    )
    life.check(0, 5, set(), exact=False)
    np.testing.assert_array_equal(life.shard.fetch([3, 1]), life.twin.fetch([3, 1]))
    life.upsert([1], [4])
    life.touch([2])
    assert (life.shard.head.row_count(), life.shard.remote_rows.row_count()) == (1, KEYS - 1)
    life.check(0, 5, set(), exact=False)


def test_a_start_reads_no_vector_that_the_collection_has() -> None:
    life = Life(Cosine(), None)
    life.upsert(list(range(4)), range(4))
    life.follow()
    life.upsert([1], [6])
    held_N, seqs_N = np.arange(4), np.array([life.written[key] for key in range(4)])
    digests_N = digests(np.stack([life.held[key] for key in range(4)]))
    started = RemoteShard(DIM, Cosine(), IndexConfig(kind=IndexKind.PGVECTOR), life.collection)

    sealed_N = started.sealed(held_N, digests_N, seqs_N)
    assert sealed_N.tolist() == [True, False, True, True]
    columns = (held_N, digests_N, seqs_N, KEYS - held_N, np.ones(4, np.bool_))
    started.revive(*(column[sealed_N] for column in columns))
    assert (started.count(), started.search(vectors(Cosine(), [0]), 1).slots_QK.item()) == (3, KEYS)


def test_a_start_without_the_engine_reads_no_vector_and_answers_when_it_was_asked() -> None:
    life = Life(Cosine(), None)
    life.upsert(list(range(4)), range(4))
    life.follow()
    held_N, seqs_N = np.arange(4), np.arange(1, 5)
    digests_N = digests(np.stack([life.held[key] for key in range(4)]))
    started = RemoteShard(DIM, Cosine(), IndexConfig(kind=IndexKind.PGVECTOR), life.collection)
    life.collection.away = True

    assert started.sealed(held_N, digests_N, seqs_N).all()
    started.revive(held_N, digests_N, seqs_N, KEYS - held_N, np.ones(4, np.bool_))
    for away in (True, False):  # what it is to have was not asked
        life.collection.away = away
        with pytest.raises(EngineUnavailable):
            started.search(vectors(Cosine(), [0]), 1)
    assert not started.settle(nullcontext, nullcontext, lambda slots: slots)


def test_a_process_that_is_behind_the_engine_looks_again_and_one_that_stays_behind_says_so(monkeypatch: Any) -> None:
    life = Life(Cosine(), None)
    life.upsert([1, 2], [1, 2])
    life.follow()
    life.settle()
    newer_1D = vectors(Cosine(), [5])
    life.collection.upsert(Entries(np.array([1]), np.array([9]), digests(newer_1D)), newer_1D)

    with pytest.raises(GalleryChanged):
        life.shard.search(vectors(Cosine(), [1]), 2)
    monkeypatch.setattr(remote_search, "PATIENCE_SECONDS", -1.0)
    with pytest.raises(EngineUnavailable, match="doctor"):
        life.shard.search(vectors(Cosine(), [1]), 2)
    life.upsert([1], [5])
    life.check(5, 2, set(), exact=False)


def test_rows_that_the_engine_lost_are_told_and_not_left_out(monkeypatch: Any) -> None:
    monkeypatch.setattr(remote_search, "PATIENCE_SECONDS", -1.0)
    life = Life(Cosine(), None)
    life.upsert(list(range(KEYS)), range(KEYS))
    life.follow()
    life.settle()
    life.collection.drop()

    with pytest.raises(EngineUnavailable, match="missing in it"):
        life.shard.search(vectors(Cosine(), [1]), 2)


def test_among_few_keys_only_those_are_compared(monkeypatch: Any) -> None:
    life = Life(Cosine(), None)
    life.collection.capabilities = Capabilities(max_k=16, max_keys=5, max_rows=100, max_width=9)
    life.upsert(list(range(KEYS)), range(KEYS))
    life.follow()
    life.settle()
    asked: list[Any] = []
    search = life.collection.search
    monkeypatch.setattr(
        life.collection, "search", lambda *args, **how: asked.append(how["keys_N"]) or search(*args, **how)
    )
    life.check(0, 2, {1, 2}, exact=False)
    life.check(0, 2, set(range(KEYS)), exact=False)

    assert [None if keys_N is None else keys_N.tolist() for keys_N in asked] == [[1, 2], None]


def test_who_wants_most_of_the_rows_has_every_row_compared(monkeypatch: Any) -> None:
    life = Life(Cosine(), None)
    life.upsert(list(range(KEYS)), range(KEYS))
    life.follow()
    life.settle()
    asked: list[bool] = []
    search = life.collection.search
    monkeypatch.setattr(
        life.collection, "search", lambda *args, **how: asked.append(how["exact"]) or search(*args, **how)
    )
    for k in (KEYS // 2, KEYS // 2 + 1, KEYS):
        life.check(0, k, set(range(KEYS)), exact=False)

    assert asked == [False, True, True]


def test_items_that_came_and_went_leave_nothing_and_no_search_is_deeper_for_them() -> None:
    table, given = RemoteRows(), vectors(Cosine(), np.arange(40))
    limits = Capabilities(max_k=64, max_keys=1, max_rows=100, max_width=9)
    collection = FakeCollection(DIM, Metric.INNER_PRODUCT, None, limits)
    for day in range(20):
        keys_N = np.arange(40 * day, 40 * day + 40)
        table.add(keys_N, digests(given), keys_N, keys_N, np.ones(40, np.bool_))
        table.mark_dead(keys_N - 40)
    assert (table.row_count(), len(table.keys_R) <= 120) == (40, True)
    assert table.slots_R[table.find(keys_N)].tolist() == keys_N.tolist()

    table.mark_dead(keys_N[:30])
    collection.upsert(Entries(keys_N[30:], keys_N[30:], digests(given[30:])), given[30:])
    found = RemoteSearch(collection, table, DIM, Cosine()).search(given[30:31], 5, None, exact=False)
    assert found.scanned == Scanned(0, 10, math.ceil(remote_search.OVERSAMPLING * 5) + remote_search.EXTRA_CANDIDATES)


def test_rows_that_lay_here_leave_when_all_are_there_and_are_found_there(monkeypatch: Any) -> None:
    life = Life(Cosine(), None)
    life.collection.capabilities = Capabilities(max_k=64, max_keys=1, max_rows=100, max_width=9)
    life.upsert(list(range(KEYS)), range(KEYS))
    life.shard = RemoteShard.from_shard(life.shard, life.collection)
    life.upsert([5], [3])
    life.follow()
    life.collection.set_covered_seq(life.seq - 1)
    life.settle()
    assert life.shard.remote_rows.row_count() == 0  # not before it has them all
    life.collection.set_covered_seq(life.seq)
    with monkeypatch.context() as patch:
        patch.setattr(RecallCheck, "recall", lambda *_: 0.9)
        life.settle()
    assert life.shard.remote_rows.row_count() == 0  # nor where it finds less
    life.check(0, 3, set(), exact=False)
    life.shard._verify_after = 0.0
    life.settle()
    assert life.shard.remote_rows.row_count() == KEYS
    life.check(0, 3, set(), exact=False)


def test_a_row_of_an_earlier_write_is_not_taken_for_the_same_vector_written_again() -> None:
    life = Life(Cosine(), None)
    life.upsert([1, 2], [1, 2])
    life.follow()
    life.upsert([1], [4])
    life.upsert([1], [1])
    life.collection.set_covered_seq(life.seq)  # of the last two writes it has acknowledged both, and shows none yet
    life.settle()
    between_1D = vectors(Cosine(), [4])
    life.collection.upsert(Entries(np.array([1]), np.array([life.seq - 1]), digests(between_1D)), between_1D)

    assert life.shard.head.row_count() == 1
    life.check(1, 2, set(), exact=False)
