"""What a gate measures on a sample: M(old/old), M(new/old) by the route that serving takes, and M(new/new).

Q queries meet N items, of which the first Q are the queries, each left out of its own ranking; or none are. The new
version may have embedded fewer items: then M(new/new) is over those, where they are enough, and the share of the gap
that is closed stays unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from index.errors import InvalidArgument
from index.evaluation.flips import Flip, worst_flips
from index.evaluation.gate import Measured, gate
from index.evaluation.matching import Listed, Nearest, Right, retrieval_by
from index.evaluation.measures import first_items, recall, recall_of, tar
from index.evaluation.metrics import Compared, retrieval
from index.graph import Route, follow
from index.space import Vectors
from index.transform import Transform, load_transform
from index.version import Edge, EdgeKind
from service.registry.registry import LoadedVersion, Registry
from service.upgrades.gates.samples import Sample

TAR, RECALL = "TAR@FAR", "recall@k"

MOST_FLIPS = 12
"""Negative flips that a report names."""
MOST_LABEL = 200
"""Characters of a flip's label that a report keeps."""


def measure(
    registry: Registry, old: LoadedVersion, new: LoadedVersion, sample: Sample, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """The report of a gate, as it is stored; `asked` holds metric, far, k and seed.

    Raises:
        InvalidArgument: the metric needs labels that are not there, or that nobody shares, or the versions are one.
    """
    if old.id == new.id:
        raise InvalidArgument(f"{new.name!r} is current: a gate compares another version with it", pointer="/version")
    kinds, old_old, new_old, new_new = compared(registry, old, new, sample)
    metric, by, right = _metric(sample, new_new, asked)
    before = by(old_old)
    if not before.valid.any():
        raise _nothing_right(sample)
    # By `dual` the old encoder embeds the query: the same ranking, never worse and never better.
    after = before if kinds == (EdgeKind.DUAL.value,) else by(new_old)
    own = by(new_new) if sample.asking is None or _can_rank(new_new, sample, asked) else None
    if own is not None and not own.valid.any():
        own = None
    verdict = gate(before, after, own, metric, seed=asked["seed"], slice_of=sample.slices)
    flips = worst_flips(before, after, new_old, right, MOST_FLIPS)
    all_new = len(new_new.items) == len(sample)
    return {
        **asked,
        **verdict.as_json(),
        "flips": [_named(flip, sample) for flip in flips],
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
        "labelled": sample.judged,
        "relevant_missing": None if sample.asking is None else sample.asking.missing,
        "latency_ms": {name: dict(found) for name, found in sample.latency_ms.items() if name in (old.name, new.name)},
    }


def _named(flip: Flip, sample: Sample) -> dict[str, Any]:
    """A flip by the ids and labels of its query and of what was found instead."""
    ends = {"query": sample.askers[flip.query], "wrong": sample.entries[flip.wrong]}
    named = {end: {"id": e.name, "label": e.label and e.label[:MOST_LABEL]} for end, e in ends.items()}
    return {**named, "rank": flip.rank}


def compared(
    registry: Registry, old: LoadedVersion, new: LoadedVersion, sample: Sample
) -> tuple[tuple[str, ...], Compared, Compared, Compared]:
    """The kinds of edges new/old goes by, and what is compared with what: old/old, new/old and new/new."""
    by_new, items = sample.embedded[new.name].vectors, sample.embedded[old.name].vectors
    queries = sample.asked[new.name]
    old_old, new_new = _pair(sample.asked[old.name], items, old), _pair(queries, by_new, new)
    # A slerp edge to a version that has not seen the sample would ask its encoder: the next best route counts.
    route = registry.graph().route(new.name, old.name, frozenset(sample.asked))
    if route is not None and not route.dual:
        return route.kinds, old_old, _pair(reach(registry, route, sample), items, old), new_new
    if (moved := forwarded(registry, old, new, sample)) is not None:
        return (EdgeKind.FORWARD.value,), old_old, _pair(queries, moved, new), new_new
    return (EdgeKind.DUAL.value,), old_old, old_old, new_new


def reach(registry: Registry, route: Route, sample: Sample) -> Vectors:
    """The queries at the end of a route, whose encoders have seen them."""
    return follow(route, partial(_opened, registry), sample.asked)


def forwarded(registry: Registry, old: LoadedVersion, new: LoadedVersion, sample: Sample) -> Vectors | None:
    """The sample as items that a `transform` backfill moved from `old` to `new`; None without an item edge."""
    edge = registry.graph().forward(old.name, new.name)
    if edge is None:
        return None
    given = sample.embedded[old.name]
    return _opened(registry, edge)(given.vectors, given.side)


def _opened(registry: Registry, edge: Edge) -> Transform:
    with registry.opening(edge):
        return load_transform(edge, registry.named(edge.new).card, registry.named(edge.old).card)


def _metric(
    sample: Sample, new_new: Compared, asked: Mapping[str, Any]
) -> tuple[str, Callable[[Compared], Measured], Right]:
    """The metric's full name, what measures it, and which items are right by it."""
    if sample.asking is not None:
        return _by_relevance(sample, asked)
    labels, alone = sample.labels, np.arange(sample.queries)
    metric = asked["metric"] or (RECALL if labels is None else "cmc@1")
    if metric == RECALL:
        k = min(asked["k"], len(sample) - 1)
        truth = first_items(new_new, k, alone)
        right = Nearest(truth, len(sample), alone)
        return f"recall@{k}", lambda pair: recall(first_items(pair, k, alone), truth), right
    if labels is None:
        why = f"metric {metric!r} needs labels: name a metadata field in `label`, or an evaluation set with labels"
        raise InvalidArgument(why, pointer="/metric")
    matching = sample.right(len(sample))
    if metric == TAR:
        return (
            f"TAR@FAR={asked['far']:g}",
            lambda pair: tar(pair, *_labels_of(labels, pair), asked["far"], alone),
            matching,
        )
    return metric, lambda pair: _rank(pair, labels), matching


def _by_relevance(sample: Sample, asked: Mapping[str, Any]) -> tuple[str, Callable[[Compared], Measured], Right]:
    """The same where entries name what is right: recall@k is then the share of it among the first k."""
    metric, right = asked["metric"] or "cmc@1", sample.right(len(sample))
    if metric == TAR:
        why = f"metric {TAR} needs labels, and this evaluation set names relevant items; legal: cmc@1, cmc@5, mAP@1.0, "
        raise InvalidArgument(f"{why}{RECALL}", pointer="/metric")
    if metric != RECALL:
        return metric, lambda pair: retrieval_by(pair, sample.right(len(pair.items))), right
    k = min(asked["k"], len(sample))

    def recalled(pair: Compared) -> Measured:
        listed = sample.right(len(pair.items))
        assert isinstance(listed, Listed)
        return recall_of(first_items(pair, k, listed.self_Q), listed.right_QK, k)

    return f"{RECALL.partition('@')[0]}@{k}", recalled, right


def _can_rank(pair: Compared, sample: Sample, asked: Mapping[str, Any]) -> bool:
    """Whether there are items enough to measure on."""
    return len(pair.items) >= (min(asked["k"], len(sample)) if asked["metric"] == RECALL else 2)


def _nothing_right(sample: Sample) -> InvalidArgument:
    if sample.asking is None:
        return InvalidArgument("no two entries of the sample share a label", pointer="/label")
    why = f"none of the items that the evaluation set names as relevant is there ({sample.asking.missing} are missing)"
    return InvalidArgument(why, pointer="/evaluation")


def _rank(pair: Compared, labels: Sequence[str]) -> Measured:
    of_queries, of_items = _labels_of(labels, pair)
    alone = np.arange(len(of_queries))
    return retrieval(pair.queries, of_queries, pair.items, of_items, pair.space, remove_self=alone)


def _labels_of(labels: Sequence[str], pair: Compared) -> tuple[Sequence[str], Sequence[str]]:
    """The labels of its queries and of its items, which are the first entries."""
    return labels[: len(pair.queries)], labels[: len(pair.items)]


def _pair(queries: Vectors, items: Vectors, version: LoadedVersion) -> Compared:
    return Compared(queries, items, version.space)
