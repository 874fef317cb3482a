"""index.query.edge_maps: which calibration may serve which route."""

from __future__ import annotations

from typing import Any

import pytest

from index.edges.graph import Graph, Route
from index.errors import InvalidVersionFolder
from index.query.edge_maps import check_calibration, common_mode, edge_maps, map_key, preferred_mode
from index.query.merge import Mode
from index.version import Card, Edge, EdgeKind, Score


def one_map(slope: float) -> dict[str, Any]:
    return {"kind": "isotonic", "scores": [0.5], "probabilities": [0.5], "slope": slope}


def edge(new: str, old: str, kind: EdgeKind, slopes: tuple[float, float] | None, measured: float = 0.5) -> Edge:
    """`slopes`: of the maps `edge` and `own`, by which the test knows them."""
    calibration = None if slopes is None else {"edge": one_map(slopes[0]), "own": one_map(slopes[1])}
    return Edge(new, old, kind, {"cmc@1": Score(measured, 0, 1)}, calibration=calibration)


def card(name: str, kind: str = "cosine") -> Card:
    return Card(name, 4, {"kind": kind})


def slopes(edges: list[Edge], *versions: str) -> dict[Any, float]:
    return {key: fitted.slope for key, fitted in edge_maps(edges, versions).items()}


def test_a_query_edge_brings_the_map_of_its_items_and_that_of_its_versions_own() -> None:
    through = (("v2", "v1", "matrix"),)
    assert slopes([edge("v2", "v1", EdgeKind.MATRIX, (3, 7))], "v1", "v2") == {
        ("v2", "v1", "encoded", through): 3,
        ("v2", "v1", "supplied", through): 3,
        ("v2", "v2", "encoded", ()): 7,
        ("v2", "v2", "supplied", ()): 7,
        ("v1", "v2", "encoded", (("v1", "v2", "dual"),)): 7,
        ("v1", "v2", "supplied", (("v1", "v2", "dual"),)): 7,
    }


def test_a_forward_edge_brings_the_map_of_the_items_it_moved() -> None:
    found = slopes([edge("v2", "v1", EdgeKind.FORWARD, (3, 7))], "v2")
    assert found == {
        ("v2", "v2", "transformed", ()): 3,
        ("v2", "v2", "encoded", ()): 7,
        ("v2", "v2", "supplied", ()): 7,
    }


def test_dual_meets_old_items_as_old_queries_do() -> None:
    """v3 has no edge to v2; v2's own map comes with the edge from v2 to v1."""
    edges = [edge("v2", "v1", EdgeKind.IDENTITY, (3, 7)), edge("v3", "v1", EdgeKind.IDENTITY, (4, 8))]
    route = Graph(edges).route("v3", "v2", frozenset({"v2"}))
    assert route.dual
    assert edge_maps(edges, ["v1", "v2", "v3"])[map_key(route, "encoded")].slope == 7


def test_a_chain_has_no_map_of_its_own() -> None:
    edges = [edge("v2", "v1", EdgeKind.IDENTITY, (3, 7)), edge("v3", "v2", EdgeKind.IDENTITY, (4, 8))]
    route = Graph(edges).route("v3", "v1", frozenset())
    assert route is not None
    assert map_key(route, "encoded") not in edge_maps(edges, ["v1", "v2", "v3"])


def test_each_kind_of_edge_between_two_versions_keeps_its_map() -> None:
    edges = [edge("v2", "v1", EdgeKind.IDENTITY, (3, 7), 0.4), edge("v2", "v1", EdgeKind.MATRIX, (4, 8), 0.6)]
    found = edge_maps(edges, ["v1", "v2"])
    for kind, slope in (("identity", 3), ("matrix", 4)):
        assert found["v2", "v1", "encoded", (("v2", "v1", kind),)].slope == slope
    assert found[map_key(Route("v2", "v2"), "encoded")].slope == 8  # of the edge that measured better


