"""Estimate a backfill before it starts: items, time by a measured sample, storage, operations; see `estimate`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import ColumnElement, Connection, and_, false, func, select

from index.errors import RegraftError
from index.evaluation.cost import FLOAT_BYTES, provider_price, provider_seconds
from index.evaluation.macs import encoder_macs, forward_macs
from regraft.models import BackfillEstimate, ItemMacs
from service.backfills.chunks import write_moved
from service.backfills.embedder import Embedder, outcome_of
from service.backfills.starting import BackfillRequest
from service.backfills.states import Kind
from service.backfills.supplied import count_missing, missing_items
from service.backfills.waiting import (
    HAS_TEXT,
    Scope,
    VersionOrder,
    capped_count,
    embeddable,
    read_version,
    served_origin,
    stored_for,
    waiting_items,
)
from service.registry.loaded_version import LoadedVersion
from service.registry.placement import placement_of
from service.registry.registry import Registry
from service.store.database.connections import Database
from service.store.galleries.embeddings import first_held
from service.store.galleries.filtering import passing
from service.store.galleries.random_items import RandomItems
from service.store.rows import all_of
from service.store.sql.arrays import key_table
from service.store.sql.partitioned import of_item
from service.store.tables import embedding, item
from service.store.vectors.reader import with_vectors

SAMPLE = {Kind.REENCODE: 32, Kind.TRANSFORM: 1024}
"""Items that are moved, in a transaction that is rolled back, to measure the time per item."""


class SampledRow(NamedTuple):
    """An item with what either kind of backfill reads; for a transform, `blob` may be None."""

    id: int
    seq: int
    blob: str
    version_id: int
    vector: bytes
    side: bytes | None


def estimate(
    database: Database,
    registry: Registry,
    connection: Connection,
    embedder: Embedder,
    target: LoadedVersion,
    scope: Scope,
    request: BackfillRequest,
) -> BackfillEstimate:
    """Estimate a backfill with the share, limit and rate of `request`; nothing is written."""
    kind = Kind(scope.kind)
    version_order = placement_of(registry, target).version_order
    waiting = waiting_items(scope.gallery_id, kind, scope.version_id, version_order, scope.origin)
    read = read_version(kind, target.id, version_order)
    passed = None if request.filter is None else passing(connection, waiting, request.filter, read)
    by_version = _by_version(connection, waiting, read) if passed is None else Counter[int | None](passed.values())
    found = sum(by_version.values())
    items = capped_count(found, request.share, request.limit)
    rows = (
        _sample(connection, waiting, stored_for(kind, target.id, version_order), SAMPLE[kind], passed) if items else []
    )
    sampled, seconds, tokens = _measure(database, embedder, target, scope, rows)
    macs = ItemMacs(reencode=_reencode_macs(target), transform=_transform_macs(registry, target, by_version))
    per_item = macs.reencode if kind is Kind.REENCODE else macs.transform
    now, with_target = _bytes_now(registry, connection, scope, target)
    width = (target.card.dim + target.card.side_dim) * FLOAT_BYTES
    live = _count(connection, *_live(scope))
    taken = waiting if passed is None else item.c.id.in_(key_table(connection, sorted(passed)).keys)
    # If only a part moves, the items that add most may come first.
    new = min(items, found - _already_held(connection, taken, target))
    with_side = _with_side(registry, connection, embedder, target, kind, taken, by_version)
    added = (new * target.card.dim + min(new, with_side) * target.card.side_dim) * FLOAT_BYTES
    left = _left(connection, scope, version_order, by_version, items)
    after_retiring = min(with_target + added, live * width)
    return BackfillEstimate(
        kind=kind,
        version=target.name,
        items=items,
        without_image=_without_image(connection, scope, version_order, request.filter) if kind is Kind.REENCODE else 0,
        sampled=sampled,
        seconds_per_item=seconds,
        seconds=_total_seconds(target, items, seconds, tokens, request.rate),
        bytes_now=now,
        bytes_after=now + added,
        bytes_after_retiring=None if left else after_retiring,
        macs_per_item=macs,
        macs=None if per_item is None else per_item * items,
        **_billed(target, items, tokens),
    )


def estimate_supplied(
    registry: Registry, connection: Connection, target: LoadedVersion, scope: Scope
) -> BackfillEstimate:
    """Estimate a backfill that waits for embeddings from outside: items and storage."""
    waiting = missing_items(scope.gallery_id, target.id)
    items = count_missing(connection, scope.gallery_id, target.id)
    now, with_target = _bytes_now(registry, connection, scope, target)
    added = (items - _already_held(connection, waiting, target)) * target.card.dim * FLOAT_BYTES
    return BackfillEstimate(
        kind=scope.kind,
        version=target.name,
        items=items,
        without_image=0,
        sampled=0,
        seconds_per_item=None,
        seconds=None,
        bytes_now=now,
        bytes_after=now + added,
        bytes_after_retiring=with_target + added,
        macs_per_item=ItemMacs(reencode=None, transform=None),
        macs=None,
    )


def _by_version(
    connection: Connection, waiting: ColumnElement[bool], read: ColumnElement[Any]
) -> dict[int | None, int]:
    """Version -> how many items' embeddings by it would be read; None -> how many items hold none."""
    versions = select(read.label("version")).select_from(item).where(waiting).subquery()
    counted = select(versions.c.version, func.count()).group_by(versions.c.version)
    return dict(tuple(row) for row in connection.execute(counted))


