"""The uncertainty of each item that waits for a backfill, for the order `uncertainty`.

Sources, by priority: the value stored when the item was transformed; the variance that the item edge to the target
predicts (FastFill); the norm of an embedding in hyperbolic space (HBCT). Variances can be compared with each other,
norms cannot; so if there are several sources, items are compared by their ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select

from index.errors import InvalidVersionFolder, RegraftError
from index.evaluation.ordering import hyperbolic_uncertainty, ranks
from index.space import Lorentz
from service.backfills.embedder import Embedder, apply_transform
from service.backfills.scores import NO_SCORES, ItemScores, sorted_scores
from service.backfills.states import Kind
from service.backfills.waiting import Scope, stored_for, waiting_items
from service.errors import EdgeBroken
from service.registry.loaded_version import LoadedVersion
from service.registry.placement import placement_of
from service.registry.registry import Registry
from service.store.database.connections import Database
from service.store.rows import BackfillRow, all_of
from service.store.tables import embedding, item
from service.store.vectors.codec import from_bytes, is_usable
from service.store.vectors.reader import with_vectors

ROWS = 4096
"""Embeddings in memory at a time."""
VARIANCE = ""

Scores = dict[str, list[tuple[NDArray[np.int64], NDArray[np.float64]]]]
"""Source -> blocks of items' keys and uncertainties: 16 bytes per item."""


class WaitingRow(NamedTuple):
    """A waiting item, and the embedding that it would be moved from."""

    id: int
    version_id: int
    vector: bytes
    side: bytes | None
    uncertainty: float | None


class NoUncertainty(RegraftError):
    """The uncertainty of the transform is unknown for these items."""

    status = 409
    code = "no_uncertainty"


def uncertainties(database: Database, registry: Registry, embedder: Embedder, scope: Scope) -> ItemScores:
    """The uncertainties of waiting items, on any increasing scale; items without one are left out."""
    sources: Scores = defaultdict(list)
    for rows in _stored(database, registry, scope):
        _score_all(registry, embedder, scope, rows, sources)
    told = [sorted_scores(parts) for parts in sources.values()]
    if len(told) == 1:
        return told[0]
    return sorted_scores([(one.keys, ranks(one.numbers)) for one in told])


def check_uncertainty_known(database: Database, registry: Registry, embedder: Embedder, scope: Scope) -> None:
    """Check that the uncertainty of at least one waiting item is known.

    Raises:
        NoUncertainty: items wait, and it is known of none.
    """
    sources: Scores = defaultdict(list)
    count = 0
    for rows in _stored(database, registry, scope):
        count += len(rows)
        _score_all(registry, embedder, scope, rows, sources)
        if sources:
            return
    if count:
        raise NoUncertainty(
            f"uncertainty requires a forward edge to {registry.by_id(scope.version_id).name!r} with variance, "
            "or items in hyperbolic space: use another order",
            pointer="/order",
        )


def uncertainties_of_job(database: Database, registry: Registry, embedder: Embedder, job: BackfillRow) -> ItemScores:
    """The uncertainties of the items that a running backfill has yet to move."""
    try:
        return uncertainties(database, registry, embedder, Scope(job.gallery_id, job.kind, job.version_id, job.origin))
    except (InvalidVersionFolder, EdgeBroken):
        # Planning continues without an order if an edge cannot be opened.
        return NO_SCORES


def _stored(database: Database, registry: Registry, scope: Scope) -> Iterator[list[WaitingRow]]:
    """The waiting items in blocks, each read in its own transaction."""
    kind, version_order = Kind(scope.kind), placement_of(registry, registry.by_id(scope.version_id)).version_order
    stored = stored_for(kind, scope.version_id, version_order)
    waiting = waiting_items(scope.gallery_id, kind, scope.version_id, version_order, scope.origin)
    columns = (item.c.id, embedding.c.version_id, embedding.c.vector, embedding.c.side, embedding.c.uncertainty)
    following = select(*columns).select_from(item.join(embedding, stored)).where(waiting).order_by(item.c.id)
    last = 0
    while True:
        with database.read() as connection:
            found = all_of(WaitingRow, connection.execute(following.where(item.c.id > last).limit(ROWS)))
            rows = with_vectors(connection, found, "vector")
        if not rows:
            return
        yield rows
        last = rows[-1].id


def _score_all(registry: Registry, embedder: Embedder, scope: Scope, waiting: list[WaitingRow], into: Scores) -> None:
    target = registry.by_id(scope.version_id)
    by_version = sorted(waiting, key=lambda row: row.version_id)
    for old_id, rows in groupby(by_version, key=lambda row: row.version_id):
        _score(registry.by_id(old_id), target, embedder, list(rows), into)


def _score(old: LoadedVersion, target: LoadedVersion, embedder: Embedder, rows: list[WaitingRow], into: Scores) -> None:
    known = {row.id: row.uncertainty for row in rows if row.uncertainty is not None}
    # An item with a damaged embedding gets no score, so it comes last; the backfill reports it.
    rest = [row for row in rows if row.uncertainty is None and is_usable(row.vector, old.card.dim)]
    if known:
        into[VARIANCE].append((np.fromiter(known, np.int64), np.fromiter(known.values(), np.float64)))
    source, scores = _variances(old, target, embedder, rest)
    if scores:
        into[source].append((np.fromiter(scores, np.int64), np.fromiter(scores.values(), np.float64)))


def _variances(
    old: LoadedVersion, target: LoadedVersion, embedder: Embedder, rows: list[WaitingRow]
) -> tuple[str, dict[int, float]]:
    if not rows:
        return VARIANCE, {}
    transform = embedder.forward(old, target)
    if transform is not None and transform.has_variance:
        # If the edge needs side-information, items without it come last; the backfill reports them.
        for some in (rows, [row for row in rows if row.side is not None]):
            with suppress(RegraftError):
                carried = apply_transform(transform, old, [row.vector for row in some], [row.side for row in some])
                assert carried.variance_N is not None
                return VARIANCE, dict(zip((row.id for row in some), carried.variance_N.tolist(), strict=True))
        return VARIANCE, {}
    if not isinstance(old.space, Lorentz):
        return old.name, {}
    vectors = from_bytes([row.vector for row in rows], old.card.dim)
    unsure = np.asarray(hyperbolic_uncertainty(old.space.curvature, vectors)).tolist()
    return old.name, dict(zip((row.id for row in rows), unsure, strict=True))
