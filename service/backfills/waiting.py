"""Which items a backfill has to move, and which embedding of each it reads, as SQL conditions on rows of `item`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, exists, false, or_, select

from index.version import ENCODER, TEXT_ENCODER, EdgeKind
from service.backfills.states import Kind
from service.store.galleries.embeddings import first_held, has_own_embedding
from service.store.image_store.keys import TEXT
from service.store.sql.partitioned import of_item
from service.store.tables import edge, embedding, item, version

VersionOrder = Sequence[int]
"""Version ids, the one preferred for serving an item first."""


@dataclass(frozen=True)
class Scope:
    """The items of a backfill, known before it is created: those served by `origin` (None: any)."""

    gallery_id: int
    kind: str
    version_id: int
    origin: str | None


HAS_TEXT = item.c.blob.like(f"%{TEXT}")
"""Whether a row of `item` has a text instead of an image; NULL if it has neither."""


def embeddable(version_id: int) -> ColumnElement[bool]:
    """Whether a row of `item` has an image or a text that the version can embed."""
    texts = _card_has(version_id, ("files", TEXT_ENCODER), ("api", "url"))
    images = _card_has(version_id, ("files", ENCODER))
    return and_(item.c.blob.is_not(None), or_(and_(HAS_TEXT, texts), and_(~HAS_TEXT, images)))


def _card_has(version_id: int, *fields: tuple[str, str]) -> ColumnElement[bool]:
    """Whether the version's card has one of these fields."""
    fields_present = (version.c.card[outer][inner].as_string().is_not(None) for outer, inner in fields)
    return exists().where(version.c.id == version_id, or_(*fields_present))


def _reencodes(version_id: int) -> ColumnElement[bool]:
    return and_(embeddable(version_id), ~has_own_embedding(version_id))


def _transforms(version_id: int) -> ColumnElement[bool]:
    source, own = embedding.alias("held"), embedding.alias("own")
    has_source = exists().where(of_item(source), source.c.version_id.in_(forward_from(version_id)))
    return and_(has_source, ~exists().where(of_item(own), own.c.version_id == version_id))


QUALIFIES: dict[Kind, Callable[[int], ColumnElement[bool]]] = {
    Kind.REENCODE: _reencodes,
    Kind.TRANSFORM: _transforms,
}
"""Which live items a backfill to this version could move."""


def forward_from(version_id: int) -> Select[int]:
    """SELECT of the ids of the versions from which an item edge leads to this one."""
    return select(edge.c.old_id).where(edge.c.new_id == version_id, edge.c.kind == EdgeKind.FORWARD.value)


def read_version(kind: Kind, version_id: int, version_order: VersionOrder) -> ColumnElement[Any]:
    """The version of the embedding that a backfill reads of an item: the one that serves it.

    For `transform` it is the first in the same order that has an item edge to the target, so that every worker computes
    the same embedding.
    """
    return first_held(version_order, forward_from(version_id) if kind is Kind.TRANSFORM else None)


def stored_for(kind: Kind, version_id: int, version_order: VersionOrder) -> ColumnElement[bool]:
    """ON clause that joins `item` with the embedding that a backfill reads of it."""
    return and_(of_item(), embedding.c.version_id == read_version(kind, version_id, version_order))


def waiting_items(
    gallery_id: int, kind: Kind, version_id: int, version_order: VersionOrder, origin: str | None = None
) -> ColumnElement[bool]:
    """Which rows of `item` a backfill has to move; `origin`: of the embedding that serves an item, None: any."""
    scope = [item.c.gallery_id == gallery_id, item.c.deleted == false(), QUALIFIES[kind](version_id)]
    return and_(*scope, *([served_origin(version_order, origin)] if origin else []))


def capped_count(found: int, share: float | None, limit: int | None) -> int:
    """How many of `found` items a backfill may move: `share` of them, but at least one, and at most `limit`."""
    if share is not None:
        # In decimals, as the user wrote it: 0.07 of 400 is 28, not 28.000000000000004.
        found = min(found, max(int(Decimal(repr(share)) * found), 1))
    return found if limit is None else min(found, limit)


def served_origin(version_order: VersionOrder, origin: str) -> ColumnElement[bool]:
    """Whether a row of `item` is served by an embedding of this origin."""
    served = embedding.alias("served")
    return exists().where(of_item(served), served.c.origin == origin, served.c.version_id == first_held(version_order))
