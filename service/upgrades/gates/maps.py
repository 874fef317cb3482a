"""Calibrations that a gate fits on its sample, one for each route that queries of the new version would take.

All maps of a gate are fitted together on the same queries and items: with labels by which pairs are right, without by
what chance gives (`evalue_calibration`), since only maps of one sort rank together. Which merge mode serves the gallery
best while its items move is measured on the same sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from sqlalchemy import Connection, false, func, select

from index.calibration import Calibration
from index.edge_maps import MapKey, map_key, safe_mode
from index.evaluation.matching import Nearest, Right, fit_evalue_maps, fit_maps
from index.evaluation.measures import first_items
from index.evaluation.metrics import MEAN_AP, Compared
from index.evaluation.modes import ChosenMode, choose
from index.graph import Route
from index.space import Vectors
from index.version import Origin
from service.registry.placement import places_in
from service.registry.registry import LoadedVersion, Registry
from service.store.embeddings import first_held
from service.store.partitioned import of_item
from service.store.rows import GalleryRow
from service.store.tables import embedding, item
from service.upgrades.gates.measuring import forwarded, reach
from service.upgrades.gates.samples import Sample

NEAREST = 10
"""Without labels, so many first items of the new version's own ranking are taken for right."""

MOST_ITEMS = 2_000
"""Items of the sample that maps are fitted on, and modes compared on."""

Place = tuple[LoadedVersion, str]
"""The items of a version and an origin."""


def live_places(connection: Connection, registry: Registry, gallery: GalleryRow) -> dict[Place, int]:
    """Live items by the version and origin of the embedding that serves them."""
    order = places_in(registry, gallery).order
    served = of_item() & (embedding.c.version_id == first_held(order))
    counted = (
        select(embedding.c.version_id, embedding.c.origin, func.count())
        .select_from(item.join(embedding, served))
        .where(item.c.gallery_id == gallery.id, item.c.deleted == false())
        .group_by(embedding.c.version_id, embedding.c.origin)
    )
    return {(registry.by_id(v), origin): count for v, origin, count in connection.execute(counted)}


def fit(
    registry: Registry, old: LoadedVersion, new: LoadedVersion, sample: Sample, places: Mapping[Place, int], seed: int
) -> dict[MapKey, Calibration]:
    """A map for queries of `new` over each place that is there, or will be once `new` is current."""
    coming = [(old, Origin.ENCODED.value), (new, Origin.ENCODED.value), (new, Origin.TRANSFORMED.value)]
    sides: dict[MapKey, Compared] = {}
    for version, origin in dict.fromkeys([*places, *coming]):
        route = registry.route(new.name, version.name)
        items = _items_of(registry, version, origin, old, sample)
        if route is not None and items is not None and set(route.encoders) <= set(sample.asked):
            sides[map_key(route, origin)] = _side(registry, route, items, sample, version)
    count = min(MOST_ITEMS, *(len(side.items) for side in sides.values()))
    cut = [Compared(side.queries, side.items[:count], side.space) for side in sides.values()]
    right = _right(sample, count, None)
    rows = np.flatnonzero(right.valid)
    if not len(rows):
        return {}
    made = fit_maps(cut, right, rows, seed) if sample.judged else fit_evalue_maps(cut, right, rows, seed)
    return dict(zip(sides, made, strict=True))


def choose_mode(
    registry: Registry, old: LoadedVersion, new: LoadedVersion, sample: Sample, metric: str, seed: int
) -> tuple[MapKey, ChosenMode] | None:
    """The merge mode that serves a backfill from `old` to `new` best, and the route it was measured along.

    None where serving would not reach what `old` has stored, or nothing has anything to find.
    """
    route = registry.route(new.name, old.name)
    by_new = sample.embedded[new.name].vectors[:MOST_ITEMS]
    if route is None or not set(route.encoders) <= set(sample.asked) or not len(by_new):
        return None
    before = _side(registry, route, sample.embedded[old.name].vectors[: len(by_new)], sample, old)
    after = Compared(sample.asked[new.name][:MOST_ITEMS], by_new, new.space)
    right = _right(sample, len(by_new), after)
    decides = metric if metric.startswith("cmc@") and sample.judged else MEAN_AP
    chosen = choose(before, after, right, safe=safe_mode(route.kinds), metric=decides, seed=seed)
    return None if chosen is None else (map_key(route, Origin.ENCODED.value), chosen)


def _side(registry: Registry, route: Route, items: Vectors, sample: Sample, version: LoadedVersion) -> Compared:
    queries = reach(registry, route, sample)
    return Compared(queries[:MOST_ITEMS], items, version.space)


def _right(sample: Sample, items: int, own: Compared | None) -> Right:
    """What is right among the first items of the sample: what is known to be, else the first of `own`'s ranking."""
    if sample.judged:
        return sample.right(items, MOST_ITEMS)
    alone = sample.alone(items)[:MOST_ITEMS]
    if own is None:
        return Nearest(np.zeros((len(alone), 0), np.int64), items, alone)
    return Nearest(first_items(own, min(NEAREST, items - 1), alone), items, alone)


def _items_of(
    registry: Registry, version: LoadedVersion, origin: str, old: LoadedVersion, sample: Sample
) -> Vectors | None:
    """The sample as items of this version and origin; None where that cannot be had."""
    if origin != Origin.TRANSFORMED:
        given = sample.embedded.get(version.name)
        return None if given is None else given.vectors
    known: Iterable[LoadedVersion] = (old, *(registry.named(name) for name in sample.embedded))
    moved = (forwarded(registry, source, version, sample) for source in known if source is not version)
    return next((found for found in moved if found is not None), None)
