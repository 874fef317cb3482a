"""The curve of a backfill in SQL, and its public description: claim a mark, store its point, give up.

A mark is claimed by inserting its row, so that one process measures it; the row becomes a point when it is stored.
Every function runs in its caller's transaction. The gallery's row is locked before rows that belong to it, so that
processes do not deadlock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from sqlalchemy import Connection, Update, delete, func, insert, or_, select, update

from index.evaluation.ordering import BackfillCurve
from regraft.models import CurveInfo, CurvePoint
from service.backfills.states import BackfillState
from service.store.galleries.gallery import take_seq
from service.store.rows import BackfillRow, all_of, one_of
from service.store.sql.arrays import INSERT
from service.store.sql.database_clock import now
from service.store.tables import backfill, backfill_curve, backfill_point, gallery
from service.upgrades.curves.probes import ChosenQueries, CurveIn
from service.upgrades.curves.scoring import Measurement

CLAIM_SECONDS = 60.0
"""A claim not renewed for this long is dead; so is one this far in the future, as the clock was set back."""
ERROR_LENGTH = 1024


class CurveState(StrEnum):
    """The states of a curve."""

    MEASURING = "measuring"
    COMPLETE = "complete"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Curve:
    """The public description of a curve, and the id of each point's event."""

    shown: CurveInfo
    events: Sequence[int]


@dataclass(frozen=True)
class GalleryBackfill(BackfillRow):
    """A backfill, and the version that is current in its gallery."""

    current_id: int | None


@dataclass(frozen=True)
class CurveJob(GalleryBackfill):
    """A backfill whose curve is being measured: the curve's request, and the greatest share that has a point."""

    asked: dict[str, Any]
    measured: float


def open_curve(
    connection: Connection,
    backfill_id: int,
    owner: str,
    request: CurveIn,
    chosen: ChosenQueries,
    started: Measurement,
    seq: int,
) -> None:
    """Store the curve of a new backfill, with the point measured before the first item moves."""
    values = {"asked": request.model_dump(), "chosen": chosen, "state": CurveState.MEASURING}
    connection.execute(insert(backfill_curve).values(backfill_id=backfill_id, **values))
    row = {"backfill_id": backfill_id, "mark": 0, "owner": owner, "claimed": now()}
    point = {"event": _next_event(connection, backfill_id), "share": 0.0, "moved": 0, "meanwhile": 0}
    connection.execute(insert(backfill_point).values(row | point | _measured(started, seq)))


def measuring_jobs(connection: Connection) -> list[CurveJob]:
    """The backfills whose curves are being measured, oldest first."""
    measured = select(func.max(backfill_point.c.share)).where(backfill_point.c.backfill_id == backfill.c.id)
    columns = (backfill, gallery.c.current_id, backfill_curve.c.asked, measured.scalar_subquery())
    joined = backfill.join(backfill_curve, backfill_curve.c.backfill_id == backfill.c.id).join(
        gallery, gallery.c.id == backfill.c.gallery_id
    )
    statement = select(*columns).select_from(joined).where(backfill_curve.c.state == CurveState.MEASURING)
    return all_of(CurveJob, connection.execute(statement.order_by(backfill.c.id)))


def due_mark(job: CurveJob) -> int | None:
    """The newest mark that the backfill has reached, if it is not measured yet; earlier ones are skipped.

    The last mark is reached only when the backfill is done: until then, items written meanwhile may be planned.
    """
    marks = int(job.asked["marks"])
    if job.state == BackfillState.DONE:
        return marks
    if job.settled >= job.total:
        return None
    reached = _mark(job.settled / job.total, marks)
    return reached if reached > _mark(job.measured, marks) else None


def is_last(job: CurveJob, mark: int | None) -> bool:
    """Whether this is the mark of a backfill that is done."""
    return bool(mark == job.asked["marks"])


def claim(connection: Connection, backfill_id: int, mark: int, owner: str) -> bool:
    """Claim a mark; returns whether this process has it. The caller holds the gallery's lock against deletion."""
    claimed = {"owner": owner, "claimed": now()}
    row = INSERT[connection.dialect.name](backfill_point).values(backfill_id=backfill_id, mark=mark, **claimed)
    # The returned row and not a row count: for an INSERT drivers differ about that.
    if connection.execute(row.on_conflict_do_nothing().returning(backfill_point.c.mark)).first():
        return True
    dead = ~backfill_point.c.claimed.between(now() - CLAIM_SECONDS, now() + CLAIM_SECONDS)
    takeover = _claimed(backfill_id, mark).where(or_(dead, backfill_point.c.owner == owner))
    return bool(connection.execute(takeover.values(**claimed)).rowcount)


def renew(connection: Connection, backfill_id: int, mark: int, owner: str) -> None:
    """Renew a claim, so that no other process takes the mark over; no effect if one has, or if the point is stored."""
    statement = _claimed(backfill_id, mark).where(backfill_point.c.owner == owner)
    connection.execute(statement.values(claimed=now()))


