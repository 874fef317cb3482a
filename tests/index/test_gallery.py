"""index.gallery: one ranked list over shards, from one consistent view."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from index.attempts import GalleryChanged
from index.calibration import Calibration
from index.engines.base import MISSING
from index.errors import InvalidArgument, InvalidVersionFolder, ModeUnavailable, NoRoute
from index.filter import parse_filter
from index.gallery import Gallery
from index.merge import Mode
from index.metadata import Item
from index.query_plan import Ask, Encode
from index.search_result import Missing
from index.space import Vectors
from index.transform import slerp
from index.version import Edge, EdgeKind, Version
from naive import units

MakeVersion = Callable[..., Version]


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
    with pytest.raises(InvalidArgument, match=f"k is {k}, it must be at least 1") as caught:
        gallery.search("v3", always(units(1, 6)), k)
    assert caught.value.pointer == "/k"
    for legal in (1, 3, 4, 10**9):
        assert gallery.search("v3", always(units(1, 6)), legal).keys_QK.shape == (1, min(legal, 3))


@pytest.mark.parametrize("mode", [None, *Mode])
def test_an_empty_gallery_answers_that_nothing_matches(gallery: Gallery, mode: Mode | None) -> None:
    found = gallery.search("v3", always(units(2, 6)), 5, mode=mode, strict=True)
    assert (found.keys_QK.shape, found.degraded, found.shards) == ((2, 0), (), ())
    with pytest.raises(InvalidArgument, match="k is 0"):
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
    assert gallery.unreachable("v1", frozenset()) == found.degraded
    assert gallery.unreachable("v1", frozenset({"v3"})) == ()
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


ENCODED, MOVED = ("v2", "encoded"), ("v2", "transformed")
V1 = ("v1", "encoded")
THROUGH = (("v2", "v1", "identity"),)


def calibration(slope: float, middle: float = 0.0) -> Calibration:
    return Calibration(np.array([middle]), np.array([0.5]), slope)


def test_items_of_several_origins_have_shards_of_their_own_and_are_counted_per_version(gallery: Gallery) -> None:
    gallery.apply({ENCODED: ([1, 2], units(2, 4)), MOVED: ([3], units(1, 4, 5))})
    found = gallery.search("v2", always(units(2, 4, 7)), 3)
    assert found.items_by_version == gallery.items_by_version() == {"v2": 3}
    assert [(s.version, s.origin, s.items, s.route.kinds) for s in found.shards] == [
        (*ENCODED, 2, ()),
        (*MOVED, 1, ()),
    ]
    origins = {1: "encoded", 2: "encoded", 3: "transformed"}
    for key, shard in zip(found.keys_QK.ravel(), found.shards_QK.ravel(), strict=True):
        assert found.shards[shard].origin == origins[key]


def test_an_item_encoded_again_leaves_the_shard_of_the_transformed(gallery: Gallery) -> None:
    gallery.apply({MOVED: ([1, 2], units(2, 4))})
    gallery.apply({ENCODED: ([1], units(1, 4))})
    found = gallery.search("v2", always(units(1, 4)), 2)
    assert {s.origin: s.items for s in found.shards} == {"encoded": 1, "transformed": 1}
    assert sorted(found.keys_QK[0]) == [1, 2]


def test_raw_mode_ranks_encoded_and_transformed_items_as_one_shard_would(gallery: Gallery) -> None:
    items, q = units(30, 4, 1), units(5, 4, 2)
    gallery.apply({ENCODED: (range(30), items)})
    together = gallery.search("v2", always(q), 30)
    gallery.apply({MOVED: (range(0, 30, 3), items[::3])})
    apart = gallery.search("v2", always(q), 30)
    assert apart.mode == together.mode == "raw"
    np.testing.assert_array_equal(apart.keys_QK, together.keys_QK)
    np.testing.assert_allclose(apart.scores_QK, together.scores_QK, atol=1e-6)


@pytest.fixture
def mixed(gallery: Gallery) -> Gallery:
    """Three items in v1, reached by identity, and three in v2."""
    gallery.apply({V1: ([1, 2, 3], units(3, 4)), ENCODED: ([4, 5, 6], units(3, 4, 5))})
    return gallery


def test_own_maps_rank_once_they_cover_every_shard(mixed: Gallery) -> None:
    q = always(units(2, 4, 9))
    assert mixed.search("v2", q, 6).mode == "raw"
    maps = {("v2", *V1, THROUGH): calibration(1.0), ("v2", *ENCODED, ()): calibration(1.0, 1e3)}
    mixed.calibrate({key: maps[key] for key in list(maps)[:1]})
    assert mixed.search("v2", q, 6).mode == "raw"
    mixed.calibrate(maps, {"v2": Mode.CALIBRATED})
    found = mixed.search("v2", q, 6)
    assert found.mode == "calibrated"
    # By its map no own item is right: all of v1 comes before.
    assert (found.keys_QK[:, :3] <= 3).all()
    assert (found.keys_QK[:, 3:] > 3).all()
    np.testing.assert_allclose(found.scores_QK[:, :3], 1 / (1 + np.exp(-found.raw_QK[:, :3])))
    assert [shard.calibration for shard in found.shards] == list(maps.values())
    assert [shard.calibration for shard in mixed.search("v2", q, 6, mode="raw").shards] == [None, None]
    mixed.apply({MOVED: ([7], units(1, 4, 3))})
    assert mixed.search("v2", q, 6).mode == "raw"


def test_what_was_measured_says_the_mode_and_a_rule_does_where_nothing_was(
    mixed: Gallery, chain: dict[str, Version]
) -> None:
    """Along an edge into the old space raw scores serve without evidence, though maps are there."""
    (edge,) = chain["v2"].edges
    maps = {"edge": calibration(5.0).as_json(), "own": calibration(6.0).as_json()}

    def mode() -> str:
        return mixed.search("v2", always(units(1, 4)), 6).mode

    mixed.add_edge(replace(edge, calibration=maps))
    assert mode() == "raw"
    mixed.add_edge(replace(edge, calibration={**maps, "mode": "calibrated"}))
    assert mode() == "calibrated"
    mixed.calibrate({}, {"v2": Mode.RANK, "v3": Mode.RAW})
    assert mode() == "rank"
    mixed.add_edge(replace(edge, calibration={**maps, "mode": "raw"}))
    assert mode() == "raw"  # what was measured went with the edge it was measured along


def test_a_map_of_another_route_is_never_used(mixed: Gallery) -> None:
    own = ("v2", *ENCODED, ())
    for other in (
        ("v2", "v1", "encoded", (("v2", "v1", "matrix"),)),
        ("v2", "v1", "transformed", THROUGH),
        ("v3", "v1", "encoded", THROUGH),
        ("v2", "v1", "encoded", ()),
    ):
        mixed.calibrate({own: calibration(1.0), other: calibration(1.0)})
        with pytest.raises(ModeUnavailable, match="some items have no calibration"):
            mixed.search("v2", always(units(1, 4)), 6, mode="calibrated")


def test_the_maps_of_edges_serve_where_the_gallery_has_no_complete_set(
    mixed: Gallery, chain: dict[str, Version]
) -> None:
    (edge,) = chain["v2"].edges
    maps = {"edge": calibration(5.0).as_json(), "own": calibration(6.0).as_json()}
    mixed.add_edge(replace(edge, calibration=maps))

    def used() -> list[float]:
        found = mixed.search("v2", always(units(1, 4)), 6, mode="calibrated")
        return [s.calibration.slope for s in found.shards if s.calibration]

    assert used() == [5.0, 6.0]
    mixed.calibrate({("v2", *ENCODED, ()): calibration(1.0)})
    assert used() == [5.0, 6.0]
    mixed.calibrate({("v2", *ENCODED, ()): calibration(1.0), ("v2", *V1, THROUGH): calibration(2.0)})
    assert used() == [2.0, 1.0]


def test_an_edge_whose_map_runs_against_its_space_is_refused(mixed: Gallery, chain: dict[str, Version]) -> None:
    (edge,) = chain["v2"].edges
    maps = {"edge": calibration(5.0).as_json(), "own": calibration(-6.0).as_json()}
    with pytest.raises(InvalidVersionFolder, match="own runs against its space"):
        mixed.add_edge(replace(edge, calibration=maps))
    assert mixed.search("v2", always(units(1, 4)), 6).mode == "raw"


def test_a_removed_edge_leaves_the_answer_degraded_and_never_wrong(mixed: Gallery) -> None:
    mixed.calibrate({("v2", *V1, THROUGH): calibration(1.0), ("v2", *ENCODED, ()): calibration(1.0)})
    mixed.remove_edge(("v2", "v1", "matrix"))  # there is none of this kind
    assert mixed.search("v2", always(units(1, 4)), 6).degraded == ()
    mixed.remove_edge(("v2", "v1", "identity"))
    found = mixed.search("v2", always(units(1, 4)), 6)
    assert [(d.version, d.items, d.reason) for d in found.degraded] == [
        ("v1", 3, "no edge leads from version 'v2' to 'v1'")
    ]
    assert found.mode == "calibrated"  # one shard, and its map is still there
    assert set(found.keys_QK[0]) == {4, 5, 6, MISSING}
    with pytest.raises(NoRoute):
        mixed.search("v2", always(units(1, 4)), 6, strict=True)


def test_the_gallerys_own_maps_go_with_the_edge_they_were_fitted_on(mixed: Gallery, chain: dict[str, Version]) -> None:
    (edge,) = chain["v2"].edges
    maps = {("v2", *V1, THROUGH): calibration(1.0), ("v2", *ENCODED, ()): calibration(1.0)}

    def mode() -> str:
        return mixed.search("v2", always(units(1, 4)), 6).mode

    mixed.calibrate(maps, {"v2": Mode.CALIBRATED})
    mixed.add_edge(edge)  # the very edge that is there
    assert mode() == "calibrated"
    mixed.add_edge(replace(edge, support=9))
    assert mode() == "raw"
    mixed.calibrate(maps, {"v2": Mode.CALIBRATED})
    assert mode() == "calibrated"
    mixed.remove_edge(edge.key)
    mixed.add_edge(edge)
    assert mode() == "raw"


def test_an_added_edge_opens_a_route_until_its_version_is_declared_without_it(
    gallery: Gallery, make_version: MakeVersion, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        gallery.declare(make_version(tmp_path / name, name, 4))
    gallery.apply({("a", "supplied"): ([1], units(1, 4))})
    with pytest.raises(NoRoute):
        gallery.search("b", always(units(1, 4)), 1)
    gallery.add_edge(Edge("b", "a", EdgeKind.IDENTITY))
    assert gallery.search("b", always(units(1, 4)), 1).shards[0].route.kinds == ("identity",)
    gallery.declare(make_version(tmp_path / "more/b", "b", 4))
    with pytest.raises(NoRoute):
        gallery.search("b", always(units(1, 4)), 1)


def test_slerp_asks_both_encoders_once_and_is_skipped_where_the_old_one_is_missing(
    make_version: MakeVersion, tmp_path: Path
) -> None:
    old = make_version(tmp_path / "old", "old", 4)
    new = make_version(tmp_path / "new", "new", 4, drift=0.3, edges=[(old, "slerp")])
    gallery, asked = Gallery(), []
    for version in (old, new):
        gallery.declare(version)
    items, q = units(9, 4), {"old": units(2, 4, 1), "new": units(2, 4, 2)}
    gallery.apply({("old", "encoded"): (range(5), items[:5]), ("old", "supplied"): (range(5, 9), items[5:])})

    def encode(version: str) -> Vectors:
        asked.append(version)
        return q[version]

    found = gallery.search("new", encode, 9, encoders=frozenset({"old", "new"}))
    assert sorted(asked) == sorted(found.encode_seconds) == ["new", "old"]
    with np.load(new.folder / "edges/old/edge.npz") as stored:
        between = slerp(q["old"], q["new"] @ stored["weight"], float(stored["alpha"]))
    np.testing.assert_array_equal(found.keys_QK, np.argsort(-(between @ items.T), axis=1))
    assert {s.route.kinds for s in found.shards} == {("slerp",)}
    with pytest.raises(NoRoute, match="need the encoder of 'old', which cannot embed this query"):
        gallery.search("new", encode, 9, encoders=frozenset({"new"}))


def test_an_answer_says_what_took_how_long(mixed: Gallery) -> None:
    def slow(version: str) -> Vectors:
        time.sleep(0.002)
        return units(1, 4)

    found = mixed.search("v2", slow, 6)
    assert set(found.encode_seconds) == {"v2"}
    assert found.encode_seconds["v2"] >= 0.002
    assert all(shard.scan_seconds > 0 <= shard.transform_seconds for shard in found.shards)
    assert found.merge_seconds > 0


def test_raw_scores_of_unlike_spaces_are_not_ranked_together_unless_fused(
    make_version: MakeVersion, tmp_path: Path
) -> None:
    old = make_version(tmp_path / "old", "old", 4, space={"kind": "l2"})
    new = make_version(tmp_path / "new", "new", 4, edges=[(old, "matrix")])
    gallery = Gallery()
    for version in (old, new):
        gallery.declare(version)
    gallery.apply({("old", "encoded"): ([1, 2], units(2, 4)), ("new", "encoded"): ([3, 4], units(2, 4, 1))})
    found = gallery.search("new", always(units(3, 4, 2)), 4)
    assert found.mode == "rank"
    assert (found.shards_QK == [0, 1, 0, 1]).all()
    np.testing.assert_allclose(found.scores_QK, [[1 / 62, 1 / 62, 1 / 64, 1 / 64]] * 3)
    with pytest.raises(ModeUnavailable, match="scores of spaces cosine and l2 are not of one kind; legal now: rank"):
        gallery.search("new", always(units(1, 4)), 4, mode="raw")
    gallery.apply({}, removed=[3, 4])
    assert gallery.search("new", always(units(1, 4)), 2).mode == "raw"


def test_an_unknown_mode_is_refused(mixed: Gallery) -> None:
    with pytest.raises(InvalidArgument, match="mode must be one of calibrated, raw, rank, not 'magic'"):
        mixed.search("v2", always(units(1, 4)), 6, mode="magic")


def test_a_moving_item_is_found_exactly_once(
    gallery: Gallery, background: Callable[[Callable[[], None]], None]
) -> None:
    """Items jump between three shards while others come and go; every answer holds each lasting item once."""
    generator = np.random.default_rng(0)
    vectors = {"v1": units(40, 4), "v2": units(40, 4), "v3": units(40, 6)}
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
    answers = gallery.answer([("v1", Ask(always(units(1, 4, 9)), 3)), ("v1", Ask(encode_late, 3))])
    assert [(found.seq, found.items_by_version, len(found.items)) for found in answers] == [(3, {"v1": 3}, 3)] * 2


def test_an_item_that_asks_must_not_have_been_written_since(gallery: Gallery) -> None:
    def ask(**stored: int) -> list[str]:
        ask = Ask(always(units(1, 4, 9)), 2, stored={int(key[1:]): seq for key, seq in stored.items()})
        return sorted(item.id for item in gallery.answer([("v1", ask)])[0].items.values())

    gallery.apply({V1: ([1, 2], units(2, 4))}, items={1: Item(id="a", seq=1), 2: Item(id="b", seq=2)}, seq=2)
    assert ask(_1=1, _2=2) == ["a", "b"]
    gallery.apply({V1: ([1], units(1, 4))}, items={1: Item(id="a", seq=3)}, seq=3)
    gallery.apply({}, removed=[2], missing={2: Missing("v1", "lost", 4)}, seq=4)
    assert ask(_1=3, _2=4) == ["a"]
    for stale in ({"_1": 1}, {"_1": 4}, {"_2": 2}, {"_9": 1}):
        with pytest.raises(GalleryChanged):
            ask(**stale)
