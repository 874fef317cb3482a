"""QUERY PATH between encoding and the list: plan, transform, filter, scan, and what the items found are.

All from one view of a gallery; `Gallery.answer` holds its lock meanwhile.
"""

from __future__ import annotations

from time import perf_counter

from index.attempts import GalleryChanged
from index.errors import InvalidArgument, NoRoute
from index.graph import follow
from index.metadata import Metadata
from index.query_plan import Ask, EmbeddedQueries, Plan
from index.scatter import Gathered, Moved, ShardQuery
from index.search_result import SearchResult
from index.space import Vectors
from index.view import View


def embed(view: View, query_version: str, ask: Ask) -> EmbeddedQueries:
    """The queries by every version that the routes of a view need.

    Raises:
        InvalidArgument: the depth is below 1.
    """
    if ask.depth < 1:
        raise InvalidArgument(f"k is {ask.depth}, it must be at least 1", pointer="/k")
    made = EmbeddedQueries({}, {})
    for name in view.reach(query_version, ask.encoders).encoders:
        started = perf_counter()
        made.vectors[name] = ask.encode(name)
        made.seconds[name] = perf_counter() - started
    return made


def prepared(view: View, metadata: Metadata, query_version: str, ask: Ask, embedded: EmbeddedQueries) -> ShardQuery:
    """What is asked of the shards.

    Raises:
        GalleryChanged: something else should have been embedded.
        NoRoute: strict, and a shard cannot be reached; or none can.
        ModeUnavailable: the shards cannot be merged in this mode.
    """
    reach, params, vectors = view.reach(query_version, ask.encoders), ask.params, embedded.vectors
    if not reach.encoders <= vectors.keys():
        raise GalleryChanged
    if reach.degraded and (params.strict or not reach.routes):
        raise NoRoute("; ".join(d.reason for d in reach.degraded), pointer="/version")
    plan = view.plan(query_version, reach, params.mode)
    moved = _moved(plan, view, vectors) if plan.moving else Moved(vectors, plan.still)
    allowed_S, filter_seconds = None, 0.0
    if params.filter is not None:
        started = perf_counter()
        allowed_S = metadata.select(params.filter)
        filter_seconds = perf_counter() - started
    depth, queries = min(ask.depth, view.items), len(next(iter(vectors.values())))
    how = (params.exact, reach.degraded, filter_seconds, params.strict, params.recall)
    return ShardQuery(plan, moved, queries, depth, allowed_S, *how)


def _moved(plan: Plan, view: View, vectors: dict[str, Vectors]) -> Moved:
    """The queries at the end of each route."""
    moved, seconds = dict(vectors), dict(plan.still)
    for version, route in plan.moving.items():
        started = perf_counter()
        moved[version] = follow(route, view.topology.transform, vectors)
        seconds[version] = perf_counter() - started
    return Moved(moved, seconds)


def result(
    view: View, metadata: Metadata, query_version: str, embedded: EmbeddedQueries, query: ShardQuery, found: Gathered
) -> SearchResult:
    """What was found, and what its items are."""
    merged = found.merged
    keys_QK, items = metadata.found(merged.keys_QK)
    return SearchResult(
        query_version,
        query.plan.mode,
        merged.scores_QK,
        merged.raw_QK,
        keys_QK,
        merged.shards_QK,
        found.shards,
        items,
        view.seq,
        view.items_by_version,
        query.degraded + found.degraded,
        embedded.seconds,
        query.filter_seconds,
        found.merge_seconds,
    )
