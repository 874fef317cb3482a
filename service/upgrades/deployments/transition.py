"""One step of a deployment: its request (`TransitionRequest`) and its transaction (`TransitionContext`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, insert, update

from service.registry.loaded_version import LoadedVersion
from service.registry.placement import ItemCounts
from service.registry.registry import Registry
from service.store.rows import DeploymentRow, GalleryRow, one_of
from service.store.tables import deployment, deployment_transition
from service.upgrades.deployments.history import DeploymentState

Evidence = Mapping[str, Any]
"""What a step rests on; stored in its record."""


@dataclass(frozen=True)
class TransitionRequest:
    """The request for a step: by whom, why, and with which options.

    Attributes:
        who: the name of the requesting key.
        item_counts: counts what a change does to a gallery's items.
        why: the reason that was given.
        if_match: the ETag of the gallery's deployments that the request rests on; None: any.
        gate: the number of the gate report that the step rests on.
        override: the reason for overriding a refusal by the gate.
        settings: the given settings of a shadow or canary.
        checked: evidence that the caller collected before the transaction.
        force: roll back even if items become unreachable.
    """

    who: str
    item_counts: ItemCounts
    why: str = ""
    if_match: str | None = None
    gate: int | None = None
    override: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    checked: Evidence = field(default_factory=dict)
    force: bool = False


@dataclass
class TransitionContext:
    """A deployment in a transaction that holds its gallery's lock; `gallery` is the row as the lock found it."""

    connection: Connection
    registry: Registry
    gallery: GalleryRow
    row: DeploymentRow
    request: TransitionRequest

    @property
    def version(self) -> LoadedVersion:
        """The version that is being deployed."""
        return self.registry.by_id(self.row.version_id)

    @property
    def current(self) -> str | None:
        """The name of the version that was current when the lock was taken."""
        return None if self.gallery.current_id is None else self.registry.by_id(self.gallery.current_id).name

    def change(self, **values: Any) -> None:
        """Write columns of the deployment."""
        statement = update(deployment).where(deployment.c.id == self.row.id).values(values)
        self.row = one_of(DeploymentRow, self.connection.execute(statement.returning(deployment)))

    def enter(self, state: DeploymentState, evidence: Evidence, *, before: DeploymentState | None) -> None:
        """Change the deployment's state and record the step; `before` None: the deployment begins with it."""
        self.change(state=state.value)
        record = {
            "deployment_id": self.row.id,
            "before": before and before.value,
            "after": state.value,
            "who": self.request.who,
            "why": self.request.why or self.request.override or "",
            "evidence": dict(evidence),
            "at": time.time(),
        }
        self.connection.execute(insert(deployment_transition).values(record))
