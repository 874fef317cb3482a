"""index.edges.graph: which way a query takes."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index.edges.graph import Graph, Route
from index.version import Edge, EdgeKind, Score
from naive import paths

NONE: frozenset[str] = frozenset()


def edge(new: str, old: str, measured: float = 0.5, kind: EdgeKind = EdgeKind.IDENTITY) -> Edge:
    return Edge(new, old, kind, {"cmc@1": Score(measured, 0, 1)})


def steps(route: Route | None) -> list[str] | None:
    return None if route is None else [f"{e.new}>{e.old}" for e in route.edges]


def test_a_version_reaches_its_own_items_without_a_step() -> None:
    route = Graph().route("v1", "v1", NONE)
    assert route == Route("v1", "v1")
    assert (route.kinds, route.measured) == ((), 1.0)


def test_query_edges_compose() -> None:
    graph = Graph([edge("v2", "v1"), edge("v3", "v2", kind=EdgeKind.TRUNCATE)])
    route = graph.route("v3", "v1", NONE)
    assert steps(route) == ["v3>v2", "v2>v1"]
    assert route.kinds == ("truncate", "identity")
    assert route.encoders == ("v3",)


def test_edges_lead_from_new_to_old_only() -> None:
    assert Graph([edge("v2", "v1")]).route("v1", "v2", NONE) is None


def test_a_chain_is_worth_its_weakest_edge() -> None:
    direct, chain = [edge("v3", "v1", 0.6)], [edge("v3", "v2", 0.9), edge("v2", "v1", 0.7)]
    assert steps(Graph([*direct, *chain]).route("v3", "v1", NONE)) == ["v3>v2", "v2>v1"]
    weak = [edge("v3", "v2", 0.9), edge("v2", "v1", 0.5)]
    assert steps(Graph([*direct, *weak]).route("v3", "v1", NONE)) == ["v3>v1"]


def test_of_equally_good_routes_the_shorter_is_taken() -> None:
    graph = Graph([edge("v3", "v2", 0.6), edge("v2", "v1", 0.6), edge("v3", "v1", 0.6)])
    assert steps(graph.route("v3", "v1", NONE)) == ["v3>v1"]


def test_dual_is_the_last_resort_and_needs_the_old_encoder() -> None:
    dual = Graph().route("v2", "v1", frozenset({"v1"}))
    assert (dual.encoders, dual.signature) == (("v1",), (("v2", "v1", "dual"),))
    assert Graph().route("v2", "v1", frozenset({"v2", "v3"})) is None
    poor = Graph([edge("v2", "v1", 0.01)]).route("v2", "v1", frozenset({"v1"}))
    assert poor.kinds == ("identity",)


def test_dual_reaches_newer_items_too() -> None:
    """After a rollback the query is old and some items are only new."""
    route = Graph([edge("v2", "v1")]).route("v1", "v2", frozenset({"v1", "v2"}))
    assert (route.encoders, route.kinds) == (("v2",), ("dual",))


def test_an_item_edge_is_no_step_of_a_query() -> None:
    graph = Graph([edge("v2", "v1", kind=EdgeKind.FORWARD)])
    assert graph.route("v2", "v1", NONE) is None
    assert graph.forward("v1", "v2") == graph.edges[0]
    assert graph.forward("v2", "v1") is None
    assert Graph([edge("v2", "v1")]).forward("v1", "v2") is None


def test_a_circle_of_edges_ends() -> None:
    graph = Graph([edge("v1", "v2"), edge("v2", "v3"), edge("v3", "v1")])
    assert steps(graph.route("v1", "v3", NONE)) == ["v1>v2", "v2>v3"]
    assert graph.route("v1", "v9", NONE) is None


def test_a_slerp_edge_serves_only_queries_that_the_old_encoder_can_embed() -> None:
    graph = Graph([edge("v3", "v2", 0.9, EdgeKind.SLERP), edge("v2", "v1", 0.8), edge("v3", "v1", 0.7)])
    both = graph.route("v3", "v1", frozenset({"v2"}))
    assert steps(both) == ["v3>v2", "v2>v1"]
    assert both.encoders == ("v3", "v2")
    assert steps(graph.route("v3", "v1", NONE)) == ["v3>v1"]
    assert graph.route("v3", "v2", NONE) is None
    assert steps(graph.route("v3", "v1", frozenset({"v1"}))) == ["v3>v1"]


def test_a_chain_of_slerps_asks_every_encoder_on_the_way() -> None:
    graph = Graph([edge("v3", "v2", kind=EdgeKind.SLERP), edge("v2", "v1", kind=EdgeKind.SLERP)])
    route = graph.route("v3", "v1", frozenset({"v1", "v2"}))
    assert (route.encoders, route.dual) == (("v3", "v2", "v1"), False)
    dual = graph.route("v3", "v1", frozenset({"v1"}))
    assert (dual.encoders, dual.dual) == (("v1",), True)


def test_of_several_edges_between_two_versions_the_best_measured_is_taken() -> None:
    graph = Graph([edge("v2", "v1", 0.6), edge("v2", "v1", 0.8, EdgeKind.MATRIX), edge("v2", "v1", 0.7, EdgeKind.ONNX)])
    route = graph.route("v2", "v1", NONE)
    assert (route.kinds, route.measured) == (("matrix",), 0.8)
    assert route.signature == (("v2", "v1", "matrix"),)


def test_a_later_edge_takes_the_place_of_one_with_its_key() -> None:
    graph = Graph([edge("v2", "v1", 0.6), edge("v2", "v1", 0.9, EdgeKind.MATRIX), edge("v2", "v1", 0.95)])
    assert len(graph.edges) == 2
    route = graph.route("v2", "v1", NONE)
    assert (route.kinds, route.measured) == (("identity",), 0.95)


def test_an_unmeasured_edge_is_better_than_none() -> None:
    route = Graph([Edge("v2", "v1", EdgeKind.IDENTITY)]).route("v2", "v1", frozenset({"v1"}))
    assert (route.kinds, route.measured) == (("identity",), 0.0)


@pytest.mark.parametrize(
    ("edges", "reason"),
    [
        ([], "no edge leads from version 'v3' to 'v1'"),
        ([edge("v1", "v3")], "no edge leads from version 'v3' to 'v1'"),
        (
            [edge("v3", "v2", kind=EdgeKind.SLERP), edge("v2", "v1", kind=EdgeKind.SLERP)],
            "the edges from version 'v3' to 'v1' need the encoder of 'v1', which cannot embed this query",
        ),
        (
            [edge("v3", "v1", kind=EdgeKind.FORWARD)],
            "only an item edge leads from version 'v3' to 'v1': a transform backfill to 'v3' would make these items .*",
        ),
        (
            [edge("v2", "v1", kind=EdgeKind.FORWARD), edge("v3", "v2")],
            "only an item edge leads from version 'v3' to 'v1': a transform backfill to 'v2' would make these items .*",
        ),
        ([edge("v2", "v0", kind=EdgeKind.FORWARD), edge("v3", "v2")], "no edge leads from version 'v3' to 'v1'"),
        ([edge("v3", "v1", kind=EdgeKind.DUAL)], "no edge leads from version 'v3' to 'v1'"),
        (
            [edge("v2", "v1", kind=EdgeKind.FORWARD), edge("v1", "v2", kind=EdgeKind.FORWARD)],
            "no edge leads from version 'v3' to 'v1'",
        ),
    ],
)
def test_why_a_shard_is_out_of_reach(edges: list[Edge], reason: str) -> None:
    assert re.fullmatch(reason, Graph(edges).unreachable("v3", "v1", frozenset({"v2"})))


def test_planning_does_not_try_every_path() -> None:
    """Twenty layers of four versions, all joined to the next layer: 4^20 paths."""
    layers = [[f"{layer}-{number}" for number in range(4)] for layer in range(20)]
    edges = [edge(a, b, 0.5) for new, old in itertools.pairwise(layers) for a in new for b in old]
    route = Graph([*edges, edge("0-0", "1-3", 0.9)]).route("0-0", "19-2", NONE)
    assert (len(route.edges), route.measured) == (19, 0.5)


NAMES = ["a", "b", "c", "d", "e", "f"]
KINDS = [EdgeKind.IDENTITY, EdgeKind.MATRIX, EdgeKind.SLERP, EdgeKind.FORWARD]
names = st.sampled_from(NAMES)


@settings(max_examples=200, deadline=None)
@given(
    edges=st.dictionaries(
        st.tuples(names, names, st.sampled_from(KINDS)).filter(lambda key: key[0] != key[1]),
        st.sampled_from([0.1, 0.5, 0.9]),
        max_size=14,
    ),
    encoders=st.frozensets(names),
)
def test_the_route_is_the_best_of_all_paths(
    edges: dict[tuple[str, str, EdgeKind], float], encoders: frozenset[str]
) -> None:
    declared = [edge(new, old, measured, kind) for (new, old, kind), measured in edges.items()]
    query_edges = [e for e in declared if e.kind is not EdgeKind.FORWARD]
    legal = [e for e in query_edges if e.kind is not EdgeKind.SLERP or e.old in encoders]
    worth = [(min((e.measured for e in p), default=1.0), -len(p)) for p in paths(legal, "a", "b")]
    graph = Graph(declared)
    route = graph.route("a", "b", encoders)
    if worth:
        assert route.edges in paths(legal, "a", "b")
        assert (route.measured, -len(route.edges)) == max(worth)
        assert set(route.encoders) <= {"a"} | encoders
    elif "b" in encoders:
        assert route.kinds == ("dual",)
    else:
        assert route is None
        needs_encoder = bool(paths(query_edges, "a", "b"))
        assert needs_encoder == ("cannot embed this query" in graph.unreachable("a", "b", encoders))
    assert graph.route("a", "b", encoders) == route
