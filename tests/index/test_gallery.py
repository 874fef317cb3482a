"""index.gallery: one ranked list over shards, from one consistent view."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from index.errors import InvalidArgument, NoRoute
from index.gallery import Encode, Gallery
from index.lock import ReadWriteLock
from index.shard import MISSING
from index.space import Cosine, Vectors
from index.version import Version

MakeVersion = Callable[..., Version]


def unit(rows: int, dim: int, seed: int = 0) -> Vectors:
    return Cosine().normalise(np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32))


def always(queries: Vectors) -> Encode:
    return lambda version: queries


@pytest.fixture
def chain(make_version: MakeVersion, tmp_path: Path) -> dict[str, Version]:
    """v1 (4) <- v2 (4, identity) <- v3 (6, truncate)."""
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 4, edges=[(v1, "identity")])
    v3 = make_version(tmp_path / "v3", "v3", 6, edges=[(v2, "truncate")])
    return {"v1": v1, "v2": v2, "v3": v3}


@pytest.fixture
def gallery(chain: dict[str, Version]) -> Gallery:
    gallery = Gallery()
    for version in chain.values():
        gallery.declare(version)
    return gallery


def test_items_of_several_versions_come_back_as_one_list(gallery: Gallery) -> None:
    old, new = unit(5, 4, 1), unit(4, 6, 2)
    gallery.apply({("v1", "encoded"): (range(5), old), ("v3", "encoded"): (range(10, 14), new)})
    q = unit(3, 6, 3)
    found = gallery.search("v3", always(q), 9)
    truncated = q[:, :4] / np.linalg.norm(q[:, :4], axis=1, keepdims=True)
    table = np.hstack([truncated @ old.T, q @ new.T])
    order = np.argsort(-table, axis=1)
    np.testing.assert_array_equal(found.keys_QK, np.r_[np.arange(5), np.arange(10, 14)][order])
    np.testing.assert_allclose(found.scores_QK, np.take_along_axis(table, order, 1), atol=1e-6)
    assert found.mix == {"v1": 5, "v3": 4}
    assert found.degraded == ()
    for key, shard in zip(found.keys_QK.ravel(), found.shards_QK.ravel(), strict=True):
        route = found.shards[shard].route
        assert (route.item_version, route.kinds) == (("v1", ("truncate", "identity")) if key < 10 else ("v3", ()))


def test_a_moved_item_leaves_its_old_shard(gallery: Gallery) -> None:
    gallery.apply({("v1", "encoded"): ([1, 2], unit(2, 4))})
    gallery.apply({("v2", "encoded"): ([2], unit(1, 4, 5))})
    assert gallery.mix() == {"v1": 1, "v2": 1}
    gallery.apply({("v2", "encoded"): ([1], unit(1, 4, 6))}, removed=[2])
    assert gallery.mix() == {"v2": 1}
    gallery.apply({}, removed=[1, 99])
    assert gallery.mix() == {}


def test_applying_twice_changes_nothing(gallery: Gallery) -> None:
    change = {("v1", "encoded"): ([1, 2], unit(2, 4)), ("v2", "encoded"): ([3], unit(1, 4, 5))}
    answers = []
    for _ in range(2):
        gallery.apply(change, removed=[7])
        answers.append(gallery.search("v3", always(unit(2, 6)), 3))
    assert answers[0].mix == answers[1].mix == {"v1": 2, "v2": 1}
    np.testing.assert_array_equal(answers[0].keys_QK, answers[1].keys_QK)


def test_an_empty_change_is_legal(gallery: Gallery) -> None:
    gallery.apply({("v1", "encoded"): ([], np.empty((0, 4), np.float32))})
    assert gallery.mix() == {}


@pytest.mark.parametrize("k", [-1, 0, 4, 10**9])
def test_k_is_one_to_the_number_of_items(gallery: Gallery, k: int) -> None:
    gallery.apply({("v1", "encoded"): ([1, 2], unit(2, 4)), ("v3", "encoded"): ([3], unit(1, 6))})
    with pytest.raises(InvalidArgument, match=f"k is {k}, it must be 1 to 3") as caught:
        gallery.search("v3", always(unit(1, 6)), k)
    assert caught.value.pointer == "/k"
    for legal in (1, 3):
        assert gallery.search("v3", always(unit(1, 6)), legal).keys_QK.shape == (1, legal)


def test_an_empty_gallery_answers_no_k(gallery: Gallery) -> None:
    with pytest.raises(InvalidArgument, match="the gallery is empty"):
        gallery.search("v3", always(unit(1, 6)), 1)


def test_a_shard_without_a_route_is_reported_and_never_compared(gallery: Gallery) -> None:
    gallery.apply({("v1", "encoded"): ([1, 2], unit(2, 4)), ("v3", "encoded"): ([3], unit(1, 6))})
    found = gallery.search("v1", always(unit(1, 4)), 3)
    assert [(d.version, d.items) for d in found.degraded] == [("v3", 1)]
    assert "'v1' to 'v3'" in found.degraded[0].reason
    np.testing.assert_array_equal(np.sort(found.keys_QK[0]), [MISSING, 1, 2])
    assert gallery.unreachable("v1", frozenset()) == found.degraded
    assert gallery.unreachable("v1", frozenset({"v3"})) == ()
    with pytest.raises(NoRoute, match="no edge leads from version 'v1' to 'v3'"):
        gallery.search("v1", always(unit(1, 4)), 3, strict=True)


def test_nothing_reachable_is_an_error_also_when_not_strict(gallery: Gallery) -> None:
    gallery.apply({("v3", "encoded"): ([3], unit(1, 6))})
    with pytest.raises(NoRoute):
        gallery.search("v1", always(unit(1, 4)), 1)


def test_dual_asks_the_other_encoder_only_where_it_is_needed(gallery: Gallery) -> None:
    asked = []
    by_version = {"v1": unit(1, 4, 1), "v2": unit(1, 4, 2), "v3": unit(1, 6, 3)}

    def encode(version: str) -> Vectors:
        asked.append(version)
        return by_version[version]

    new = unit(3, 6, 9)
    gallery.apply({("v3", "encoded"): ([1, 2, 3], new)})
    found = gallery.search("v1", encode, 3, encoders=frozenset(by_version))
    assert asked == ["v3"]
    np.testing.assert_array_equal(found.keys_QK[0], np.argsort(-(by_version["v3"] @ new.T)[0]) + 1)
    assert found.shards[0].route.kinds == ("dual",)
    asked.clear()
    gallery.search("v3", encode, 3, encoders=frozenset(by_version))
    assert asked == ["v3"]


def test_an_item_that_moves_while_the_query_is_encoded_is_still_reached(gallery: Gallery) -> None:
    """The plan changes between encoding and scanning; the search encodes again for the new plan."""
    gallery.apply({("v1", "encoded"): ([1], unit(1, 4))})
    asked = []

    def encode(version: str) -> Vectors:
        asked.append(version)
        if len(asked) == 1:
            gallery.apply({("v3", "encoded"): ([1], unit(1, 6))})
        return unit(1, {"v1": 4, "v3": 6}[version])

    found = gallery.search("v1", encode, 1, encoders=frozenset({"v1", "v3"}))
    assert found.keys_QK.tolist() == [[1]]
    assert asked == ["v1", "v3"]
    assert found.mix == {"v3": 1}


def test_declaring_a_version_again_replaces_its_edges(gallery: Gallery, chain: dict[str, Version]) -> None:
    gallery.apply({("v1", "encoded"): ([1], unit(1, 4))})
    gallery.declare(chain["v2"])
    assert gallery.search("v3", always(unit(1, 6)), 1).shards[0].route.kinds == ("truncate", "identity")


@pytest.fixture
def background() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Repeats functions in threads until the test ends; what they raise fails the test."""
    stop, threads, failures = threading.Event(), [], []

    def run(function: Callable[[], None]) -> None:
        def loop() -> None:
            try:
                while not stop.is_set():
                    function()
            except BaseException as error:
                failures.append(error)

        threads.append(threading.Thread(target=loop))
        threads[-1].start()

    yield run
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not failures


