"""Typed rows of the tables; functions return these instead of SQLAlchemy's rows.

The fields are the columns of the table, in the order of `service.store.tables`; a query of other columns defines its
own row type next to it. Rows that are read by the thousand are NamedTuples, which are cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, Result, Select

R = TypeVar("R")


def all_of(kind: Callable[..., R], found: Iterable[Sequence[Any]]) -> list[R]:
    """Every row of a result, or of a part of one, as `kind`."""
    return [kind(*row) for row in found]


def newest_of(
    kind: Callable[..., R], connection: Connection, statement: Select[Any], key: ColumnElement[int], limit: int | None
) -> list[R]:
    """The selected rows with the highest keys, at most `limit` of them (None: all), in ascending order of the key."""
    return all_of(kind, connection.execute(statement.order_by(key.desc()).limit(limit)))[::-1]


def first_of(kind: Callable[..., R], found: Result[Any]) -> R | None:
    """The first row of a result as `kind`; None: there is none."""
    row = found.first()
    return None if row is None else kind(*row)


def one_of(kind: Callable[..., R], found: Result[Any]) -> R:
    """The only row of a result as `kind`."""
    return kind(*found.one())


class VersionRow(NamedTuple):
    """A registered version."""

    id: int
    name: str
    card: dict[str, Any]
    card_sha256: str
    created: float


class EdgeRow(NamedTuple):
    """An edge; `folder` None: its files are in the version's folder, or it has none."""

    id: int
    new_id: int
    old_id: int
    kind: str
    origin: str
    evidence: dict[str, Any]
    made: dict[str, Any]
    folder: str | None
    files: dict[str, str]
    created: float


class GalleryRow(NamedTuple):
    """A gallery; `next_seq`: the next number of its change feed, `deleted`: the time of its deletion, if any.

    `purged_seq`, `settling_seq`, `settling_since`: see `service.upgrades.tombstones`.
    """

    id: int
    name: str
    current_id: int | None
    next_seq: int
    created: float
    index_config: dict[str, Any] | None
    deleted: float | None
    purged_seq: int
    settling_seq: int
    settling_since: float | None


class ItemRow(NamedTuple):
    """An item."""

    id: int
    gallery_id: int
    external_id: str
    metadata: dict[str, Any]
    blob: str | None
    seq: int
    deleted: bool
    created: float


class GateRow(NamedTuple):
    """A gate report."""

    id: int
    gallery_id: int
    version_id: int
    verdict: str
    report: dict[str, Any]
    created: float


EMPTIED = -1
"""`to_free` of a retirement whose embeddings were removed at once, of which replicas have yet to be notified."""


class DeploymentRow(NamedTuple):
    """A deployment, or a rollback, whose `undoes_id` is the deployment that it undid; see the table for its fields."""

    id: int
    gallery_id: int
    version_id: int
    previous_id: int | None
    gate_id: int | None
    state: str
    activated: int
    reason: str
    created: float
    since: float | None
    undoes_id: int | None
    settings: dict[str, Any] | None
    to_free: int | None


class TransitionRow(NamedTuple):
    """One step of a deployment from a state to another; `before` None: its first step."""

    id: int
    deployment_id: int
    before: str | None
    after: str
    who: str
    why: str
    evidence: dict[str, Any]
    at: float


class EvaluationRow(NamedTuple):
    """An evaluation set."""

    id: int
    gallery_id: int
    name: str
    kind: str
    size: int
    labelled: int
    created: float
    relevant: int


@dataclass(frozen=True)
class BackfillRow:
    """A backfill; see the table for its fields. `item_limit` and `item_order` are its options `limit` and `order`."""

    id: int
    gallery_id: int
    version_id: int
    kind: str
    item_order: str
    state: str
    chunk_size: int
    rate: float | None
    next_claim: float | None
    total: int
    done: int
    skipped: int
    failed: int
    created: float
    finished: float | None
    share: float | None
    item_limit: int | None
    origin: str | None
    filter: dict[str, Any] | None
    attempts: int
    revision: int
    active_seconds: float
    resumed: float | None
    sweep_seq: int | None
    sweep_at: int
    sweep_until: float | None

    @property
    def settled(self) -> int:
        """Items whose result is final: moved, skipped or failed."""
        return self.done + self.skipped + self.failed
