"""index.graph: which way a query takes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index.graph import Graph, Route
from index.version import Edge, EdgeKind, Score

NONE: frozenset[str] = frozenset()


def edge(new: str, old: str, measured: float = 0.5, kind: EdgeKind = EdgeKind.IDENTITY) -> Edge:
    return Edge(new, old, kind, {"cmc@1": Score(measured, 0, 1)})


def steps(route: Route | None) -> list[str] | None:
    return None if route is None else [f"{e.new}>{e.old}" for e in route.edges]


def test_a_version_reaches_its_own_items_without_a_step() -> None:
    route = Graph().route("v1", "v1", NONE)
    assert route == Route("v1", "v1")
    assert route is not None
    assert (route.kinds, route.measured) == ((), 1.0)


def test_query_edges_compose() -> None:
    graph = Graph([edge("v2", "v1"), edge("v3", "v2", kind=EdgeKind.TRUNCATE)])
    route = graph.route("v3", "v1", NONE)
    assert steps(route) == ["v3>v2", "v2>v1"]
    assert route is not None
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
    assert dual is not None
    assert (dual.encoders, dual.kinds) == (("v1",), ("dual",))
    assert Graph().route("v2", "v1", frozenset({"v2", "v3"})) is None
    poor = Graph([edge("v2", "v1", 0.01)]).route("v2", "v1", frozenset({"v1"}))
    assert poor is not None
    assert poor.kinds == ("identity",)


def test_dual_reaches_newer_items_too() -> None:
    """After a rollback the query is old and some items are only new."""
    route = Graph([edge("v2", "v1")]).route("v1", "v2", frozenset({"v1", "v2"}))
    assert route is not None
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


def brute_force(edges: list[Edge], new: str, old: str) -> tuple[float, int] | None:
    """Try every sequence of edges without repeats; (weakest, -hops) of the best."""
    best = None
    for length in range(1, 4):
        for path in itertools.permutations(edges, length):
            joined = all(a.old == b.new for a, b in itertools.pairwise(path))
            if joined and path[0].new == new and path[-1].old == old:
                worth = (min(e.measured for e in path), -length)
                best = worth if best is None else max(best, worth)
    return best


names = st.sampled_from(["a", "b", "c", "d"])


@settings(max_examples=100, deadline=None)
@given(
    edges=st.dictionaries(
        st.tuples(names, names).filter(lambda pair: pair[0] != pair[1]), st.sampled_from([0.1, 0.5, 0.9]), max_size=7
    )
)
def test_the_route_is_the_best_of_all_sequences_of_edges(edges: dict[tuple[str, str], float]) -> None:
    declared = [edge(new, old, measured) for (new, old), measured in edges.items()]
    route = Graph(declared).route("a", "b", NONE)
    expected = brute_force(declared, "a", "b")
    assert (route and (route.measured, -len(route.edges))) == (expected and pytest.approx(expected))
