"""Reading deployments: the states there are, which deployments stand, and the ETag of them all.

Every function runs in its caller's transaction; `service.upgrades.deployments.lifecycle` is what changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, func, select

from service.store.tables import deployment, deployment_transition


class State(StrEnum):
    """Where a deployment is."""

    REGISTERED = "registered"
    VERIFIED = "verified"
    GATED = "gated"
    SHADOW = "shadow"
    CANARY = "canary"
    CURRENT = "current"
    SUPERSEDED = "superseded"
    ROLLED_BACK = "rolled_back"
    RETIRED = "retired"


ON_ITS_WAY = (State.REGISTERED, State.VERIFIED, State.GATED, State.SHADOW, State.CANARY)


def on_its_way(connection: Connection, gallery_id: int) -> Row[Any] | None:
    """The gallery's deployment that is not current yet, if there is one."""
    mine = (deployment.c.gallery_id == gallery_id, deployment.c.state.in_(ON_ITS_WAY))
    return connection.execute(select(deployment).where(*mine)).first()


def history(connection: Connection, gallery_id: int) -> Sequence[Row[Any]]:
    """Every deployment of a gallery, oldest first."""
    mine = select(deployment).where(deployment.c.gallery_id == gallery_id)
    return connection.execute(mine.order_by(deployment.c.id)).all()


def transitions(connection: Connection, deployment_id: int) -> Sequence[Row[Any]]:
    """The record of a deployment, oldest first."""
    mine = select(deployment_transition).where(deployment_transition.c.deployment_id == deployment_id)
    return connection.execute(mine.order_by(deployment_transition.c.id)).all()


def standing(rows: Sequence[Row[Any]]) -> list[Row[Any]]:
    """The deployments a rollback goes back through, the current one last; those that never were current left out.

    A rollback stands in the place of what it returned to.
    """
    found: list[Row[Any]] = []
    for row in rows:
        if row.since is None:
            continue
        if row.undoes_id is not None:
            del found[-2:]
        found.append(row)
    return found


def etag(connection: Connection, gallery_id: int) -> str:
    """What `If-Match` is compared with: it changes with every step of any deployment of the gallery."""
    mine = deployment_transition.c.deployment_id == deployment.c.id
    newest = select(func.coalesce(func.max(deployment_transition.c.id), 0)).select_from(
        deployment_transition.join(deployment, mine)
    )
    number = connection.execute(newest.where(deployment.c.gallery_id == gallery_id)).scalar_one()
    return f'"{gallery_id}-{number}"'
