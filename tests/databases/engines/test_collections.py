"""What every engine promises of a collection, and what `RemoteShard` makes of it: the fake, pgvector and Milvus."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

import numpy as np
import pytest

from index.engines.base import MISSING
from index.engines.config import IndexConfig, IndexKind
from index.engines.digest import digests
from index.engines.memory.flat import FlatShard
from index.engines.pgvector.engine import PgvectorEngine
from index.engines.remote.base import Capabilities, Collection, Engine, EngineUnavailable, Entries, Metric, keep_only
from index.engines.remote.shard import RemoteShard
from index.errors import InvalidArgument
from index.space import Cosine, Euclidean, Lorentz, Space
from staging.external.fake_engine import FakeEngine
from staging.together import together

DIM = 4
PLACE = ("v1", "encoded")
LIMITS = Capabilities(max_k=100, max_keys=50, max_rows=1_000, max_width=4_000)
SPACES: list[Space] = [Cosine(), Euclidean(), Lorentz()]


@pytest.fixture(scope="module")
def pgvector(postgres: Any) -> Iterator[PgvectorEngine]:
    if isinstance(postgres, str):
        pytest.skip(f"no PostgreSQL here: {postgres}")
    url = postgres.create()
    with closing(PgvectorEngine(url)) as engine:
        try:
            engine.check()
        except EngineUnavailable as error:
            pytest.skip(error.message)
        yield engine
    postgres.drop(url)


@pytest.fixture(params=["fake", "pgvector", "milvus", "milvus_elsewhere"])
def remote(request: pytest.FixtureRequest) -> Engine:
    return FakeEngine(limits=LIMITS) if request.param == "fake" else request.getfixturevalue(request.param)


@pytest.fixture
def collection(remote: Engine) -> Iterator[Collection]:
    made = remote.collection(uuid.uuid4().hex, PLACE, DIM, Metric.L2)
    yield made
    made.drop()


def rows(*starts: float) -> np.ndarray:
    return np.array([[start + n / 7 for n in range(DIM)] for start in starts], np.float32)


def put(collection: Collection, number: int, **starts: float) -> None:
    given_NW = rows(*starts.values())
    keys_N = np.array([int(key[1:]) for key in starts], np.int64)
    collection.upsert(Entries(keys_N, np.full(len(keys_N), number), digests(given_NW)), given_NW)


def there(collection: Collection) -> dict[int, int]:
    found = collection.listed(-1, 100)
    assert found.keys_N.tolist() == sorted(found.keys_N.tolist())
    return dict(zip(found.keys_N.tolist(), found.seqs_N.tolist(), strict=True))


def test_of_what_was_never_written_nothing_is_found(remote: Engine, collection: Collection) -> None:
    none = np.empty(0, np.int64)
    assert (collection.covered_seq(), collection.count(), there(collection)) == (0, 0, {})
    assert (collection.search(rows(1, 2), 3).keys_QC == MISSING).all()
    assert len(collection.entries(np.array([1])).keys_N) == len(collection.fetch(np.array([1]))[1]) == 0
    collection.delete(np.array([1]), np.array([1]))
    collection.upsert(Entries(none, none, none), rows()[:0].reshape(0, DIM))
    collection.drop()
    collection.set_covered_seq(7)
    assert collection.covered_seq() == 7


def test_a_number_noted_in_the_middle_of_a_load_is_no_higher_and_is_there_at_its_end(collection: Collection) -> None:
    put(collection, 5, k1=1, k2=2)
    collection.set_covered_seq(5, more=True)
    assert collection.covered_seq() <= 5
    put(collection, 9, k3=3)
    collection.set_covered_seq(9)

    assert collection.covered_seq() == 9
    assert collection.search(rows(2.9), 3).keys_QC.tolist() == [[3, 2, 1]]


def test_rows_come_back_bit_for_bit_nearest_first_with_their_numbers(collection: Collection) -> None:
    put(collection, 5, k1=0.1, k2=-2.5, k3=7e-9)
    found = collection.search(rows(0, -2), 5)

    assert found.keys_QC[:, :3].tolist() == [[3, 1, 2], [2, 3, 1]]
    assert (found.keys_QC[:, 3:] == MISSING).all()
    assert (found.seqs_QC[:, :3] == 5).all()
    np.testing.assert_array_equal(found.rows_QCW[0, :3], rows(7e-9, 0.1, -2.5))
    entries, fetched_NW = collection.fetch(np.array([2, 9]))
    assert (entries.keys_N.tolist(), entries.digests_N.tolist()) == ([2], digests(rows(-2.5)).tolist())
    np.testing.assert_array_equal(fetched_NW, rows(-2.5))


def test_the_row_with_the_higher_number_wins_in_whichever_order_they_come(collection: Collection) -> None:
    put(collection, 5, k1=1, k2=2)
    put(collection, 4, k1=9, k2=9, k3=3)
    put(collection, 6, k2=8)

    assert there(collection) == {1: 5, 2: 6, 3: 4}
    np.testing.assert_array_equal(np.sort(collection.fetch(np.array([1, 2, 3]))[1], axis=0), rows(1, 3, 8))
    collection.delete(np.array([1, 2, 3]), np.array([4, 6, 9]))
    assert there(collection) == {1: 5}
    put(collection, 7, k1=1)
    assert there(collection) == {1: 7}


def test_rows_of_other_keys_go_but_for_those_that_were_written_since_the_keys_were_read(collection: Collection) -> None:
    put(collection, 5, k1=1, k2=2)
    put(collection, 7, k3=3)
    keep_only(collection, np.array([1]), upto=6)
    assert there(collection) == {1: 5, 3: 7}


def test_a_search_among_keys_compares_each_of_them(collection: Collection) -> None:
    put(collection, 1, **{f"k{n}": n for n in range(40)})
    found = collection.search(rows(0, 39), 3, keys_N=np.array([7, 30, 99]))

    assert found.keys_QC.tolist() == [[7, 30, MISSING], [30, 7, MISSING]]
    assert collection.search(rows(0), 40, exact=True).keys_QC.tolist() == [list(range(40))]


@pytest.mark.parametrize("metric", list(Metric))
def test_of_equally_near_rows_those_of_lower_keys_come_first_where_all_are_compared(
    remote: Engine, metric: Metric
) -> None:
    """So pages, which are cut from lists of different lengths, hold each copy of an image once."""
    collection = remote.collection(uuid.uuid4().hex, PLACE, DIM, metric)
    start = {key: 3 if key % 9 == 4 else 1 if key % 5 == 0 else 2 for key in range(90)}  # two of three are copies
    order = sorted(start, key=lambda key: (-start[key], key))
    for keys in np.random.default_rng(0).permutation(90).reshape(3, 30).tolist():
        put(collection, 5, **{f"k{key}": start[key] for key in keys})

    for among in (90, 45):
        nearest = [key for key in order if key < among]
        for c in (1, 20, among // 2, among):
            restricted = {"exact": True} if among == 90 else {"keys_N": np.arange(among)}
            found = collection.search(rows(3.1), c, **restricted).keys_QC[0].tolist()
            assert sorted(found) == sorted(nearest[:c])
    collection.drop()


def test_collections_are_told_apart_and_dropped_alone(remote: Engine) -> None:
    galleries = [uuid.uuid4().hex for _ in range(2)]
    made = [remote.collection(name, (version, "encoded"), DIM, Metric.L2) for name in galleries for version in "ab"]
    for number, one in enumerate(made):
        put(one, 1, **{f"k{number}": 1})
        one.set_covered_seq(number)
    made[0].drop()

    assert [there(one) for one in made] == [{}, {1: 1}, {2: 1}, {3: 1}]
    assert [one.covered_seq() for one in made] == [0, 1, 2, 3]
    assert sorted(remote.places(galleries[1])) == [("a", "encoded"), ("b", "encoded")]
    remote.drop(galleries[1], ("a", "encoded"))
    assert remote.places(galleries[1]) == [("b", "encoded")]
    for one in made:
        one.drop()


def test_writers_at_once_lose_nothing(collection: Collection) -> None:
    def write(worker: int) -> None:
        for number in range(1, 6):
            put(collection, number, **{f"k{key}": worker + number for key in range(10)})

    together(4, write)

    assert there(collection) == dict.fromkeys(range(10), 5)


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
def test_a_shard_answers_as_a_scan_of_memory(remote: Engine, space: Space) -> None:
    random, count = np.random.default_rng(0), 120
    metric = Metric.INNER_PRODUCT if space.inner_product else Metric.L2
    collection = remote.collection(uuid.uuid4().hex, PLACE, space.width(DIM), metric)
    shard, twin = RemoteShard(DIM, space, IndexConfig(kind=IndexKind.PGVECTOR), collection), FlatShard(DIM, space)
    given_ND = space.normalise(random.normal(size=(count, DIM)).astype(np.float32))
    keys_N, seqs_N = np.arange(count), np.arange(1, count + 1)
    collection.upsert(Entries(keys_N, seqs_N, digests(given_ND)), space.items(given_ND))
    collection.set_covered_seq(count)
    given_ND[:10] = space.normalise(random.normal(size=(10, DIM)).astype(np.float32))  # written since
    for one in (shard, twin):
        one.upsert(keys_N, given_ND)
        one.delete(list(range(20, 30)))
    shard.settle(nullcontext, nullcontext, lambda slots: slots + 1)
    assert (shard.head.row_count(), shard.remote_rows.row_count()) == (10, count - 20)

    queries_QD = space.normalise(random.normal(size=(9, DIM)).astype(np.float32))
    for allowed in (None, random.random(count) < 0.5, np.arange(count) % 10 == 3):
        for k in (1, 10, 100):
            found, right = shard.search(queries_QD, k, allowed, exact=True), twin.search(queries_QD, k, allowed)
            np.testing.assert_array_equal(found.scores_QK, right.scores_QK)
            recall = (shard.search(queries_QD, k, allowed).slots_QK == right.slots_QK).mean()
            assert recall > 0.95
    collection.drop()


def test_rows_that_are_too_wide_are_refused(remote: Engine) -> None:
    if isinstance(remote, FakeEngine):
        return
    with pytest.raises(InvalidArgument, match="numbers"):
        remote.collection("g", PLACE, 32_769, Metric.L2)


@pytest.mark.parametrize("width", [2_000, 2_001, 4_000])
def test_wide_rows_come_back_bit_for_bit(pgvector: PgvectorEngine, width: int) -> None:
    collection = pgvector.collection(uuid.uuid4().hex, PLACE, width, Metric.INNER_PRODUCT)
    given_NW = Cosine().normalise(np.random.default_rng(0).normal(size=(8, width)).astype(np.float32))
    collection.upsert(Entries(np.arange(8), np.arange(8), digests(given_NW)), given_NW)
    found = collection.search(given_NW[3:4], 2)
    collection.drop()

    assert found.keys_QC[0, 0] == 3
    np.testing.assert_array_equal(found.rows_QCW[0, 0], given_NW[3])


def test_a_server_that_hangs_costs_its_time_limit_once_and_one_that_was_killed_loses_nothing(
    postgres: Any, pgvector: PgvectorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = (pgvector._searching, pgvector._reading)
    for connections in pools:
        monkeypatch.setattr(connections._breaker, "_rest_seconds", 0.2)
    collection = pgvector.collection(uuid.uuid4().hex, PLACE, DIM, Metric.L2)
    put(collection, 1, k1=1, k2=2)
    collection.search(rows(1), 2)
    collection.entries(np.array([1]))
    with monkeypatch.context() as patch:
        for connections, seconds in zip(pools, (0.4, 0.3), strict=True):
            patch.setattr(connections, "_seconds", seconds)
        postgres.freeze()
        try:
            for most, ask in (
                (2.0, lambda: collection.entries(np.array([1]))),  # as a load does
                (2.0, lambda: collection.search(rows(1), 2)),
                (0.1, lambda: collection.search(rows(1), 2)),
                (0.1, lambda: collection.search(rows(1), 2)),
            ):
                started = time.monotonic()
                with pytest.raises(EngineUnavailable):
                    ask()
                assert time.monotonic() - started < most
        finally:
            postgres.thaw()
    time.sleep(0.25)
    assert collection.search(rows(1), 2).keys_QC.tolist() == [[1, 2]]

    postgres.stop(signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        collection.search(rows(1), 2)
    postgres.start()
    time.sleep(0.25)
    assert there(collection) == {1: 1, 2: 1}
    assert collection.search(rows(2), 2).keys_QC.tolist() == [[2, 1]]
    collection.drop()
