"""Gallery.search over random graphs of six versions in three spaces, against float64 numpy written from definitions.

The gallery never asks where vectors come from, so queries and items are random points of each version's space. A route
is checked by trying every path; its edges, the scores and the three ways to merge are then computed one by one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from index.edges.calibration import Calibration
from index.edges.graph import Route
from index.engines.base import MISSING
from index.errors import ModeUnavailable, NoRoute
from index.gallery import Gallery
from index.query.edge_maps import map_key
from index.query.search_result import SearchResult, ShardTrace
from index.version import Edge, EdgeKind, Score, Version
from naive import paths, reach

MakeVersion = Callable[..., Version]

Space = dict[str, Any]
COSINE: Space = {"kind": "cosine"}
L2: Space = {"kind": "l2"}
LORENTZ: Space = {"kind": "lorentz", "curvature": 0.7}
VERSIONS = {"a": (4, COSINE), "b": (4, COSINE), "c": (4, L2), "d": (4, LORENTZ), "e": (6, COSINE), "f": (6, COSINE)}
"""Name -> dimension and space, oldest first; an edge may lead from any to any older one."""

QUERIES, ITEMS, TOLERANCE = 3, 40, 1e-3
ORIGINS = ("encoded", "transformed", "supplied")


def legal_kinds(new: str, old: str) -> list[str]:
    """The kinds of edges that fit two versions; a matrix fits any two, here it joins different spaces."""
    (new_dim, new_space), (old_dim, old_space) = VERSIONS[new], VERSIONS[old]
    if new_space != old_space:
        return ["matrix"]
    return ["slerp", "onnx", *(["identity"] if new_dim == old_dim else ["truncate", "zero_pad"])]


@dataclass(frozen=True)
class Universe:
    """All six versions without edges, and every edge that could join two of them."""

    versions: dict[str, Version]
    edges: list[Edge]
    queries: dict[str, np.ndarray]
    items: dict[str, np.ndarray]


def points(space: Space, rows: int, dim: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(rows, dim))
    return (x / np.linalg.norm(x, axis=1, keepdims=True) if space == COSINE else x).astype(np.float32)


@pytest.fixture(scope="module")
def universe(make_version: MakeVersion, tmp_path_factory: pytest.TempPathFactory) -> Universe:
    root = tmp_path_factory.mktemp("universe")
    made: dict[str, Version] = {}
    edges: list[Edge] = []
    for name, (dim, space) in VERSIONS.items():
        version = make_version(root / name, name, dim, space=space, encoder=False)
        for kind in ("identity", "matrix", "truncate", "zero_pad", "slerp", "onnx"):
            olds = [(made[old], kind) for old in made if kind in legal_kinds(name, old)]
            edges += make_version(root / kind / name, name, dim, space=space, encoder=False, edges=olds).edges
        made[name] = version
    seeds = dict(zip(VERSIONS, itertools.count(1), strict=False))
    return Universe(
        made,
        edges,
        {name: points(space, QUERIES, dim, seeds[name]) for name, (dim, space) in VERSIONS.items()},
        {name: points(space, ITEMS, dim, 100 + seeds[name]) for name, (dim, space) in VERSIONS.items()},
    )


def scores(q: np.ndarray, x: np.ndarray, space: Space) -> np.ndarray:
    """What a user reads, from the definition of the space."""
    if space == COSINE:
        return q @ x.T
    if space == L2:
        return np.linalg.norm(q[:, None] - x, axis=-1)
    return geodesic(q, x, space["curvature"])


def geodesic(q: np.ndarray, x: np.ndarray, k: float) -> np.ndarray:
    """The distance of hyperbolic space by another model of it: the Poincare ball of curvature -k."""
    q_ball, x_ball = (v / (1 + np.sqrt(1 + k * (v**2).sum(axis=1, keepdims=True))) for v in (q, x))
    apart = ((q_ball[:, None] - x_ball) ** 2).sum(axis=-1)
    q_rest, x_rest = (1 - k * (v**2).sum(axis=1) for v in (q_ball, x_ball))
    return np.arccosh(1 + 2 * k * apart / np.outer(q_rest, x_rest)) / np.sqrt(k)


def expected_scores(universe: Universe, shard: ShardTrace, keys: list[int]) -> np.ndarray:
    """(queries, keys): how the route of a shard scores its items."""
    queries = {name: q.astype(np.float64) for name, q in universe.queries.items()}
    q = queries[shard.version if shard.route.dual else shard.route.query_version]
    for edge in () if shard.route.dual else shard.route.edges:
        q = reach(edge, q, universe.versions[edge.old].card, queries[edge.old])
    return scores(q, universe.items[shard.version][keys].astype(np.float64), VERSIONS[shard.version][1])


def log_odds(fitted: Calibration, x: np.ndarray) -> np.ndarray:
    """A map of two knots by hand: three straight lines."""
    (x0, x1), (p0, p1) = fitted.scores_K, fitted.probabilities_K
    low, high = math.log(p0 / (1 - p0)), math.log(p1 / (1 - p1))
    between = low + (high - low) * (x - x0) / (x1 - x0)
    return np.where(x < x0, low + fitted.slope * (x - x0), np.where(x > x1, high + fitted.slope * (x - x1), between))


def map_of(number: int, higher: bool) -> Calibration:
    """Some map, another for each number; it rises in similarity and falls in distance."""
    draw = np.random.default_rng(number)
    knots, rates = np.sort(draw.uniform(-0.5, 1.5, 2)), np.sort(draw.uniform(0.05, 0.95, 2))
    slope = float(draw.uniform(0.5, 5))
    return Calibration(knots, rates if higher else rates[::-1], slope if higher else -slope)


def check_route(route: Route, edges: list[Edge], version: str, encoders: frozenset[str]) -> None:
    """It is one of the best of all paths; `dual` only where there is none."""
    usable = [e for e in edges if e.kind is not EdgeKind.SLERP or e.old in encoders]
    legal = paths(usable, route.query_version, version)
    if route.dual:
        assert (legal, version in encoders) == ([], True)
        return
    assert route.edges in legal
    worth = [(min((e.measured for e in path), default=1.0), -len(path)) for path in legal]
    assert (route.measured, -len(route.edges)) == max(worth)


def check_order(found: SearchResult, tables: list[np.ndarray], keys_of: list[list[int]], k: int) -> None:
    """Every query's list: what it is ranked by, which items, and the own order of every shard."""
    for row in range(QUERIES):
        good: dict[int, float] = {}
        for number, (shard, table, keys) in enumerate(zip(found.shards, tables, keys_of, strict=True)):
            higher = VERSIONS[shard.version][1] == COSINE
            by_score = np.argsort(-table[row] if higher else table[row], kind="stable").tolist()
            own = [key for key, s in zip(found.keys_QK[row], found.shards_QK[row], strict=True) if s == number]
            told = [raw for raw, s in zip(found.raw_QK[row], found.shards_QK[row], strict=True) if s == number]
            np.testing.assert_allclose(told, table[row, by_score][: len(own)], atol=TOLERANCE)
            np.testing.assert_allclose([table[row, keys.index(key)] for key in own], told, atol=TOLERANCE)
            if found.mode == "calibrated":
                assert shard.calibration is not None
                good |= dict(zip(keys, log_odds(shard.calibration, table[row]), strict=True))
            elif found.mode == "raw":
                good |= dict(zip(keys, table[row] if higher else -table[row], strict=True))
            else:
                # Which of two near-equal items has which place is the shard's; the places themselves are not.
                rest = [keys[n] for n in by_score if keys[n] not in own]
                share = sum(map(len, keys_of)) / len(keys)
                good |= {key: 1 / (60 + place * share) for place, key in enumerate([*own, *rest], 1)}
        best = sorted(good.values(), reverse=True)[:k]
        listed = [key for key in found.keys_QK[row].tolist() if key != MISSING]
        assert len(set(listed)) == len(listed) == len(best)
        np.testing.assert_allclose([good[key] for key in listed], best, atol=5 * TOLERANCE)
        shown = found.scores_QK[row][: len(best)]
        if found.mode == "calibrated":
            np.testing.assert_allclose(shown, 1 / (1 + np.exp(-np.array(best))), atol=5 * TOLERANCE)
        elif found.mode == "raw":
            np.testing.assert_array_equal(shown, found.raw_QK[row][: len(best)])
        else:
            np.testing.assert_allclose(shown, best, rtol=1e-12)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_route_and_mode_equals_brute_force(universe: Universe, data: st.DataObject) -> None:
    chosen = data.draw(
        st.lists(st.sampled_from(range(len(universe.edges))), min_size=6, max_size=24, unique=True), "edges"
    )
    asking = data.draw(st.sampled_from(["e", "f"]), "asking")
    measured = data.draw(st.permutations(range(1, len(chosen) + 1)), "measured")
    edges = [
        replace(universe.edges[n], scores={"cmc@1": Score(m / 10, 0, 1)}) for n, m in zip(chosen, measured, strict=True)
    ]
    encoders = frozenset(VERSIONS) - data.draw(st.frozensets(st.sampled_from(list(VERSIONS))), "no encoders")
    owners = data.draw(st.lists(st.sampled_from(list(VERSIONS)), min_size=2, max_size=4, unique=True), "owners")
    draw = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    places = [(owners[v], ORIGINS[o]) for v, o in draw.integers([len(owners), 3], size=(ITEMS, 2))]
    keys_at = {place: [key for key, p in enumerate(places) if p == place] for place in sorted(set(places))}

    gallery = Gallery()
    for version in universe.versions.values():
        gallery.declare(version)
    for edge in edges:
        gallery.add_edge(edge)
    gallery.apply({place: (keys, universe.items[place[0]][keys]) for place, keys in keys_at.items()})
    search = {"query_version": asking, "encode": universe.queries.__getitem__, "encoders": encoders}
    k = data.draw(st.sampled_from([1, 7, ITEMS]), "k")

    usable = [e for e in edges if e.kind is not EdgeKind.SLERP or e.old in encoders]
    reached = {version for version, _ in keys_at if version in encoders or paths(usable, asking, version)}
    if not reached:
        with pytest.raises(NoRoute):
            gallery.search(**search, k=k)
        return
    first = gallery.search(**search, k=k)
    assert {d.version for d in first.degraded} == {version for version, _ in keys_at} - reached
    assert {(s.version, s.origin) for s in first.shards} == {place for place in keys_at if place[0] in reached}
    gallery.apply(
        {},
        calibrations=(
            {
                map_key(s.route, s.origin): map_of(number, VERSIONS[s.version][1] == COSINE)
                for number, s in enumerate(first.shards)
            },
            {},
        ),
    )
    keys_of = [keys_at[s.version, s.origin] for s in first.shards]
    tables = [expected_scores(universe, s, keys) for s, keys in zip(first.shards, keys_of, strict=True)]
    for shard in first.shards:
        check_route(shard.route, edges, shard.version, encoders)
    kinds = {VERSIONS[version][1]["kind"] for version in reached}
    assert first.mode == ("raw" if len(kinds) == 1 else "rank")
    for mode in ("calibrated", "raw", "rank"):
        if mode == "raw" and len(kinds) > 1:
            with pytest.raises(ModeUnavailable):
                gallery.search(**search, k=k, mode=mode)
            continue
        found = gallery.search(**search, k=k, mode=mode)
        assert found.mode == mode
        check_order(found, tables, keys_of, k)


