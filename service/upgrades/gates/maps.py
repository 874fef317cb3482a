"""Fit the calibrations of a gate on its sample, one for each route of the new version's queries (`fit_calibrations`).

All maps of a gate are fitted together, on the same queries and items and in one way, so that mapped scores can be
merged: with labels by which pairs are relevant, without by chance scores (`evalue_calibration`). `best_mode` measures
on the same sample which merge mode serves the gallery best during a backfill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from sqlalchemy import Connection, false, select

from index.edges.calibration import Calibration
from index.edges.graph import Route
from index.evaluation.measures import first_items
from index.evaluation.metrics import MEAN_AP, Compared
from index.evaluation.modes import ChosenMode, choose_merge_mode
from index.evaluation.relevance import RankingRelevance, Relevance
from index.evaluation.score_maps import fit_evalue_maps, fit_maps
from index.query.edge_maps import MapKey, default_mode, map_key
from index.space import Vectors
from index.version import Origin
from service.registry.loaded_version import LoadedVersion
from service.registry.placement import placement_in
from service.registry.registry import Registry
from service.store.galleries.embeddings import first_held
from service.store.rows import GalleryRow
from service.store.sql.partitioned import of_item
from service.store.tables import embedding, item
from service.upgrades.gates.measuring import moved_by_edge, reach
from service.upgrades.gates.samples import Sample

NEAREST = 10
"""Without labels, this many first items of the new version's own ranking count as relevant."""

MAX_ITEMS = 2_000
"""Items of the sample that maps are fitted on, and modes compared on."""

Place = tuple[LoadedVersion, str]
"""The items of a version and an origin."""


def live_places(connection: Connection, registry: Registry, gallery: GalleryRow) -> list[Place]:
    """The versions and origins of the embeddings that serve live items."""
    order = placement_in(registry, gallery).version_order
    served = of_item() & (embedding.c.version_id == first_held(order))
    used = (
        select(embedding.c.version_id, embedding.c.origin)
        .select_from(item.join(embedding, served))
        .where(item.c.gallery_id == gallery.id, item.c.deleted == false())
        .distinct()
    )
    return [(registry.by_id(version_id), origin) for version_id, origin in connection.execute(used)]


def fit_calibrations(
    registry: Registry, old: LoadedVersion, new: LoadedVersion, sample: Sample, places: Sequence[Place], seed: int
) -> dict[MapKey, Calibration]:
    """Fit a map for queries of `new` over each place that has items, or can have once `new` is current."""
    expected = [(old, Origin.ENCODED.value), (new, Origin.ENCODED.value), (new, Origin.TRANSFORMED.value)]
    sides: dict[MapKey, Compared] = {}
    for version, origin in dict.fromkeys([*places, *expected]):
        route = registry.route(new.name, version.name)
        items = _items_of(registry, version, origin, old, sample)
        if route is not None and items is not None and set(route.encoders) <= set(sample.query_vectors):
            sides[map_key(route, origin)] = _side(registry, route, items, sample, version)
    count = min(MAX_ITEMS, *(len(side.items) for side in sides.values()))
    comparisons = [Compared(side.queries, side.items[:count], side.space) for side in sides.values()]
    relevance = _relevance(sample, count, None)
    rows = np.flatnonzero(relevance.valid)
    if not len(rows):
        return {}
    maps = (
        fit_maps(comparisons, relevance, rows, seed)
        if sample.has_ground_truth
        else fit_evalue_maps(comparisons, relevance, rows, seed)
    )
    return dict(zip(sides, maps, strict=True))


def best_mode(
    registry: Registry, old: LoadedVersion, new: LoadedVersion, sample: Sample, metric: str, seed: int
) -> tuple[MapKey, ChosenMode] | None:
    """The merge mode that serves a backfill from `old` to `new` best, and the route it was measured along.

    None if no route reaches the items of `old`, or no query has anything relevant to find.
    """
    route = registry.route(new.name, old.name)
    by_new = sample.embedded[new.name].vectors[:MAX_ITEMS]
    if route is None or not set(route.encoders) <= set(sample.query_vectors) or not len(by_new):
        return None
    before = _side(registry, route, sample.embedded[old.name].vectors[: len(by_new)], sample, old)
    after = Compared(sample.query_vectors[new.name][:MAX_ITEMS], by_new, new.space)
    relevance = _relevance(sample, len(by_new), after)
    deciding_metric = metric if metric.startswith("cmc@") and sample.has_ground_truth else MEAN_AP
    chosen = choose_merge_mode(
        before, after, relevance, default=default_mode(route.kinds), metric=deciding_metric, seed=seed
    )
    return None if chosen is None else (map_key(route, Origin.ENCODED.value), chosen)


def _side(registry: Registry, route: Route, items: Vectors, sample: Sample, version: LoadedVersion) -> Compared:
    queries = reach(registry, route, sample)
    return Compared(queries[:MAX_ITEMS], items, version.space)


def _relevance(sample: Sample, items: int, own: Compared | None) -> Relevance:
    """The relevant items among the first of the sample: by the ground truth, else the first of `own`'s ranking."""
    if sample.has_ground_truth:
        return sample.relevance(items, MAX_ITEMS)
    self_numbers = sample.self_numbers(items)[:MAX_ITEMS]
    if own is None:
        return RankingRelevance(np.zeros((len(self_numbers), 0), np.int64), items, self_numbers)
    return RankingRelevance(first_items(own, min(NEAREST, items - 1), self_numbers), items, self_numbers)


def _items_of(
    registry: Registry, version: LoadedVersion, origin: str, old: LoadedVersion, sample: Sample
) -> Vectors | None:
    """The sample as items of this version and origin; None where it cannot be computed."""
    if origin != Origin.TRANSFORMED:
        embedded = sample.embedded.get(version.name)
        return None if embedded is None else embedded.vectors
    sources: Iterable[LoadedVersion] = (old, *(registry.named(name) for name in sample.embedded))
    moved = (moved_by_edge(registry, source, version, sample) for source in sources)
    return next((vectors for vectors in moved if vectors is not None), None)
