"""QUERY PATH before and after the shards: embed, plan, transform, filter; then look up the items of the matches.

`Gallery.answer` calls the functions in the order of this file, and holds its read lock from `prepare_search` on.
"""

from __future__ import annotations

from time import perf_counter

from index.edges.graph import follow
from index.errors import InvalidArgument, NoRoute
from index.metadata.metadata import Metadata
from index.query.query_plan import EmbeddedQueries, GalleryQuery, Plan
from index.query.scatter import Gathered, ShardQuery
from index.query.search_result import SearchResult
from index.query.view import View
from index.retry import GalleryChanged
from index.space import Vectors


def embed_queries(view: View, query_version: str, ask: GalleryQuery) -> EmbeddedQueries:
    """Embed the queries by every version that the routes of a view need.

    Raises:
        InvalidArgument: the depth is below 1.
    """
    if ask.depth < 1:
        raise InvalidArgument(f"k must be at least 1, not {ask.depth}", pointer="/k")
    made = EmbeddedQueries({}, {})
    for name in view.reach(query_version, ask.encoders).encoders:
        started = perf_counter()
        made.vectors[name] = ask.encode(name)
        made.seconds[name] = perf_counter() - started
    return made


def prepare_search(
    view: View, metadata: Metadata, query_version: str, ask: GalleryQuery, embedded: EmbeddedQueries
) -> ShardQuery:
    """Plan, transform and filter; returns the input of `scatter`. The filter must be `filterable`.

    Raises:
        GalleryChanged: the plan needs the queries embedded by a version that is not in `embedded`.
        NoRoute: no shard can be reached; or, if strict, some shard cannot.
        ModeUnavailable: the shards cannot be merged in this mode.
    """
    params = ask.params
    plan = view.plan(query_version, ask.encoders, params.mode)
    if not plan.encoders <= embedded.vectors.keys():
        raise GalleryChanged
    if plan.degraded and (params.strict or not plan.shards):
        raise NoRoute("; ".join(d.reason for d in plan.degraded), pointer="/version")
    vectors, seconds = _transform_queries(plan, view, embedded.vectors)
    allowed_S, filter_seconds = None, 0.0
    if params.filter is not None:
        started = perf_counter()
        allowed_S = metadata.filter_mask(params.filter)
        filter_seconds = perf_counter() - started
    depth = min(ask.depth, view.items)
    return ShardQuery(
        plan, vectors, depth, allowed_S, params.exact, params.recall, params.strict, seconds, filter_seconds
    )


def build_result(
    view: View,
    metadata: Metadata,
    query_version: str,
    embedded: EmbeddedQueries,
    query: ShardQuery,
    gathered: Gathered,
) -> SearchResult:
    """The result of a search: the merged matches with their items."""
    plan, (merged, shards, merge_seconds, degraded) = query.plan, gathered
    scores_QK, raw_QK, slots_QK, shards_QK, full = merged
    keys_QK, items = metadata.look_up(slots_QK, full=full)
    return SearchResult(
        query_version,
        plan.mode,
        scores_QK,
        raw_QK,
        keys_QK,
        shards_QK,
        shards,
        items,
        view.seq,
        view.items_by_version,
        plan.degraded + degraded,
        embedded.seconds,
        query.filter_seconds,
        merge_seconds,
    )


def _transform_queries(
    plan: Plan, view: View, vectors: dict[str, Vectors]
) -> tuple[dict[str, Vectors], dict[str, float]]:
    """By version: the queries transformed along the route to it, and the seconds that took."""
    moved, seconds = dict(vectors), {}
    for version, route in plan.transformed_routes.items():
        started = perf_counter()
        moved[version] = follow(route, view.topology.transform, vectors)
        seconds[version] = perf_counter() - started
    return moved, seconds
