"""index.gallery: one ranked list over shards, from one consistent view."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from index.engines.base import MISSING
from index.engines.config import IndexConfig, IndexKind
from index.engines.memory import segments
from index.engines.memory.job import Job
from index.engines.memory.segments import SegmentedShard
from index.errors import InvalidArgument, NoRoute
from index.gallery import Gallery
from index.metadata.filter import Filter, parse_filter
from index.metadata.metadata import Item, Metadata
from index.query.merge import Mode
from index.query.query_plan import GalleryQuery
from index.query.search_result import Missing
from index.retry import GalleryChanged
from index.space import Vectors
from index.version import Version
from naive import units
from staging.inputs.builders import always
from staging.states.small_segments import make_small

MakeVersion = Callable[..., Version]


def test_items_of_several_versions_come_back_as_one_list(gallery: Gallery) -> None:
    old, new = units(5, 4, 1), units(4, 6, 2)
    gallery.apply({("v1", "encoded"): (range(5), old), ("v3", "encoded"): (range(10, 14), new)})
    q = units(3, 6, 3)
    found = gallery.search("v3", always(q), 9)
    truncated = q[:, :4] / np.linalg.norm(q[:, :4], axis=1, keepdims=True)
    table = np.hstack([truncated @ old.T, q @ new.T])
    order = np.argsort(-table, axis=1)
    np.testing.assert_array_equal(found.keys_QK, np.r_[np.arange(5), np.arange(10, 14)][order])
    np.testing.assert_allclose(found.scores_QK, np.take_along_axis(table, order, 1), atol=1e-6)
    assert found.items_by_version == {"v1": 5, "v3": 4}
    assert found.degraded == ()
    for key, shard in zip(found.keys_QK.ravel(), found.shards_QK.ravel(), strict=True):
        route = found.shards[shard].route
        assert (route.item_version, route.kinds) == (("v1", ("truncate", "identity")) if key < 10 else ("v3", ()))


def test_a_moved_item_leaves_its_old_shard(gallery: Gallery) -> None:
    gallery.apply({("v1", "encoded"): ([1, 2], units(2, 4))})
    gallery.apply({("v2", "encoded"): ([2], units(1, 4, 5))})
    assert gallery.items_by_version() == {"v1": 1, "v2": 1}
    gallery.apply({("v2", "encoded"): ([1], units(1, 4, 6))}, removed=[2])
    assert gallery.items_by_version() == {"v2": 1}
    gallery.apply({}, removed=[1, 99])
    assert gallery.items_by_version() == {}


def test_applying_twice_changes_nothing(gallery: Gallery) -> None:
    change = {("v1", "encoded"): ([1, 2], units(2, 4)), ("v2", "encoded"): ([3], units(1, 4, 5))}
    answers = []
    for _ in range(2):
        gallery.apply(change, removed=[7])
        answers.append(gallery.search("v3", always(units(2, 6)), 3))
    assert answers[0].items_by_version == answers[1].items_by_version == {"v1": 2, "v2": 1}
    np.testing.assert_array_equal(answers[0].keys_QK, answers[1].keys_QK)


def test_an_empty_change_is_legal(gallery: Gallery) -> None:
    gallery.apply({("v1", "encoded"): ([], np.empty((0, 4), np.float32))})
    assert gallery.items_by_version() == {}


@pytest.mark.parametrize("k", [-1, 0])
def test_k_is_at_least_one_and_never_gives_more_than_there_is(gallery: Gallery, k: int) -> None:
    gallery.apply({("v1", "encoded"): ([1, 2], units(2, 4)), ("v3", "encoded"): ([3], units(1, 6))})
    with pytest.raises(InvalidArgument, match=f"k must be at least 1, not {k}") as caught:
        gallery.search("v3", always(units(1, 6)), k)
    assert caught.value.pointer == "/k"
    for legal in (1, 3, 4, 10**9):
        assert gallery.search("v3", always(units(1, 6)), legal).keys_QK.shape == (1, min(legal, 3))


@pytest.mark.parametrize("mode", [None, *Mode])
def test_an_empty_gallery_answers_that_nothing_matches(gallery: Gallery, mode: Mode | None) -> None:
    found = gallery.search("v3", always(units(2, 6)), 5, mode=mode, strict=True)
    assert (found.keys_QK.shape, found.degraded, found.shards) == ((2, 0), (), ())
    with pytest.raises(InvalidArgument, match="k must be at least 1"):
        gallery.search("v3", always(units(2, 6)), 0)


def test_items_without_a_vector_are_no_empty_gallery(gallery: Gallery) -> None:
    gallery.apply({}, removed=[7], missing={7: Missing("v1", "nothing of it can be searched", 3)})
    with pytest.raises(NoRoute, match="nothing of it can be searched"):
        gallery.search("v3", always(units(1, 6)), 1)
    gallery.apply({("v3", "encoded"): ([3], units(1, 6))})
    assert gallery.search("v3", always(units(1, 6)), 1).degraded[0].items == 1
    with pytest.raises(NoRoute, match="nothing of it can be searched"):
        gallery.search("v3", always(units(1, 6)), 1, strict=True)


def test_a_shard_without_a_route_is_reported_and_never_compared(gallery: Gallery) -> None:
    gallery.apply({("v1", "encoded"): ([1, 2], units(2, 4)), ("v3", "encoded"): ([3], units(1, 6))})
    found = gallery.search("v1", always(units(1, 4)), 3)
    assert [(d.version, d.items) for d in found.degraded] == [("v3", 1)]
    assert "'v1' to 'v3'" in found.degraded[0].reason
    np.testing.assert_array_equal(np.sort(found.keys_QK[0]), [MISSING, 1, 2])
    assert gallery.needed_encoders("v1", frozenset()) == {"v1"}
    assert gallery.needed_encoders("v1", frozenset({"v3"})) == {"v1", "v3"}
    with pytest.raises(NoRoute, match="no edge leads from version 'v1' to 'v3'"):
        gallery.search("v1", always(units(1, 4)), 3, strict=True)


def test_nothing_reachable_is_an_error_also_when_not_strict(gallery: Gallery) -> None:
    gallery.apply({("v3", "encoded"): ([3], units(1, 6))})
    with pytest.raises(NoRoute):
        gallery.search("v1", always(units(1, 4)), 1)


def test_dual_asks_the_other_encoder_only_where_it_is_needed(gallery: Gallery) -> None:
    asked = []
    by_version = {"v1": units(1, 4, 1), "v2": units(1, 4, 2), "v3": units(1, 6, 3)}

    def encode(version: str) -> Vectors:
        asked.append(version)
        return by_version[version]

    new = units(3, 6, 9)
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
    gallery.apply({("v1", "encoded"): ([1], units(1, 4))})
    asked = []

    def encode(version: str) -> Vectors:
        asked.append(version)
        if len(asked) == 1:
            gallery.apply({("v3", "encoded"): ([1], units(1, 6))})
        return units(1, {"v1": 4, "v3": 6}[version])

    found = gallery.search("v1", encode, 1, encoders=frozenset({"v1", "v3"}))
    assert found.keys_QK.tolist() == [[1]]
    assert asked == ["v1", "v3"]
    assert found.items_by_version == {"v3": 1}


def test_declaring_a_version_again_replaces_its_edges(gallery: Gallery, chain: dict[str, Version]) -> None:
    gallery.apply({("v1", "encoded"): ([1], units(1, 4))})
    gallery.declare(chain["v2"])
    assert gallery.search("v3", always(units(1, 6)), 1).shards[0].route.kinds == ("truncate", "identity")


def empty(gallery: Gallery, folder: Path) -> Gallery:
    """Another one of the same versions, whose segments are kept."""
    made = Gallery(folder=folder)
    for version in gallery._topology.versions.values():
        made.declare(version)
    return made


BUILT = 6

V1, ENCODED, MOVED = ("v1", "encoded"), ("v2", "encoded"), ("v2", "transformed")


@pytest.mark.parametrize("sealed", [False, True])
def test_a_moving_item_is_found_exactly_once(
    gallery: Gallery,
    background: Callable[[Callable[[], None]], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sealed: bool,
) -> None:
    """Items jump between three shards while others come and go; every answer holds each lasting item once.

    `sealed`: and segments of them are built, merged, written down and swapped in meanwhile, for one index or another.
    """
    if sealed:
        make_small(monkeypatch.setattr)
        gallery = empty(gallery, tmp_path)
    generator = np.random.default_rng(0)
    vectors = {"v1": units(40, 4), "v2": units(40, 4), "v3": units(40, 6)}
    gallery.apply({("v1", "encoded"): (range(40), vectors["v1"])})

    def move() -> None:
        chosen = generator.permutation(40)
        parts = dict(zip(vectors, np.split(chosen, np.sort(generator.integers(41, size=2))), strict=True))
        gallery.apply(
            {(version, "encoded"): (keys.tolist(), vectors[version][keys]) for version, keys in parts.items()}
        )

    def come_and_go() -> None:
        gallery.apply({("v2", "encoded"): ([100, 101, 102], vectors["v2"][:3])})
        gallery.apply({}, removed=[100, 101, 102])

    kinds, built = cycle([IndexKind.HNSW, IndexKind.IVF, IndexKind.EXACT]), [0]

    def build() -> None:
        gallery.configure(IndexConfig(kind=next(kinds)))
        while gallery.build_index():
            built[0] += 1

    background(move)
    background(come_and_go)
    if sealed:
        background(build)
    mixes: set[tuple[tuple[str, int], ...]] = set()
    asked = 0
    while asked < 60 or ((len(mixes) < 2 or (sealed and built[0] < BUILT)) and asked < 20_000):
        asked += 1
        found = gallery.search("v3", always(units(2, 6)), 40)
        items = sum(found.items_by_version.values())
        mixes.add(tuple(sorted(found.items_by_version.items())))
        assert items in {40, 43}
        for row in found.keys_QK:
            assert len(set(row)) == 40
            if items == 40:
                assert set(row) == set(range(40))
    assert sum(gallery.items_by_version().values()) in {40, 43}
    assert len(mixes) > 1, "nothing moved during the test"
    assert built[0] >= BUILT or not sealed, "nothing was built"


@pytest.mark.parametrize("step", [(Metadata, "diff"), (SegmentedShard, "reserve"), (Job, "remove_replaced")])
def test_queries_go_on_while_a_change_is_worked_out(
    step: tuple[type, str], gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery.configure(IndexConfig(kind=IndexKind.HNSW))
    gallery.apply({V1: (range(4), units(4, 4))})
    found = []

    def ask() -> None:
        found.append(gallery.search("v1", always(units(1, 4)), 9).keys_QK.shape[1])

    def beside(self: object, *args: object) -> object:
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "a query waits"
        return work(self, *args)

    work = getattr(*step)
    monkeypatch.setattr(*step, beside)
    monkeypatch.setattr(segments, "SEAL_ROWS", 5)
    gallery.apply({V1: (range(2, 8), units(6, 4, 1))})
    gallery.build_index()
    assert found
    assert set(found) <= {4, 8}


def test_nothing_is_left_to_work_out_for_the_first_query_after_a_write(gallery: Gallery) -> None:
    assert gallery.rows_scanned("v1") == 0
    gallery.apply({V1: (range(4), units(4, 4))}, missing={9: Missing("v1", "why", 1)})
    assert gallery.rows_scanned("v1") == 4
    gallery.apply({V1: ([9], units(1, 4))}, removed=[0, 1])
    assert gallery.rows_scanned("v1") == 3
    assert gallery.search("v1", always(units(1, 4)), 9).degraded == ()
    gallery.apply({ENCODED: ([2], units(1, 4))})
    assert gallery.rows_scanned("v1") == math.inf


def test_a_filter_restricts_every_shard_in_every_mode(gallery: Gallery) -> None:
    items = {key: Item(json.dumps({"even": key % 2 == 0, "n": key})) for key in range(12)}
    gallery.apply(
        {V1: (range(6), units(6, 4)), ENCODED: (range(6, 9), units(3, 4, 1)), MOVED: (range(9, 12), units(3, 4, 2))},
        items=items,
    )
    q = always(units(2, 4, 9))
    even, none = parse_filter({"field": "even", "eq": True}), parse_filter({"field": "n", "eq": -1})
    for mode in ("raw", "rank"):
        everything = gallery.search("v2", q, 12, mode=mode)
        found = gallery.search("v2", q, 12, mode=mode, filter=even)
        assert (found.keys_QK[:, 6:] == MISSING).all()
        if mode == "raw":
            expected = [[key for key in row if key % 2 == 0] for row in everything.keys_QK.tolist()]
            assert found.keys_QK[:, :6].tolist() == expected
        assert (np.sort(found.keys_QK[:, :6], axis=1) == np.arange(0, 12, 2)).all()
        assert (gallery.search("v2", q, 3, mode=mode, filter=none).keys_QK == MISSING).all()
    assert found.items_by_version == {"v1": 6, "v2": 6}
    assert found.filter_seconds > 0 == everything.filter_seconds


def test_the_first_item_with_a_key_is_looked_through_while_nobody_reads(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    red, other = (parse_filter({"field": field, "eq": "red"}) for field in ("color", "size"))
    gallery.apply({V1: (range(4), units(4, 4))})
    assert (gallery.search("v1", always(units(1, 4)), 1, filter=other).keys_QK == MISSING).all()
    read, enter, readers = gallery._lock.read, Metadata.build_columns, []

    def written_meanwhile() -> object:
        """Between a query's look at the keys there are and its lock."""
        monkeypatch.setattr(gallery._lock, "read", read)
        gallery.apply({V1: ([1], units(1, 4))}, items={1: Item('{"color": "red"}')})
        return read()

    def entered(metadata: Metadata, where: Filter) -> None:
        readers.append(gallery._lock._readers)
        enter(metadata, where)

    monkeypatch.setattr(gallery._lock, "read", written_meanwhile)
    monkeypatch.setattr(Metadata, "build_columns", entered)
    assert gallery.search("v1", always(units(1, 4)), 1, filter=red).keys_QK.tolist() == [[1]]
    assert set(readers) == {0}