@pytest.mark.parametrize("name", VERSIONS)
def test_one_shard_ranks_the_same_in_every_mode(universe: Universe, name: str) -> None:
    gallery = Gallery()
    gallery.declare(universe.versions[name])
    gallery.apply({(name, "encoded"): (range(ITEMS), universe.items[name])})
    higher = VERSIONS[name][1] == COSINE
    gallery.apply({}, calibrations=({(name, name, "encoded", ()): map_of(5, higher)}, {}))
    q, x = (side[name].astype(np.float64) for side in (universe.queries, universe.items))
    table = scores(q, x, VERSIONS[name][1])
    pure = np.argsort(-table if higher else table, axis=1)
    for mode in ("calibrated", "raw", "rank"):
        found = gallery.search(name, universe.queries.__getitem__, ITEMS, mode=mode)
        np.testing.assert_array_equal(found.keys_QK, pure)
        np.testing.assert_allclose(found.raw_QK, np.take_along_axis(table, pure, 1), atol=TOLERANCE)


@pytest.mark.parametrize("curvature", [0.1, 1.0, 4.0])
def test_a_lorentz_ranking_is_the_geodesic_ranking(make_version: MakeVersion, tmp_path: Path, curvature: float) -> None:
    space = {"kind": "lorentz", "curvature": curvature}
    gallery = Gallery()
    gallery.declare(make_version(tmp_path / "v", "v", 8, space=space, encoder=False))
    draw = np.random.default_rng(3)
    # Some points near the origin, some far out.
    items, q = ((draw.normal(size=(n, 8)) * draw.uniform(0.1, 3, (n, 1))).astype(np.float32) for n in (300, 20))
    gallery.apply({("v", "encoded"): (range(300), items)})
    found = gallery.search("v", lambda _: q, 50)
    table = geodesic(q.astype(np.float64), items.astype(np.float64), curvature)
    np.testing.assert_allclose(found.scores_QK, np.sort(table, axis=1)[:, :50], atol=TOLERANCE)
    np.testing.assert_allclose(np.take_along_axis(table, found.keys_QK, 1), found.scores_QK, atol=TOLERANCE)