def test_a_moving_item_is_found_exactly_once(
    gallery: Gallery, background: Callable[[Callable[[], None]], None]
) -> None:
    """Items jump between three shards while others come and go; every answer holds each lasting item once."""
    generator = np.random.default_rng(0)
    vectors = {"v1": unit(40, 4), "v2": unit(40, 4), "v3": unit(40, 6)}
    gallery.apply({("v1", "encoded"): (range(40), vectors["v1"])})

    def move() -> None:
        chosen = generator.permutation(40)
        parts = dict(zip(vectors, np.split(chosen, np.sort(generator.integers(41, size=2))), strict=True))
        gallery.apply({(version, "encoded"): (keys, vectors[version][keys]) for version, keys in parts.items()})

    def come_and_go() -> None:
        gallery.apply({("v2", "encoded"): ([100, 101, 102], vectors["v2"][:3])})
        gallery.apply({}, removed=[100, 101, 102])

    background(move)
    background(come_and_go)
    mixes = set()
    for _ in range(60):
        found = gallery.search("v3", always(unit(2, 6)), 40)
        items = sum(found.mix.values())
        mixes.add(tuple(sorted(found.mix.items())))
        assert items in {40, 43}
        for row in found.keys_QK:
            assert len(set(row)) == 40
            if items == 40:
                assert set(row) == set(range(40))
    assert sum(gallery.mix().values()) in {40, 43}
    assert len(mixes) > 1, "nothing moved during the test"


def test_readers_share_the_lock_and_writers_have_it_alone(
    background: Callable[[Callable[[], None]], None],
) -> None:
    lock, readers, both = ReadWriteLock(), threading.Barrier(2), threading.Event()
    state = {"writers": 0, "readers": 0}

    def read_together() -> None:
        if not both.is_set():
            with lock.read():
                readers.wait(10)  # passes only when both threads are inside
            both.set()
        with lock.read():
            assert state["writers"] == 0

    def write() -> None:
        both.wait(10)
        with lock.write():
            state["writers"] += 1
            assert state["writers"] == 1
            state["writers"] -= 1

    background(read_together)
    background(read_together)
    background(write)
    background(write)
    assert both.wait(10)
    for _ in range(200):
        with lock.write():
            assert state["writers"] == 0


def test_a_waiting_writer_goes_before_new_readers() -> None:
    lock, order = ReadWriteLock(), []
    first = lock.read()
    first.__enter__()

    def write() -> None:
        with lock.write():
            order.append("writer")

    def read() -> None:
        with lock.read():
            order.append("reader")

    writer = threading.Thread(target=write)
    writer.start()
    while not lock._writers_waiting:
        pass
    reader = threading.Thread(target=read)
    reader.start()
    reader.join(0.05)
    assert order == []
    first.__exit__(None, None, None)
    writer.join(10)
    reader.join(10)
    assert order == ["writer", "reader"]


def test_a_failing_writer_or_reader_releases_the_lock() -> None:
    lock = ReadWriteLock()
    for enter in (lock.write, lock.read):
        with pytest.raises(RuntimeError), enter():
            raise RuntimeError
    with lock.write(), pytest.raises(RuntimeError):
        raise RuntimeError
    with lock.read():
        pass
