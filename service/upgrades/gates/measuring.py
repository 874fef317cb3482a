"""Measure a gate on a sample: M(old/old), M(new/old) along the route of serving, and M(new/new); start at `measure`.

Q queries are compared with N items. Either the first Q items are the queries, each left out of its own ranking, or no
item is a query. If the new version has embedded fewer items, M(new/new) is measured over those, if they are enough, and
the closed share of the gap is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from index.edges.graph import Route, follow
from index.edges.transform import Transform, load_transform
from index.errors import InvalidArgument
from index.evaluation.flips import Flip, worst_flips
from index.evaluation.gate import Measured, gate
from index.evaluation.measures import first_items, recall, recall_of, tar
from index.evaluation.metrics import Compared, Ints, retrieval
from index.evaluation.relevance import ListedRelevance, RankingRelevance, Relevance, retrieval_by
from index.space import Vectors
from index.version import Edge, EdgeKind
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.upgrades.gates.samples import Sample

TAR, RECALL = "TAR@FAR", "recall@k"

MAX_FLIPS = 12
"""Negative flips that a report names."""
MAX_LABEL = 200
"""Characters of a flip's label that a report keeps."""


def measure(
    registry: Registry, old: LoadedVersion, new: LoadedVersion, sample: Sample, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The report of a gate, in its stored form; `options` holds metric, far, k and seed.

    Raises:
        InvalidArgument: the metric needs labels that are missing or that no two share, or the versions are the same.
    """
    if old.id == new.id:
        raise InvalidArgument(f"{new.name!r} is the current version; a gate requires another one", pointer="/version")
    kinds, old_old, new_old, new_new = comparisons(registry, old, new, sample)
    metric, measure_pair, relevance = _metric(sample, new_new, options)
    before = measure_pair(old_old)
    if not before.valid.any():
        raise _nothing_relevant(sample)
    # With `dual` the old encoder embeds the query, so the ranking is the same.
    after = before if kinds == (EdgeKind.DUAL.value,) else measure_pair(new_old)
    own = measure_pair(new_new) if _can_measure(new_new, sample, options) else None
    if own is not None and not own.valid.any():
        own = None
    verdict = gate(before, after, own, metric, seed=options["seed"], slice_of=sample.slices)
    flips = worst_flips(before, after, new_old, relevance, MAX_FLIPS)
    all_new = len(new_new.items) == len(sample)
    return {
        **options,
        **verdict.as_json(),
        "flips": [_describe_flip(flip, sample) for flip in flips],
        "gap_closed": verdict.gap_closed if all_new else None,
        "version": new.name,
        "current": old.name,
        "route": list(kinds),
        "items": len(sample),
        "new_new_items": len(new_new.items),
        "whole": sample.whole,
        "exhaustive": sample.exhaustive,
        "unreadable": sample.unreadable,
        "unlabelled": sample.unlabelled,
        "labelled": sample.has_ground_truth,
        "relevant_missing": None if sample.query_side is None else sample.query_side.missing,
        "latency_ms": {name: dict(found) for name, found in sample.latency_ms.items() if name in (old.name, new.name)},
    }


def _describe_flip(flip: Flip, sample: Sample) -> dict[str, Any]:
    """A flip, with ids and labels of its query and of the wrong item that was found."""
    ends = {"query": sample.query_entries[flip.query], "wrong": sample.entries[flip.wrong]}
    named = {end: {"id": e.name, "label": e.label and e.label[:MAX_LABEL]} for end, e in ends.items()}
    return {**named, "rank": flip.rank}


def comparisons(
    registry: Registry, old: LoadedVersion, new: LoadedVersion, sample: Sample
) -> tuple[tuple[str, ...], Compared, Compared, Compared]:
    """The kinds of edges of the route new/old, and the pairs to compare: old/old, new/old and new/new."""
    by_new, items = sample.embedded[new.name].vectors, sample.embedded[old.name].vectors
    queries = sample.query_vectors[new.name]
    old_old, new_new = _pair(sample.query_vectors[old.name], items, old), _pair(queries, by_new, new)
    # Only routes whose encoders have embedded the queries; others, such as by slerp, are replaced by the next best.
    route = _query_route(registry, old, new, frozenset(sample.query_vectors))
    if route is not None:
        return route.kinds, old_old, _pair(reach(registry, route, sample), items, old), new_new
    if (moved := moved_by_edge(registry, old, new, sample)) is not None:
        return (EdgeKind.FORWARD.value,), old_old, _pair(queries, moved, new), new_new
    return (EdgeKind.DUAL.value,), old_old, old_old, new_new


def moves_with_side(registry: Registry, old: LoadedVersion, new: LoadedVersion) -> bool:
    """Whether a gate measures the items as an edge moves them that needs their side-information."""
    by_queries = _query_route(registry, old, new, frozenset({old.name, new.name}))
    return bool(old.card.side_dim) and by_queries is None and registry.graph().forward(old.name, new.name) is not None


def _query_route(registry: Registry, old: LoadedVersion, new: LoadedVersion, encoders: frozenset[str]) -> Route | None:
    """The route that maps queries embedded by these encoders; None: there is none, or only that of the old encoder."""
    route = registry.graph().route(new.name, old.name, encoders)
    return None if route is None or route.dual else route


def reach(registry: Registry, route: Route, sample: Sample) -> Vectors:
    """The queries mapped along a route; all its encoders must have embedded them."""
    return follow(route, partial(_transform, registry), sample.query_vectors)


def moved_by_edge(registry: Registry, old: LoadedVersion, new: LoadedVersion, sample: Sample) -> Vectors | None:
    """The sample's items as a `transform` backfill from `old` to `new` would move them.

    None without an item edge, or without the side-information that it needs.
    """
    edge, stored = registry.graph().forward(old.name, new.name), sample.embedded[old.name]
    if edge is None or (old.card.side_dim and stored.side is None):
        return None
    return _transform(registry, edge)(stored.vectors, stored.side)


def _transform(registry: Registry, edge: Edge) -> Transform:
    with registry.opening(edge):
        return load_transform(edge, registry.named(edge.new).card, registry.named(edge.old).card)


def default_metric(labelled: bool) -> str:
    """The metric of a gate that names none; `labelled`: labels or relevant items say what is right."""
    return "cmc@1" if labelled else RECALL


def _metric(
    sample: Sample, new_new: Compared, options: Mapping[str, Any]
) -> tuple[str, Callable[[Compared], Measured], Relevance]:
    """The metric's full name, the function that measures it, and the items that it counts as relevant."""
    if sample.query_side is not None:
        return _by_relevance(sample, options)
    labels, self_numbers = sample.label_codes, np.arange(sample.queries)
    metric = options["metric"] or default_metric(labels is not None)
    if metric == RECALL:
        k = min(options["k"], len(sample) - 1)
        truth = first_items(new_new, k, self_numbers)
        relevance = RankingRelevance(truth, len(sample), self_numbers)
        return f"recall@{k}", lambda pair: recall(first_items(pair, k, self_numbers), truth), relevance
    if labels is None:
        why = f"metric {metric!r} requires labels: give a metadata field in `label`, or an evaluation set with labels"
        raise InvalidArgument(why, pointer="/metric")
    matching = sample.relevance(len(sample))
    if metric == TAR:
        return (
            f"TAR@FAR={options['far']:g}",
            lambda pair: tar(pair, *_labels_of(labels, pair), options["far"], self_numbers),
            matching,
        )
    return metric, lambda pair: _rank(pair, labels), matching


def _by_relevance(sample: Sample, options: Mapping[str, Any]) -> tuple[str, Callable[[Compared], Measured], Relevance]:
    """As `_metric`, if entries name relevant items: recall@k is the share of these among the first k."""
    metric, relevance = options["metric"] or default_metric(True), sample.relevance(len(sample))
    if metric == TAR:
        why = f"metric {TAR} requires labels, but the evaluation set has relevant items; legal: cmc@1, cmc@5, mAP@1.0, "
        raise InvalidArgument(f"{why}{RECALL}", pointer="/metric")
    if metric != RECALL:
        return metric, lambda pair: retrieval_by(pair, sample.relevance(len(pair.items))), relevance
    k = min(options["k"], len(sample))

    def recalled(pair: Compared) -> Measured:
        relevant = sample.relevance(len(pair.items))
        assert isinstance(relevant, ListedRelevance)
        return recall_of(first_items(pair, k, relevant.self_Q), relevant.relevant_QK, k)

    return f"{RECALL.partition('@')[0]}@{k}", recalled, relevance


def _can_measure(pair: Compared, sample: Sample, options: Mapping[str, Any]) -> bool:
    """Whether there are enough items to measure on, which for TAR means pairs of one label and of different labels."""
    if sample.query_side is None:
        labels = sample.label_codes
        if options["metric"] != TAR or labels is None:
            return True
        of_queries, of_items = _labels_of(labels, pair)
        counts = np.bincount(of_items)
        return bool(counts[of_queries].max() > 1 and np.count_nonzero(counts) > 1)
    return len(pair.items) >= (min(options["k"], len(sample)) if options["metric"] == RECALL else 2)


def _nothing_relevant(sample: Sample) -> InvalidArgument:
    if sample.query_side is None:
        return InvalidArgument("no two entries of the sample share a label", pointer="/label")
    missing = sample.query_side.missing
    why = f"none of the relevant items of the evaluation set exists ({missing} are missing)"
    return InvalidArgument(why, pointer="/evaluation")


def _rank(pair: Compared, labels: Ints) -> Measured:
    of_queries, of_items = _labels_of(labels, pair)
    self_numbers = np.arange(len(of_queries))
    return retrieval(pair.queries, of_queries, pair.items, of_items, pair.space, remove_self=self_numbers)


def _labels_of(labels: Ints, pair: Compared) -> tuple[Ints, Ints]:
    """The labels of a pair's queries and items, which are the first entries."""
    return labels[: len(pair.queries)], labels[: len(pair.items)]


def _pair(queries: Vectors, items: Vectors, version: LoadedVersion) -> Compared:
    return Compared(queries, items, version.space)
