"""Read a gallery's deployments: their states, the chain that rollbacks return along, and their common ETag.

Every function runs in its caller's transaction; `service.upgrades.deployments.lifecycle` changes deployments.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from sqlalchemy import Connection, func, select

from index.errors import RegraftError
from service.store.rows import DeploymentRow, TransitionRow, all_of, first_of, newest_of
from service.store.tables import deployment, deployment_transition


class DeploymentState(StrEnum):
    """The states of a deployment."""

    REGISTERED = "registered"
    VERIFIED = "verified"
    GATED = "gated"
    SHADOW = "shadow"
    CANARY = "canary"
    CURRENT = "current"
    SUPERSEDED = "superseded"
    ROLLED_BACK = "rolled_back"
    RETIRED = "retired"


class UnknownDeployment(RegraftError):
    """The gallery has no deployment of this number."""

    status = 404
    code = "unknown_deployment"


class ChangedMeanwhile(RegraftError):
    """A deployment of this gallery changed after the ETag in `If-Match`: read it again, then decide."""

    status = 412
    code = "changed_meanwhile"


ON_ITS_WAY = (
    DeploymentState.REGISTERED,
    DeploymentState.VERIFIED,
    DeploymentState.GATED,
    DeploymentState.SHADOW,
    DeploymentState.CANARY,
)


def on_its_way(connection: Connection, gallery_id: int) -> DeploymentRow | None:
    """The gallery's deployment that is not current yet, if there is one."""
    conditions = (deployment.c.gallery_id == gallery_id, deployment.c.state.in_(ON_ITS_WAY))
    return first_of(DeploymentRow, connection.execute(select(deployment).where(*conditions)))


def deployment_row(connection: Connection, gallery_id: int, number: int) -> DeploymentRow:
    """A deployment of a gallery. Raises UnknownDeployment."""
    conditions = (deployment.c.id == number, deployment.c.gallery_id == gallery_id)
    row = first_of(DeploymentRow, connection.execute(select(deployment).where(*conditions)))
    if row is None:
        raise UnknownDeployment(f"the gallery has no deployment {number}")
    return row


def history(connection: Connection, gallery_id: int, limit: int | None = None) -> list[DeploymentRow]:
    """Every deployment of a gallery, or the newest `limit` of them, oldest first."""
    statement = select(deployment).where(deployment.c.gallery_id == gallery_id)
    return newest_of(DeploymentRow, connection, statement, deployment.c.id, limit)


def transitions(connection: Connection, deployment_id: int) -> list[TransitionRow]:
    """The record of a deployment, oldest first."""
    statement = select(deployment_transition).where(deployment_transition.c.deployment_id == deployment_id)
    return all_of(TransitionRow, connection.execute(statement.order_by(deployment_transition.c.id)))


def rollback_chain(rows: Sequence[DeploymentRow]) -> list[DeploymentRow]:
    """The deployments that rollbacks return along, the current one last; without those that never became current.

    A rollback takes the place of the deployment that it returned to and removes the one that it undid.
    """
    chain: list[DeploymentRow] = []
    for row in rows:
        if row.since is None:
            continue
        if row.undoes_id is not None:
            del chain[-2:]
        chain.append(row)
    return chain


def etag(connection: Connection, gallery_id: int) -> str:
    """The ETag that `If-Match` is compared with: it changes with every step of any deployment of the gallery."""
    condition = deployment_transition.c.deployment_id == deployment.c.id
    newest = select(func.coalesce(func.max(deployment_transition.c.id), 0)).select_from(
        deployment_transition.join(deployment, condition)
    )
    number = connection.execute(newest.where(deployment.c.gallery_id == gallery_id)).scalar_one()
    return f'"{gallery_id}-{number}"'


def check_unchanged(connection: Connection, gallery_id: int, if_match: str | None) -> None:
    """Raise ChangedMeanwhile if `if_match` is given and is not the gallery's ETag."""
    if if_match is not None and {"*", etag(connection, gallery_id)}.isdisjoint(map(str.strip, if_match.split(","))):
        raise ChangedMeanwhile