def release(connection: Connection, backfill_id: int, mark: int, owner: str) -> None:
    """Give up a claim, so that the mark can be claimed again."""
    conditions = (
        backfill_point.c.backfill_id == backfill_id,
        backfill_point.c.mark == mark,
        backfill_point.c.owner == owner,
    )
    connection.execute(delete(backfill_point).where(*conditions, backfill_point.c.event.is_(None)))


def store(connection: Connection, before: CurveJob, mark: int, owner: str, measurement: Measurement, seq: int) -> bool:
    """Store the point of a claimed mark; `before` is the backfill when measuring began, from `measuring_jobs`.

    Returns:
        False if nothing is written, because another process took the mark over, or the backfill was abandoned.
    """
    take_seq(connection, before.gallery_id, 0)
    event = _next_event(connection, before.id)
    joined = select(backfill, gallery.c.current_id).join(gallery, gallery.c.id == backfill.c.gallery_id)
    after = one_of(GalleryBackfill, connection.execute(joined.where(backfill.c.id == before.id)))
    at_end = is_last(before, mark)
    point = {
        "event": event,
        "share": 1.0 if at_end else (_share(before) + _share(after)) / 2,
        "moved": before.done,
        "meanwhile": after.done - before.done,
        **_measured(measurement, seq),
    }
    statement = _claimed(before.id, mark).where(backfill_point.c.owner == owner)
    if abandoned(after) or not connection.execute(statement.values(point)).rowcount:
        return False
    overtaken = (backfill_point.c.backfill_id == before.id, backfill_point.c.mark < mark)
    connection.execute(delete(backfill_point).where(*overtaken, backfill_point.c.event.is_(None)))
    state = CurveState.COMPLETE if at_end else CurveState.MEASURING
    connection.execute(_curve(before.id).values(state=state, error=None))
    return True


def abandoned(job: GalleryBackfill) -> bool:
    """Whether a backfill was cancelled, or its target is no longer the gallery's current version."""
    return job.state == BackfillState.CANCELLED or job.current_id != job.version_id


def set_state(connection: Connection, job: CurveJob, error: str | None, state: CurveState) -> None:
    """Store why a point is missing, or that there will be no more. Raises UnknownGallery."""
    take_seq(connection, job.gallery_id, 0)
    _next_event(connection, job.id)
    values = {"state": state, **({} if error is None else {"error": error[:ERROR_LENGTH]})}
    connection.execute(_curve(job.id).values(values))


def chosen_of(connection: Connection, backfill_id: int) -> ChosenQueries:
    """The queries of a curve."""
    statement = select(backfill_curve.c.chosen).where(backfill_curve.c.backfill_id == backfill_id)
    return [(number, blob) for number, blob in connection.execute(statement).scalar_one()]


def curve_of(connection: Connection, backfill_id: int) -> Curve | None:
    """The curve as far as it is measured; None: the backfill has none."""
    row = connection.execute(select(backfill_curve).where(backfill_curve.c.backfill_id == backfill_id)).first()
    if row is None:
        return None
    conditions = (backfill_point.c.backfill_id == backfill_id, backfill_point.c.event.is_not(None))
    points = connection.execute(select(backfill_point).where(*conditions).order_by(backfill_point.c.share)).all()
    request = CurveIn(**row.asked)
    curve = BackfillCurve(np.array([p.share for p in points]), np.array([p.value for p in points]))
    shown = CurveInfo(
        state=row.state,
        error=row.error,
        metric=request.measured if request.labelled else f"recall@{request.k}",
        label=request.label,
        evaluation=request.evaluation,
        sample=request.sample,
        seed=request.seed,
        marks=request.marks,
        points=[CurvePoint(**{name: getattr(p, name) for name in CurvePoint.model_fields}) for p in points],
        area=curve.area if row.state == CurveState.COMPLETE else None,
        largest_dip=curve.largest_dip,
    )
    return Curve(shown, [p.event for p in points])


def _measured(measurement: Measurement, seq: int) -> dict[str, Any]:
    score = measurement.score
    values = {"value": score.value, "low": score.low, "high": score.high}
    return {**values, "queries": measurement.queries, "seq": seq, "at": time.time()}


def _next_event(connection: Connection, backfill_id: int) -> int:
    """Reserve two event ids and return the first, that of a point; the second is that of the backfill's progress."""
    grown = update(backfill).where(backfill.c.id == backfill_id).values(revision=backfill.c.revision + 2)
    return int(connection.execute(grown.returning(backfill.c.revision)).scalar_one()) - 1


def _claimed(backfill_id: int, mark: int) -> Update:
    conditions = (backfill_point.c.backfill_id == backfill_id, backfill_point.c.mark == mark)
    return update(backfill_point).where(*conditions, backfill_point.c.event.is_(None))


def _curve(backfill_id: int) -> Update:
    return update(backfill_curve).where(backfill_curve.c.backfill_id == backfill_id)


def _share(job: BackfillRow) -> float:
    return job.settled / max(job.total, 1)


def _mark(share: float, marks: int) -> int:
    return math.floor(share * marks + 1e-9)