def test_metadata_stays_with_an_item_that_moves_and_goes_with_one_that_leaves(gallery: Gallery) -> None:
    def passing(filter_json: object) -> set[int]:
        found = gallery.search("v2", always(units(1, 4, 9)), 3, filter=parse_filter(filter_json))
        return set(found.keys_QK[0].tolist()) - {MISSING}

    red = {"field": "color", "eq": "red"}
    gallery.apply({V1: ([1, 2, 3], units(3, 4))}, items={1: Item('{"color": "red"}'), 2: Item('{"color": "blue"}')})
    assert passing(red) == {1}
    gallery.apply({ENCODED: ([1, 2, 3], units(3, 4))})
    assert passing(red) == {1}
    gallery.apply({ENCODED: ([2], units(1, 4))}, removed=[1], items={2: Item('{"color": "red"}')})
    assert passing(red) == {2}
    gallery.apply({V1: ([1], units(1, 4))})
    assert passing(red) == {2}
    assert passing({"field": "color", "exists": False}) == {1, 3}


def test_all_parts_of_a_question_are_answered_from_one_view(gallery: Gallery) -> None:
    def encode_late(version: str) -> Vectors:
        gallery.apply({V1: ([3], units(1, 4))}, items={3: Item(id="late", seq=3)}, seq=3)
        return units(1, 4, 9)

    gallery.apply({V1: ([1, 2], units(2, 4))}, items={1: Item(id="a", seq=1), 2: Item(id="b", seq=2)}, seq=2)
    answers = gallery.answer([("v1", GalleryQuery(always(units(1, 4, 9)), 3)), ("v1", GalleryQuery(encode_late, 3))])
    assert [(found.seq, found.items_by_version, len(found.items)) for found in answers] == [(3, {"v1": 3}, 3)] * 2


def test_an_item_that_asks_must_not_have_been_written_since(gallery: Gallery) -> None:
    def ask(**stored: int) -> list[str]:
        ask = GalleryQuery(always(units(1, 4, 9)), 2, stored={int(key[1:]): seq for key, seq in stored.items()})
        return sorted(item.id for item in gallery.answer([("v1", ask)])[0].items.values())

    gallery.apply({V1: ([1, 2], units(2, 4))}, items={1: Item(id="a", seq=1), 2: Item(id="b", seq=2)}, seq=2)
    assert ask(_1=1, _2=2) == ["a", "b"]
    gallery.apply({V1: ([1], units(1, 4))}, items={1: Item(id="a", seq=3)}, seq=3)
    gallery.apply({}, removed=[2], missing={2: Missing("v1", "lost", 4)}, seq=4)
    assert ask(_1=3, _2=4) == ["a"]
    for stale in ({"_1": 1}, {"_1": 4}, {"_2": 2}, {"_9": 1}):
        with pytest.raises(GalleryChanged):
            ask(**stale)
