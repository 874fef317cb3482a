"""SQL of deleting a gallery: gone for everyone in one transaction, and what its items hold freed in many small ones.

A gallery that was deleted has no name that could be asked for and no row that speaks of it but its items' and its own,
which goes last: whoever finds it knows that something is left to free.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, delete, select, update

from service.store.partitioned import in_gallery
from service.store.repository import NOT_DELETED, take_seq
from service.store.sql_arrays import key_table
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
    """Have a gallery gone for everyone, with all that is not its items'. The lock keeps writers out until the commit.

    Raises:
        UnknownGallery: it was deleted before.
    """
    take_seq(connection, gallery_id, 0)
    backfills = select(backfill.c.id).where(backfill.c.gallery_id == gallery_id)
    deployments = select(deployment.c.id).where(deployment.c.gallery_id == gallery_id)
    evaluations = select(evaluation.c.id).where(evaluation.c.gallery_id == gallery_id)
    # Whoever adds up what a trial counted locks no more than its deployment.
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
    # No gallery can be called so: its name is free, and what still depends on it can be told.
    gone = {"name": f"(deleted {gallery_id})", "current_id": None, "deleted": time.time()}
    connection.execute(update(gallery).where(gallery.c.id == gallery_id).values(gone))


def deleted_galleries(connection: Connection) -> list[int]:
    """The galleries that were deleted and of which something is left."""
    return list(connection.execute(select(gallery.c.id).where(~NOT_DELETED).order_by(gallery.c.id)).scalars())


def free_items(connection: Connection, gallery_id: int, after: int, limit: int) -> int | None:
    """Free up to `limit` items of a deleted gallery, those next behind key `after`.

    Returns:
        The last one's key; None: there were none left.
    """
    # Two processes that free the same gallery take turns.
    deleted = select(gallery.c.id).where(gallery.c.id == gallery_id, ~NOT_DELETED).with_for_update()
    if connection.execute(deleted).first() is None:
        return None
    statement = (
        select(item.c.id).where(item.c.gallery_id == gallery_id, item.c.id > after).order_by(item.c.id).limit(limit)
    )
    # Locked, so that nobody counts a match of one between the statements that follow.
    keys: list[int] = list(connection.execute(statement.with_for_update()).scalars())
    if not keys:
        return None
    freed = key_table(connection, keys).keys
    connection.execute(delete(embedding).where(in_gallery(embedding, gallery_id), embedding.c.item_id.in_(freed)))
    connection.execute(delete(item_traffic).where(item_traffic.c.item_id.in_(freed)))
    connection.execute(delete(item).where(item.c.id.in_(freed)))
    return keys[-1]


def forget_gallery(connection: Connection, gallery_id: int) -> None:
    """The end of a deleted gallery of which nothing is left; harmless when it is forgotten already."""
    connection.execute(delete(gallery_snapshot).where(gallery_snapshot.c.gallery_id == gallery_id))
    connection.execute(delete(gallery).where(gallery.c.id == gallery_id, ~NOT_DELETED))
