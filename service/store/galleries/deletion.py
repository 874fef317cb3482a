"""SQL of deleting a gallery: one transaction makes it disappear for everyone, many small ones free its items.

The row of a deleted gallery has a name that no request can use. Besides its items, it is the last row of the gallery,
and it is removed at the end: as long as it exists, something is left to free.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, delete, select, update

from service.store.galleries.gallery import NOT_DELETED, take_seq
from service.store.sql.arrays import key_table
from service.store.sql.partitioned import in_gallery
from service.store.tables import (
    backfill,
    backfill_chunk,
    backfill_curve,
    backfill_failure,
    backfill_point,
    calibration,
    deployment,
    deployment_transition,
    embedding,
    evaluation,
    evaluation_embedding,
    evaluation_entry,
    gallery,
    gallery_snapshot,
    gate_report,
    item,
    item_traffic,
    trial_report,
)


def delete_gallery(connection: Connection, gallery_id: int) -> None:
    """Make a gallery disappear for everyone, with everything but its items; its lock excludes writers until the commit.

    Raises:
        UnknownGallery: it is deleted already.
    """
    take_seq(connection, gallery_id, 0)
    backfills = select(backfill.c.id).where(backfill.c.gallery_id == gallery_id)
    deployments = select(deployment.c.id).where(deployment.c.gallery_id == gallery_id)
    evaluations = select(evaluation.c.id).where(evaluation.c.gallery_id == gallery_id)
    # Adding the counts of a trial locks only its deployment.
    connection.execute(deployments.with_for_update())
    for statement in (
        delete(deployment_transition).where(deployment_transition.c.deployment_id.in_(deployments)),
        delete(trial_report).where(trial_report.c.deployment_id.in_(deployments)),
        delete(evaluation_entry).where(evaluation_entry.c.evaluation_id.in_(evaluations)),
        delete(evaluation_embedding).where(evaluation_embedding.c.evaluation_id.in_(evaluations)),
        delete(evaluation).where(evaluation.c.gallery_id == gallery_id),
        delete(calibration).where(calibration.c.gallery_id == gallery_id),
        delete(backfill_failure).where(backfill_failure.c.backfill_id.in_(backfills)),
        delete(backfill_chunk).where(backfill_chunk.c.backfill_id.in_(backfills)),
        delete(backfill_point).where(backfill_point.c.backfill_id.in_(backfills)),
        delete(backfill_curve).where(backfill_curve.c.backfill_id.in_(backfills)),
        delete(backfill).where(backfill.c.gallery_id == gallery_id),
        delete(deployment).where(deployment.c.gallery_id == gallery_id),
        delete(gate_report).where(gate_report.c.gallery_id == gallery_id),
    ):
        connection.execute(statement)
    # No gallery can have this name: its own is free, and messages can name what still depends on it.
    gone = {"name": f"(deleted {gallery_id})", "current_id": None, "deleted": time.time()}
    connection.execute(update(gallery).where(gallery.c.id == gallery_id).values(gone))


def deleted_galleries(connection: Connection) -> list[int]:
    """The galleries that were deleted and are not completely freed."""
    return list(connection.execute(select(gallery.c.id).where(~NOT_DELETED).order_by(gallery.c.id)).scalars())


def free_items(connection: Connection, gallery_id: int, after: int, limit: int) -> int | None:
    """Free the next `limit` items after key `after` of a deleted gallery.

    Returns:
        The last item's key; None: there were none left.
    """
    # Locked, so that processes that free the same gallery take turns.
    deleted = select(gallery.c.id).where(gallery.c.id == gallery_id, ~NOT_DELETED).with_for_update()
    if connection.execute(deleted).first() is None:
        return None
    statement = (
        select(item.c.id).where(item.c.gallery_id == gallery_id, item.c.id > after).order_by(item.c.id).limit(limit)
    )
    # Locked, so that no process counts a match of one (`item_traffic`) between the statements that follow.
    keys: list[int] = list(connection.execute(statement.with_for_update()).scalars())
    if not keys:
        return None
    freed = key_table(connection, keys).keys
    connection.execute(delete(embedding).where(in_gallery(embedding, gallery_id), embedding.c.item_id.in_(freed)))
    connection.execute(delete(item_traffic).where(item_traffic.c.item_id.in_(freed)))
    connection.execute(delete(item).where(item.c.id.in_(freed)))
    return keys[-1]


def forget_gallery(connection: Connection, gallery_id: int) -> None:
    """Remove the row of a deleted gallery of which nothing is left; idempotent."""
    connection.execute(delete(gallery_snapshot).where(gallery_snapshot.c.gallery_id == gallery_id))
    connection.execute(delete(gallery).where(gallery.c.id == gallery_id, ~NOT_DELETED))
