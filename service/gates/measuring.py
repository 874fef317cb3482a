"""What a gate measures on a sample: M(old/old), M(new/old) by the route that serving takes, and M(new/new).

Arrays of vectors are (N, dimension); each entry is left out of its own ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from index.errors import InvalidArgument
from index.evaluation import Compared, retrieval
from index.gate import Measured, gate
from index.graph import Route
from index.measures import first_items, recall, tar
from index.space import Vectors, space_from_json
from index.transform import Transform, load_transform
from index.version import Edge, EdgeKind
from service.gates.samples import Sample
from service.versions.catalog import Catalog, Registered

TAR, RECALL = "TAR@FAR", "recall@k"


def measure(
    catalog: Catalog, old: Registered, new: Registered, sample: Sample, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """The report of a gate, as it is stored; `asked` holds metric, far, k and seed.

    Raises:
        InvalidArgument: the metric needs labels that are not there, or that nobody shares.
    """
    kinds, old_old, new_old, new_new = compared(catalog, old, new, sample)
    metric, by = _metric(sample, new_new, asked)
    before = by(old_old)
    if not before.valid.any():
        raise InvalidArgument("no two entries of the sample share a label", pointer="/label")
    # By `dual` the old encoder embeds the query: the same ranking, never worse and never better.
    after = before if kinds == (EdgeKind.DUAL.value,) else by(new_old)
    verdict = gate(before, after, by(new_new), metric, seed=asked["seed"], slice_of=sample.slices)
    return {
        **asked,
        **verdict.as_json(),
        "version": new.name,
        "current": old.name,
        "route": list(kinds),
        "items": len(sample),
        "unreadable": sample.unreadable,
        "unlabelled": sample.unlabelled,
        "labelled": sample.labels is not None,
        "latency_ms": {name: dict(found) for name, found in sample.latency_ms.items() if name in (old.name, new.name)},
    }


def compared(
    catalog: Catalog, old: Registered, new: Registered, sample: Sample
) -> tuple[tuple[str, ...], Compared, Compared, Compared]:
    """The kinds of edges new/old goes by, and what is compared with what: old/old, new/old and new/new."""
    queries, items = sample.embedded[new.name].vectors, sample.embedded[old.name].vectors
    old_old, new_new = _pair(items, items, old), _pair(queries, queries, new)
    # A slerp edge to a version that has not seen the sample would ask its encoder: the next best route counts.
    route = catalog.graph().route(new.name, old.name, frozenset(sample.embedded))
    if route is not None and not route.dual:
        return route.kinds, old_old, _pair(reach(catalog, route, sample), items, old), new_new
    if (moved := forwarded(catalog, old, new, sample)) is not None:
        return (EdgeKind.FORWARD.value,), old_old, _pair(queries, moved, new), new_new
    return (EdgeKind.DUAL.value,), old_old, old_old, new_new


def reach(catalog: Catalog, route: Route, sample: Sample) -> Vectors:
    """The sample as queries at the end of a route, whose encoders have seen the sample."""
    queries = sample.embedded[route.encoders[0]].vectors
    for edge in () if route.dual else route.edges:
        transform = _opened(catalog, edge)
        given = sample.embedded.get(edge.old)
        queries = transform(queries, None if given is None else given.vectors)
    return queries


def forwarded(catalog: Catalog, old: Registered, new: Registered, sample: Sample) -> Vectors | None:
    """The sample as items that a `transform` backfill moved from `old` to `new`; None without an item edge."""
    edge = catalog.graph().forward(old.name, new.name)
    if edge is None:
        return None
    given = sample.embedded[old.name]
    return _opened(catalog, edge)(given.vectors, given.side)


def _opened(catalog: Catalog, edge: Edge) -> Transform:
    with catalog.opening(edge):
        return load_transform(edge, catalog.named(edge.new).card, catalog.named(edge.old).card)


def _metric(sample: Sample, new_new: Compared, asked: Mapping[str, Any]) -> tuple[str, Callable[[Compared], Measured]]:
    """The metric's full name, and what measures it."""
    labels, alone = sample.labels, np.arange(len(sample))
    metric = asked["metric"] or (RECALL if labels is None else "cmc@1")
    if metric == RECALL:
        k = min(asked["k"], len(sample) - 1)
        truth = first_items(new_new, k, alone)
        return f"recall@{k}", lambda pair: recall(first_items(pair, k, alone), truth)
    if labels is None:
        why = f"metric {metric!r} needs labels: name a metadata field in `label`, or an evaluation set with labels"
        raise InvalidArgument(why, pointer="/metric")
    if metric == TAR:
        return f"TAR@FAR={asked['far']:g}", lambda pair: tar(pair, labels, labels, asked["far"], alone)
    return metric, lambda pair: _rank(pair, labels)


def _rank(pair: Compared, labels: Sequence[str]) -> Measured:
    alone = np.arange(len(labels))
    return retrieval(pair.queries, labels, pair.items, labels, pair.space, remove_self=alone)


def _pair(queries: Vectors, items: Vectors, version: Registered) -> Compared:
    return Compared(queries, items, space_from_json(dict(version.card.space)))