def _billed(target: LoadedVersion, items: int, tokens: float) -> dict[str, float | None]:
    """A provider's tokens and price; empty if the target is not served by an API."""
    if target.card.api is None:
        return {}
    return {"tokens": items * tokens, "price": provider_price(target.card.api, items, tokens)}


def _total_seconds(
    target: LoadedVersion, items: int, seconds: float | None, tokens: float, rate: float | None
) -> float | None:
    """By the measured seconds per item, if any; no less than the limits of a provider's API and `rate` allow."""
    total = None if seconds is None else items * seconds
    if total is not None and target.card.api is not None:  # a sample is too small to reach its limits
        total = max(total, provider_seconds(target.card.api, items, tokens))
    return total if rate is None else max(total or 0.0, items / rate)


def _measure(
    database: Database, embedder: Embedder, target: LoadedVersion, scope: Scope, rows: Sequence[SampledRow]
) -> tuple[int, float | None, float]:
    """The sample's size, seconds per item to read, compute and write (rolled back), and billed tokens per item."""
    if not rows:
        return 0, None, 0.0
    kind = Kind(scope.kind)
    move = embedder.reencode if kind is Kind.REENCODE else embedder.transform
    outcome_of(move(target, rows[:1]))  # loads the models
    started, counted = time.perf_counter(), _counted(target)
    moved, _ = outcome_of(move(target, rows))
    with database.write(dry_run=True) as connection:
        write_moved(connection, scope.gallery_id, target.id, kind, moved)
    seconds, tokens = time.perf_counter() - started, _counted(target) - counted
    return len(rows), seconds / len(rows), tokens / len(rows)


def _counted(target: LoadedVersion) -> int:
    """Tokens that a provider has billed to this process so far."""
    return 0 if target.card.api is None else target.text_encoder().tokens


def _sample(
    connection: Connection,
    waiting: ColumnElement[bool],
    stored: ColumnElement[bool],
    size: int,
    passed: Mapping[int, int] | None,
) -> Sequence[SampledRow]:
    if passed is None:
        drawn = RandomItems(connection, waiting, 0).first(size)
    else:
        drawn = np.random.default_rng(0).choice(sorted(passed), min(len(passed), size), replace=False).tolist()
    columns = (item.c.id, item.c.seq, item.c.blob, embedding.c.version_id, embedding.c.vector, embedding.c.side)
    condition = item.c.id.in_(key_table(connection, drawn).keys)
    found = connection.execute(
        select(*columns).select_from(item.join(embedding, stored)).where(condition).order_by(item.c.id)
    )
    return with_vectors(connection, all_of(SampledRow, found), "vector")


