"""Queries of a gallery whose vectors lie in an engine: it is asked for all collections at once, beside writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.engines.config import IndexConfig, IndexKind
from index.engines.digest import digests
from index.engines.remote import answers as remote_answers
from index.engines.remote import search as remote_search
from index.engines.remote.base import Capabilities, EngineUnavailable, Entries
from index.gallery import Gallery
from index.metadata.filter import parse_filter
from index.metadata.metadata import Item
from index.space import Cosine
from index.version import Card, Edge, EdgeKind, Score, Version
from naive import units
from staging.external.fake_engine import FakeCollection, FakeEngine
from staging.inputs.builders import always
from staging.states.small_shards import make_shards_small

DIM, ITEMS, K = 4, 24, 6
VERSIONS = ["v0", "v1", "v2"]
LIMITS = Capabilities(max_k=100, max_keys=50, max_rows=100, max_width=9)
VECTORS = Cosine().normalise(np.random.default_rng(0).normal(size=(ITEMS + 1, DIM)).astype(np.float32))
QUERY = VECTORS[:2]


class Remote:
    """A gallery in a fake engine: each item lies in one of three versions, and all of them lie there."""

    def __init__(self) -> None:
        self.engines = {kind: FakeEngine(limits=LIMITS) for kind in IndexKind if kind.is_remote}
        opened = lambda kind, *where: self.engines[kind].collection("g", *where)  # noqa: E731
        self.gallery = Gallery(IndexConfig(kind=IndexKind.PGVECTOR), open_collection=opened)
        edges = tuple(Edge("v0", name, EdgeKind.IDENTITY, {"cmc@1": Score(0.9, 0.8, 1.0)}) for name in VERSIONS[1:])
        for name in reversed(VERSIONS):
            card = Card(name, DIM, {"kind": "cosine"})
            self.gallery.declare(Version(card, Path(), edges if name == "v0" else ()))
        self.put(range(ITEMS))
        self.settle(range(ITEMS))

    def put(self, keys: Any) -> None:
        items = {key: Item(f'{{"n": {key}}}', f"i{key}", key + 1) for key in keys}
        placed = {
            (name, "encoded"): (mine := [key for key in keys if key % 3 == n], VECTORS[mine])
            for n, name in enumerate(VERSIONS)
        }
        self.gallery.apply({place: held for place, held in placed.items() if held[0]}, items=items, seq=max(keys) + 1)

    def settle(self, keys: Any) -> None:
        """Have them lie in the engine, and count there."""
        for n, name in enumerate(VERSIONS):
            mine = np.array([key for key in keys if key % 3 == n], np.int64)
            collection = self.collections[name]
            collection.upsert(Entries(mine, mine + 1, digests(VECTORS[mine])), VECTORS[mine])
            collection.set_covered_seq(ITEMS + 1)
        assert self.gallery.remote.settle()

    @property
    def collections(self) -> dict[str, FakeCollection]:
        return {place[0]: one for (_, place), one in self.engines[self.gallery.config.kind].collections.items()}

    def ask(self, **options: Any) -> list[list[int]]:
        found: list[list[int]] = self.gallery.search("v0", always(QUERY), K, mode="raw", **options).keys_QK.tolist()
        return found

    def before(self, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
        """Done before each search of a collection."""
        search = FakeCollection.search
        monkeypatch.setattr(FakeCollection, "search", lambda *given, **more: (work(), search(*given, **more))[1])


def best(items: int) -> list[list[int]]:
    order = np.argsort(-(QUERY @ VECTORS[:items].T), axis=1)[:, :K]
    return [row.tolist() for row in order]


@pytest.fixture
def remote() -> Remote:
    return Remote()


def test_the_collections_of_several_versions_are_asked_at_once(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(len(VERSIONS), timeout=10)  # nobody passes before all are there
    remote.before(monkeypatch, together.wait)

    assert {shard.remote_rows.row_count() for shard in remote.gallery.remote.shards().values()} == {ITEMS // 3}
    assert remote.ask() == best(ITEMS)


def test_three_slow_collections_take_as_long_as_one(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.before(monkeypatch, lambda: time.sleep(0.2))
    started = time.monotonic()
    assert remote.ask() == best(ITEMS)
    assert time.monotonic() - started < 0.4


def test_a_write_does_not_wait_for_an_engine_that_hangs_and_the_query_finds_what_it_wrote(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = threading.Event(), threading.Event()
    remote.before(monkeypatch, lambda: (asked.set(), answers.wait(10)))
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(remote.ask)
        assert asked.wait(10)
        remote.put([ITEMS])
        remote.gallery.apply({}, removed=[best(ITEMS)[0][1]])
        answers.set()
        found = asking.result()
    gone = best(ITEMS)[0][1]
    right = np.argsort(-(QUERY @ VECTORS.T), axis=1).tolist()
    assert found == [[key for key in row if key != gone][:K] for row in right]


def test_what_came_to_lie_there_while_the_engine_answered_is_asked_for_again(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that it would be neither among what lies here nor in the answer, which is older."""
    remote.put([ITEMS])
    search, times = FakeCollection.search, [0]

    def then_settled(*given: Any, **more: Any) -> Any:
        found = search(*given, **more)
        times[0] += 1
        if times[0] == len(VERSIONS):
            remote.settle([ITEMS])
        return found

    monkeypatch.setattr(FakeCollection, "search", then_settled)
    monkeypatch.setattr(remote_answers, "MAX_THREADS", 1)
    assert remote.ask() == best(ITEMS + 1)
    assert times[0] > len(VERSIONS)
    assert sum(shard.remote_rows.row_count() for shard in remote.gallery.remote.shards().values()) == ITEMS + 1


