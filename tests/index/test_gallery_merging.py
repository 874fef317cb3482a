"""index.gallery: items of several origins in one ranked list, by the maps and edges that there are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from index.edges.calibration import Calibration
from index.edges.transform import slerp
from index.engines.base import MISSING
from index.errors import InvalidArgument, InvalidVersionFolder, ModeUnavailable, NoRoute
from index.gallery import Gallery
from index.query.merge import Mode
from index.space import Vectors
from index.version import Edge, EdgeKind, Version
from naive import units
from staging.inputs.builders import always

MakeVersion = Callable[..., Version]


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
    for key, shard in zip(found.keys_QK.ravel().tolist(), found.shards_QK.ravel(), strict=True):
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
    mixed.apply({}, calibrations=({key: maps[key] for key in list(maps)[:1]}, {}))
    assert mixed.search("v2", q, 6).mode == "raw"
    mixed.apply({}, calibrations=(maps, {"v2": Mode.CALIBRATED}))
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
    mixed.apply({}, calibrations=({}, {"v2": Mode.RANK, "v3": Mode.RAW}))
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
        mixed.apply({}, calibrations=({own: calibration(1.0), other: calibration(1.0)}, {}))
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
    mixed.apply({}, calibrations=({("v2", *ENCODED, ()): calibration(1.0)}, {}))
    assert used() == [5.0, 6.0]
    mixed.apply({}, calibrations=({("v2", *ENCODED, ()): calibration(1.0), ("v2", *V1, THROUGH): calibration(2.0)}, {}))
    assert used() == [2.0, 1.0]


def test_an_edge_whose_map_runs_against_its_space_is_refused(mixed: Gallery, chain: dict[str, Version]) -> None:
    (edge,) = chain["v2"].edges
    maps = {"edge": calibration(5.0).as_json(), "own": calibration(-6.0).as_json()}
    with pytest.raises(InvalidVersionFolder, match="own contradicts its space"):
        mixed.add_edge(replace(edge, calibration=maps))
    assert mixed.search("v2", always(units(1, 4)), 6).mode == "raw"


def test_a_removed_edge_leaves_the_answer_degraded_and_never_wrong(mixed: Gallery) -> None:
    mixed.apply({}, calibrations=({("v2", *V1, THROUGH): calibration(1.0), ("v2", *ENCODED, ()): calibration(1.0)}, {}))
    mixed.remove_edge(("v2", "v1", "matrix"))  # there is none of this kind
    assert mixed.search("v2", always(units(1, 4)), 6).degraded == ()
    mixed.remove_edge(("v2", "v1", "identity"))
    found = mixed.search("v2", always(units(1, 4)), 6)
    assert [(d.version, d.items, d.reason) for d in found.degraded] == [
        ("v1", 3, "no edge leads from version 'v2' to 'v1'")
    ]
    assert found.mode == "raw"  # one shard is left: its scores are those from before the upgrade
    assert set(found.keys_QK[0]) == {4, 5, 6, MISSING}
    with pytest.raises(NoRoute):
        mixed.search("v2", always(units(1, 4)), 6, strict=True)


def test_the_gallerys_own_maps_go_with_the_edge_they_were_fitted_on(mixed: Gallery, chain: dict[str, Version]) -> None:
    (edge,) = chain["v2"].edges
    maps = {("v2", *V1, THROUGH): calibration(1.0), ("v2", *ENCODED, ()): calibration(1.0)}

    def mode() -> str:
        return mixed.search("v2", always(units(1, 4)), 6).mode

    mixed.apply({}, calibrations=(maps, {"v2": Mode.CALIBRATED}))
    mixed.add_edge(edge)  # the very edge that is there
    assert mode() == "calibrated"
    mixed.add_edge(replace(edge, support=9))
    assert mode() == "raw"
    mixed.apply({}, calibrations=(maps, {"v2": Mode.CALIBRATED}))
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
    with pytest.raises(ModeUnavailable, match="scores of spaces cosine and l2 are not comparable; legal now: rank"):
        gallery.search("new", always(units(1, 4)), 4, mode="raw")
    gallery.apply({}, removed=[3, 4])
    assert gallery.search("new", always(units(1, 4)), 2).mode == "raw"


def test_an_unknown_mode_is_refused(mixed: Gallery) -> None:
    with pytest.raises(InvalidArgument, match="mode must be one of calibrated, raw, rank, not 'magic'"):
        mixed.search("v2", always(units(1, 4)), 6, mode="magic")