def test_edges_without_calibration_bring_nothing() -> None:
    assert edge_maps([edge("v2", "v1", EdgeKind.IDENTITY, None)], ["v1", "v2"]) == {}


def test_a_good_calibration_passes() -> None:
    check_calibration(edge("v2", "v1", EdgeKind.MATRIX, None), card("v2"), card("v1"))
    check_calibration(edge("v2", "v1", EdgeKind.MATRIX, (1, 1)), card("v2"), card("v1"))
    check_calibration(edge("v2", "v1", EdgeKind.MATRIX, (-1, 1)), card("v2"), card("v1", "l2"))
    check_calibration(edge("v2", "v1", EdgeKind.FORWARD, (1, 1)), card("v2"), card("v1", "l2"))


@pytest.mark.parametrize(
    ("calibration", "message", "pointer"),
    [
        ({"edge": one_map(1)}, "must have the two maps 'edge' and 'own'", ""),
        ({"edge": one_map(1), "own": 3}, "own: calibration must hold kind 'isotonic'", "/own"),
        ({"edge": one_map(-1), "own": one_map(1)}, "edge contradicts its space: higher scores of 'v1'", "/edge/slope"),
        ({"edge": one_map(1), "own": one_map(-1)}, "own contradicts its space: higher scores of 'v2'", "/own/slope"),
    ],
)
def test_a_bad_calibration_is_refused(calibration: dict[str, Any], message: str, pointer: str) -> None:
    bad = Edge("v2", "v1", EdgeKind.MATRIX, calibration=calibration)
    with pytest.raises(InvalidVersionFolder, match=message) as caught:
        check_calibration(bad, card("v2"), card("v1"))
    assert caught.value.pointer == f"/edges/v1/calibration{pointer}"


@pytest.mark.parametrize(
    ("kinds", "evidence", "origin", "mode"),
    [
        ((), None, "encoded", None),
        ((), None, "transformed", "calibrated"),
        (("identity",), None, "encoded", "raw"),
        (("identity",), "calibrated", "encoded", "calibrated"),
        (("truncate", "identity"), None, "encoded", "raw"),
        (("truncate", "matrix"), None, "encoded", "calibrated"),
        (("matrix",), None, "encoded", "calibrated"),
        (("matrix",), "raw", "encoded", "raw"),
        (("zero_pad", "identity"), "calibrated", "encoded", "raw"),
        (("dual",), None, "encoded", "calibrated"),
    ],
)
def test_a_route_wishes_for_what_its_one_edge_measured_or_else_for_what_its_kinds_are_known_for(
    kinds: tuple[str, ...], evidence: str | None, origin: str, mode: str | None
) -> None:
    names = [f"v{len(kinds) - n}" for n in range(len(kinds) + 1)]
    calibration = None if evidence is None else {"edge": one_map(1), "own": one_map(1), "mode": evidence}
    edges = tuple(Edge(names[n], names[n + 1], EdgeKind(kind), calibration=calibration) for n, kind in enumerate(kinds))
    assert preferred_mode(Route(names[0], names[-1], edges), origin) == mode


def test_routes_that_wish_for_different_modes_are_calibrated() -> None:
    assert common_mode([None, Mode.RAW, Mode.RAW]) is Mode.RAW
    assert common_mode([None, Mode.RAW, Mode.CALIBRATED]) is Mode.CALIBRATED
    assert common_mode([None]) is None


def test_a_mode_that_is_none_is_refused_with_its_place() -> None:
    told = {"edge": one_map(1), "own": one_map(1), "mode": "magic"}
    broken = Edge("v2", "v1", EdgeKind.MATRIX, calibration=told)
    with pytest.raises(InvalidVersionFolder, match="must be one of calibrated, raw, rank") as caught:
        check_calibration(broken, card("v2"), card("v1"))
    assert caught.value.pointer == "/edges/v1/calibration/mode"
    check_calibration(Edge("v2", "v1", EdgeKind.MATRIX, calibration={**told, "mode": "rank"}), card("v2"), card("v1"))