def test_rows_that_come_faster_than_the_engine_answers_end_in_an_answer(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [shard.remote_rows for shard in remote.gallery.remote.shards().values()]
    remote.before(monkeypatch, lambda: [setattr(one, "additions", one.additions + 1) for one in tables])

    assert remote.ask() == best(ITEMS)


@pytest.mark.parametrize("most", [ITEMS, ITEMS // 2])
def test_an_answer_is_good_however_many_rows_leave_while_the_engine_gives_it(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Which rows may be found, and how many candidates should do, is something else with every row that leaves."""
    where = parse_filter({"field": "n", "range": {"lt": most}}) if most < ITEMS else None
    leaving = iter(np.argsort(QUERY.sum(axis=0) @ VECTORS[:most].T).tolist())
    asked: list[int] = []
    remote.before(monkeypatch, lambda: (asked.append(next(leaving)), remote.gallery.apply({}, removed=asked)))

    found = remote.ask(filter=where)
    assert len(asked) == len(VERSIONS)
    right = np.argsort(-(QUERY @ VECTORS[:most].T), axis=1).tolist()
    assert found == [[key for key in row if key not in asked][:K] for row in right]


def test_of_collections_that_are_away_the_answer_says_so(remote: Remote) -> None:
    remote.collections["v1"].away = True

    found = remote.gallery.search("v0", always(QUERY), K, mode="raw", strict=False)
    assert [(one.version, one.items) for one in found.degraded] == [("v1", ITEMS // 3)]
    assert all(key % 3 != 1 for row in found.keys_QK.tolist() for key in row)
    with pytest.raises(EngineUnavailable):
        remote.ask(strict=True)


def test_a_gallery_moves_from_one_engine_to_another_while_it_serves(remote: Remote) -> None:
    remote.gallery.configure(IndexConfig(kind=IndexKind.MILVUS))
    assert remote.ask() == best(ITEMS)
    remote.put([ITEMS])
    assert remote.gallery.remote.settle()
    assert remote.ask() == best(ITEMS + 1)
    assert not any(shard.is_settled() for shard in remote.gallery.remote.shards().values())

    remote.engines[IndexKind.PGVECTOR].collections.clear()
    remote.settle(range(ITEMS + 1))
    shards = remote.gallery.remote.shards().values()
    assert {(shard.kind, shard.local_row_count()) for shard in shards} == {(IndexKind.MILVUS, 0)}
    assert all(shard.is_settled() for shard in shards)
    assert remote.ask() == best(ITEMS + 1)


@pytest.mark.parametrize("kind", [IndexKind.EXACT, IndexKind.MILVUS])
def test_rows_lost_by_an_engine_that_a_gallery_leaves_are_told_so_that_they_are_read_again(
    remote: Remote, kind: IndexKind
) -> None:
    remote.collections["v1"].drop()
    remote.gallery.configure(IndexConfig(kind=kind))
    assert not remote.gallery.remote.settle()


def test_segments_that_were_to_move_and_stay_after_all_keep_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shards_small(monkeypatch)
    gallery = Gallery(IndexConfig(kind=IndexKind.HNSW), tmp_path)
    gallery.declare(Version(Card("v1", DIM, {"kind": "cosine"}), Path()))
    gallery.apply({("v1", "encoded"): (range(100), units(100, DIM))}, current="v1")
    while gallery.build_index():
        pass
    before = sorted(tmp_path.rglob("*"))

    for kind in (IndexKind.PGVECTOR, IndexKind.HNSW):
        gallery.configure(IndexConfig(kind=kind))
    while gallery.build_index():
        pass
    assert before == sorted(tmp_path.rglob("*"))
    assert gallery.items_by_version() == {"v1": 100}


def test_a_request_that_an_engine_goes_on_contradicting_ends_however_others_fare(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_search, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(remote_search, "EXTRA_CANDIDATES", 0)
    newer, attempts = -VECTORS[:1], [0]
    remote.collections["v0"].upsert(Entries(np.array([0]), np.array([99]), digests(newer)), newer)

    def encode(_version: str) -> np.ndarray:
        """Before each attempt another request is answered, which does not meet that row."""
        attempts[0] += 1
        assert attempts[0] < 100
        remote.gallery.search("v0", always(VECTORS[:1]), 1, mode="raw", strict=True)
        return newer

    with pytest.raises(EngineUnavailable, match="newer rows"):
        remote.gallery.search("v0", encode, 1, mode="raw", strict=True)
    assert 2 < attempts[0] < 20
    assert [one.version for one in remote.gallery.search("v0", encode, 1, mode="raw").degraded] == ["v0"]