def _live(scope: Scope) -> tuple[Any, ...]:
    return item.c.gallery_id == scope.gallery_id, item.c.deleted == false()


def _elsewhere(scope: Scope, version_order: VersionOrder) -> ColumnElement[bool]:
    """Whether a version other than the target serves an item, or none."""
    return func.coalesce(first_held(version_order), 0) != scope.version_id


def _without_image(
    connection: Connection, scope: Scope, version_order: VersionOrder, given: dict[str, Any] | None
) -> int:
    """How many live items of the scope only a transform could move."""
    there = and_(*_live(scope), ~embeddable(scope.version_id), _elsewhere(scope, version_order))
    if scope.origin is not None:
        there = and_(there, served_origin(version_order, scope.origin))
    if given is not None:
        return len(passing(connection, there, given))
    return _count(connection, there)


def _bytes_now(registry: Registry, connection: Connection, scope: Scope, target: LoadedVersion) -> tuple[int, int]:
    """Bytes of all stored embeddings, and of the target's."""
    counted = (
        select(embedding.c.version_id, func.count(), func.count(embedding.c.side))
        .join(item, of_item())
        .where(item.c.gallery_id == scope.gallery_id)
        .group_by(embedding.c.version_id)
    )
    stored = {}
    for version_id, vectors, sides in connection.execute(counted):
        card = registry.by_id(version_id).card
        stored[version_id] = (vectors * card.dim + sides * card.side_dim) * FLOAT_BYTES
    return sum(stored.values()), stored.get(target.id, 0)


def _already_held(connection: Connection, waiting: ColumnElement[bool], target: LoadedVersion) -> int:
    """How many items hold an embedding by the target, which is replaced."""
    held = select(func.count()).select_from(item.join(embedding, of_item()))
    return int(connection.execute(held.where(waiting, embedding.c.version_id == target.id)).scalar_one())


def _with_side(
    registry: Registry,
    connection: Connection,
    embedder: Embedder,
    target: LoadedVersion,
    kind: Kind,
    taken: ColumnElement[bool],
    by_version: Mapping[int | None, int],
) -> int:
    """How many of the items that a backfill would move get side-information. Raises EdgeBroken."""
    if not target.card.side_dim:
        return 0
    if kind is Kind.REENCODE:
        return _count(connection, taken, ~HAS_TEXT)  # side-information is made from images
    edges = {old: embedder.forward(registry.by_id(old), target) for old in by_version if old is not None}
    return sum(by_version[old] for old, edge in edges.items() if edge is not None and edge.has_side)


def _left(
    connection: Connection, scope: Scope, version_order: VersionOrder, by_version: Mapping[int | None, int], items: int
) -> int:
    """How many live items another version would serve afterwards; an upper bound if not all waiting items move."""
    arriving = items - min(by_version.get(scope.version_id, 0), items)
    return _count(connection, *_live(scope), _elsewhere(scope, version_order)) - arriving


def _count(connection: Connection, *conditions: ColumnElement[bool]) -> int:
    """How many rows of `item` meet all conditions."""
    return int(connection.execute(select(func.count()).select_from(item).where(*conditions)).scalar_one())


def _reencode_macs(target: LoadedVersion) -> int | None:
    if not target.card.encoder:
        return None
    try:
        return encoder_macs(target.version)
    except RegraftError:
        return None


def _transform_macs(registry: Registry, target: LoadedVersion, by_version: Mapping[int | None, int]) -> float | None:
    """The mean over waiting items; None if one has no item edge to the target or no embedding to transform."""
    total = 0
    for version_id, count in by_version.items():
        if version_id is None:
            return None
        old = registry.by_id(version_id)
        edge = registry.graph().forward(old.name, target.name)
        if edge is None:
            return None
        try:
            total += count * forward_macs(edge, old.card)
        except RegraftError:
            return None
    return total / sum(by_version.values()) if by_version else None
