"""Milvus as an engine beyond what every engine promises: its server away, its limits and names, half-made collections.

Against milvus-lite, which is another implementation of the server: test_collections.py runs against MILVUS_TEST_URI
as well.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pymilvus", reason="pymilvus is not installed")

from index.engines.digest import digests
from index.engines.milvus import engine as module
from index.engines.milvus.engine import MilvusCollection, MilvusEngine
from index.engines.milvus.table import row_id
from index.engines.remote import circuit_breaker
from index.engines.remote.base import EngineUnavailable, Entries, Metric
from index.errors import InvalidArgument, InvalidVector
from index.version import ShardKey
from staging.external.milvus import MilvusTestServer
from staging.waiting import until

PLACE: ShardKey = ("v1", "encoded")
DIM = 4


@pytest.fixture
def collection(milvus: MilvusEngine) -> Iterator[MilvusCollection]:
    made = milvus.collection(uuid.uuid4().hex, PLACE, DIM, Metric.L2)
    yield made
    made.drop()


@pytest.fixture
def client(milvus_server: MilvusTestServer) -> Iterator[Any]:
    from pymilvus import MilvusClient

    with closing(MilvusClient(milvus_server.uri, dedicated=True)) as made:
        yield made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker.CircuitBreaker.__init__, "__defaults__", (0.1,))


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


def put(collection: MilvusCollection, given_NW: np.ndarray, number: int = 1, first: int = 0) -> None:
    """Rows of consecutive keys, as many at a time as the collection takes."""
    most = collection.capabilities.max_rows
    for start in range(0, len(given_NW), most):
        part_NW = given_NW[start : start + most]
        keys_N = np.arange(len(part_NW)) + first + start
        collection.upsert(Entries(keys_N, np.full(len(part_NW), number), digests(part_NW)), part_NW)


def fails(collection: MilvusCollection, *, exact: bool = False) -> float:
    """Seconds that a search takes to fail."""
    started = time.monotonic()
    with pytest.raises(EngineUnavailable):
        collection.search(rows(1), 2, exact=exact)
    return time.monotonic() - started


def answers(collection: MilvusCollection) -> bool:
    try:
        collection.search(rows(1), 1)
    except EngineUnavailable:
        return False
    return True


def test_a_frozen_server_costs_its_time_limit_once_and_a_killed_one_loses_nothing(
    impatient: None, milvus_server: MilvusTestServer
) -> None:
    with closing(MilvusEngine(milvus_server.uri, seconds=0.5)) as engine:
        collection = engine.collection(uuid.uuid4().hex, PLACE, DIM, Metric.L2)
        put(collection, rows(50))
        collection.set_covered_seq(7)
        milvus_server.freeze()
        try:
            assert fails(collection) < 3
            assert fails(collection) < 0.1
            started = time.monotonic()
            with pytest.raises(EngineUnavailable):
                collection.entries(np.arange(3))  # as a load does
            assert time.monotonic() - started < 6
            time.sleep(0.1)
            assert fails(collection, exact=True) < 3
        finally:
            milvus_server.thaw()
        until(lambda: answers(collection))

        milvus_server.stop()
        assert fails(collection) < 3
        assert fails(collection) < 0.1
        milvus_server.start()
        until(lambda: answers(collection))
        assert (collection.count(), collection.covered_seq()) == (50, 7)
        np.testing.assert_array_equal(collection.fetch(np.arange(50))[1], rows(50))
        collection.drop()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_was_acknowledged_is_lost_to_kills_under_writes(
    impatient: None, tmp_path: Path, seed: int
) -> None:
    pytest.importorskip("milvus_lite", reason="milvus-lite is not installed")
    server, random = MilvusTestServer(tmp_path / "milvus"), Random(seed)
    # Of each key the numbers it may have: the last that was acknowledged, and those tried since.
    may: dict[int, list[int]] = {}
    gone: list[bool] = []

    def write(collection: MilvusCollection) -> None:
        number = 0
        while not gone:
            number += 1
            first, removes = random.randrange(500), random.random() < 0.2
            keys = range(first, first + 20)
            for key in keys:
                may.setdefault(key, [0]).append(0 if removes else number)
            try:
                if removes:
                    collection.delete(np.array(keys), np.full(20, number))
                else:
                    put(collection, rows(20, number), number, first)
            except EngineUnavailable:
                time.sleep(0.05)
                continue
            for key in keys:
                may[key] = may[key][-1:]

    with closing(MilvusEngine(server.uri, seconds=0.5)) as engine:
        collection = engine.collection("g", PLACE, DIM, Metric.L2)
        writer = threading.Thread(target=write, args=(collection,))
        writer.start()
        for _ in range(3):
            time.sleep(0.5 + random.random())
            server.stop()
            server.start()
        gone.append(True)
        writer.join()
        until(lambda: answers(collection))
        listed = collection.listed(-1, 1_000)
        server.stop()
    numbers = dict(zip(listed.keys_N.tolist(), listed.seqs_N.tolist(), strict=True))
    assert [key for key, some in may.items() if numbers.get(key, 0) not in some] == []
    assert not set(numbers) - set(may)


def test_a_collection_that_was_released_is_loaded_again(collection: MilvusCollection, client: Any) -> None:
    put(collection, rows(5))
    for ask in (lambda: collection.search(rows(1), 5).keys_QC, collection.covered_seq, collection.count):
        client.release_collection(collection.name)
        assert np.size(ask())
    client.release_collection(collection.name)
    put(collection, rows(1), 2)
    assert collection.entries(np.arange(9)).seqs_N.tolist() == [2, 1, 1, 1, 1]


def test_what_is_large_goes_in_parts(milvus: MilvusEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MESSAGE_BYTES", 20 * (4 * DIM + module.ROW_BYTES))
    collection = milvus.collection(uuid.uuid4().hex, PLACE, DIM, Metric.L2)
    given_NW = rows(130)
    put(collection, given_NW)
    queries_QW = rows(9, seed=1)
    right_QC = np.argsort(np.square(queries_QW[:, None] - given_NW).sum(axis=2), axis=1)[:, :7]

    assert collection.capabilities.max_rows == 20
    np.testing.assert_array_equal(collection.search(queries_QW, 7).keys_QC, right_QC)
    np.testing.assert_array_equal(collection.search(queries_QW, 7, exact=True).keys_QC, right_QC)
    assert collection.listed(2, 100).keys_N.tolist() == list(range(3, 103))
    assert len(collection.entries(np.arange(130)).keys_N) == 130
    np.testing.assert_array_equal(collection.fetch(np.arange(50))[1], given_NW[:50])
    collection.drop()


@pytest.mark.parametrize("width", [2, 128, 1_536, 32_768])
def test_no_message_is_larger_than_milvus_takes(milvus: MilvusEngine, width: int) -> None:
    limits = milvus.collection("g", PLACE, width, Metric.INNER_PRODUCT).capabilities
    assert 1 <= limits.max_rows * (4 * width + module.ROW_BYTES) <= 64 << 20
    assert limits.max_keys >= 1
    assert limits.max_k <= 16_384


@pytest.mark.parametrize(
    ("error", "given_NW"),
    [
        (InvalidVector, np.array([[1, 2, np.nan, 3]], np.float32)),
        (InvalidVector, np.array([[1, 2, np.inf, 3]], np.float32)),
        (InvalidArgument, np.zeros((1, DIM + 1), np.float32)),
        (InvalidArgument, np.zeros((4_097, DIM), np.float32)),
    ],
)
def test_what_milvus_would_refuse_or_take_by_mistake_is_refused_here(
    collection: MilvusCollection, error: type[Exception], given_NW: np.ndarray
) -> None:
    seqs_N = np.arange(len(given_NW))
    with pytest.raises(error):
        collection.upsert(Entries(seqs_N, seqs_N, seqs_N), given_NW)
    assert collection.count() == 0


@pytest.mark.slow
def test_any_names_become_names_that_milvus_takes_and_come_back(milvus: MilvusEngine) -> None:
    gallery = f"1 ü-{uuid.uuid4().hex}'\""
    places: list[ShardKey] = [
        ("a-b.c_d", "encoded"),
        ("a", "b__c"),
        ("9", "ü"),
        ("A" * 64, "x"),
        ("_" * 64, "transformed"),
    ]
    made = [milvus.collection(gallery, place, DIM, Metric.L2) for place in places]
    for one in made:
        one.set_covered_seq(3)

    assert sorted(milvus.places(gallery)) == sorted(places)
    assert milvus.places(gallery[:-1]) == []
    for one in made:
        assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,254}", one.name)
        one.drop()
    assert milvus.places(gallery) == []


def test_who_was_killed_while_making_a_collection_is_followed_by_who_ends_it(
    collection: MilvusCollection, client: Any
) -> None:
    put(collection, rows(1))
    client.release_collection(collection.name)
    client.drop_partition(collection.name, "rows")
    client.drop_partition(collection.name, "covers")
    client.drop_index(collection.name, "vector")

    assert (collection.count(), collection.covered_seq()) == (0, 0)
    put(collection, rows(3))
    collection.set_covered_seq(4)
    assert (collection.count(), collection.covered_seq()) == (3, 4)


def test_rows_that_a_killed_writer_left_double_do_no_harm_and_go(collection: MilvusCollection, client: Any) -> None:
    put(collection, rows(3), 5)
    older = {"id": row_id(1, 2), "key": 1, "number": 2, "digest": 0, "vector": np.ones(DIM, np.float32)}
    client.upsert(collection.name, [older], partition_name="rows")

    assert collection.count() == 4
    assert collection.entries(np.arange(3)).seqs_N.tolist() == [5, 5, 5]
    assert collection.listed(-1, 3).keys_N.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(collection.fetch(np.arange(3))[1], rows(3))
    put(collection, rows(1), 1, first=1)  # one that comes late
    assert collection.count() == 3
    assert collection.entries(np.arange(3)).seqs_N.tolist() == [5, 5, 5]


def test_an_engine_that_is_closed_leaves_no_thread(milvus_server: MilvusTestServer) -> None:
    before = set(threading.enumerate())
    engine = MilvusEngine(milvus_server.uri)
    engine.check()
    engine.close()
    engine.close()
    assert set(threading.enumerate()) == before


def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(EngineUnavailable, match="does not answer"):
        MilvusEngine("http://127.0.0.1:9").check()
