"""Calibrations that a gate fits on its sample, one for each route that queries of the new version would take.

All maps of a gate are fitted on the same pairs: with labels by which pairs
are right, without by what chance gives (`index.chance`), since only maps of one sort rank together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, false, func, select

from index.calibration import Calibration, fit_calibration
from index.chance import fit_chance
from index.edge_maps import MapKey
from index.space import Vectors, space_from_json
from index.version import Origin
from service.registry.registry import Catalog, Registered
from service.store.tables import embedding, item
from service.upgrades.gates.measuring import forwarded, reach
from service.upgrades.gates.samples import Sample

PAIRS = 20_000
"""Pairs of one label and as many of different labels, or random pairs, that a map is fitted on."""

BLOCK = 4096
"""Pairs scored at once."""

Place = tuple[Registered, str]
"""The items of a version and an origin."""


@dataclass(frozen=True)
class Pairs:
    """P pairs of a query and another item of the sample; `right` and `weights` (P,) where there are labels."""

    queries: NDArray[np.int64]
    items: NDArray[np.int64]
    right: NDArray[np.bool_] | None
    weights: NDArray[np.float64] | None


def live_places(connection: Connection, catalog: Catalog, gallery_id: int) -> dict[Place, int]:
    """Live items by version and origin."""
    held = (embedding.c.item_id == item.c.id) & (embedding.c.version_id == item.c.active_id)
    counted = (
        select(item.c.active_id, embedding.c.origin, func.count())
        .select_from(item.join(embedding, held))
        .where(item.c.gallery_id == gallery_id, item.c.deleted == false())
        .group_by(item.c.active_id, embedding.c.origin)
    )
    return {(catalog.by_id(v), origin): count for v, origin, count in connection.execute(counted)}


def fit(
    catalog: Catalog, old: Registered, new: Registered, sample: Sample, places: Mapping[Place, int], seed: int
) -> dict[MapKey, Calibration]:
    """A map for queries of `new` over each place that is there, or will be once `new` is current."""
    labels = None if sample.labels is None else sample.labels[: sample.queries]
    pairs = draw_pairs(labels, sample.queries, seed)
    coming = [(old, Origin.ENCODED.value), (new, Origin.ENCODED.value), (new, Origin.TRANSFORMED.value)]
    maps = {}
    for version, origin in dict.fromkeys([*places, *coming]):
        route = catalog.route(new.name, version.name)
        items = _items_of(catalog, version, origin, old, sample)
        if route is None or items is None or not set(route.encoders) <= set(sample.embedded):
            continue
        scores = _scores(reach(catalog, route, sample), items, version, pairs)
        key = (new.name, version.name, origin, route.signature)
        maps[key] = _fit_one(scores, pairs, version, max(1, sum(places.values())))
    return maps


def draw_pairs(labels: Sequence[str] | None, size: int, seed: int) -> Pairs:
    """PAIRS random pairs, or as many of one label and of different labels, each weighted by how many it stands for."""
    draw = np.random.default_rng(seed)
    if labels is None:
        queries = draw.integers(size, size=PAIRS)
        return Pairs(queries, (queries + draw.integers(1, size, size=PAIRS)) % size, None, None)
    _, codes = np.unique(np.asarray(labels), return_inverse=True)
    counts = np.bincount(codes)
    same_total = int((counts * (counts - 1)).sum())
    same_q, same_i = _same_pairs(codes, counts, draw)
    other_q = draw.integers(size, size=PAIRS)
    other_i = draw.integers(size, size=PAIRS)
    different = codes[other_q] != codes[other_i]
    other_q, other_i = other_q[different], other_i[different]
    other_total = size * (size - 1) - same_total
    weights = np.concatenate(
        [np.full(len(same_q), same_total / PAIRS), np.full(len(other_q), other_total / max(len(other_q), 1))]
    )
    right = np.arange(len(weights)) < len(same_q)
    return Pairs(np.concatenate([same_q, other_q]), np.concatenate([same_i, other_i]), right, weights)


def _same_pairs(
    codes: NDArray[np.int64], counts: NDArray[np.int64], draw: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """PAIRS pairs of one label, drawn uniformly from all there are."""
    order = np.argsort(codes, kind="stable")
    starts = np.cumsum(counts) - counts
    chance = (counts - 1)[codes] / (counts * (counts - 1)).sum()
    queries = draw.choice(len(codes), size=PAIRS, p=chance)
    own = np.empty(len(codes), np.int64)
    own[order] = np.arange(len(codes)) - starts[codes[order]]
    label = codes[queries]
    step = 1 + (draw.random(PAIRS) * (counts[label] - 1)).astype(np.int64)
    return queries, order[starts[label] + (own[queries] + step) % counts[label]]


def _items_of(catalog: Catalog, version: Registered, origin: str, old: Registered, sample: Sample) -> Vectors | None:
    """The sample as items of this version and origin; None where that cannot be had."""
    if origin != Origin.TRANSFORMED:
        given = sample.embedded.get(version.name)
        return None if given is None else given.vectors
    known: Iterable[Registered] = (old, *(catalog.named(name) for name in sample.embedded))
    moved = (forwarded(catalog, source, version, sample) for source in known if source is not version)
    return next((found for found in moved if found is not None), None)


def _scores(queries: Vectors, items: Vectors, version: Registered, pairs: Pairs) -> NDArray[np.float64]:
    """(P,) what a user would read."""
    space = space_from_json(dict(version.card.space))
    laid_q, laid_x = space.queries(queries), space.items(items)
    scanned = np.empty(len(pairs.queries))
    for start in range(0, len(scanned), BLOCK):
        rows = slice(start, start + BLOCK)
        q, x = laid_q[pairs.queries[rows]].astype(np.float64), laid_x[pairs.items[rows]].astype(np.float64)
        scanned[rows] = (q * x).sum(axis=1) if space.inner_product else ((q - x) ** 2).sum(axis=1)
    return space.score(scanned.astype(np.float32)).astype(np.float64)


def _fit_one(scores: NDArray[np.float64], pairs: Pairs, version: Registered, items: int) -> Calibration:
    higher = space_from_json(dict(version.card.space)).higher_is_better
    if pairs.right is None:
        return fit_chance(scores, items, higher_is_better=higher)
    return fit_calibration(scores, pairs.right, higher_is_better=higher, weights=pairs.weights)
