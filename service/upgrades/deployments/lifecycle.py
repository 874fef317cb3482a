"""The life cycle of a deployment: `begin` it, `move` it to the next state, `roll_back`; `steps` does each step's work.

    registered -> verified -> gated -> shadow -> canary -> current -> superseded -> retired

`gated`, `shadow` and `canary` can be skipped, and each state up to `current` can end in `rolled_back`. A rollback of
the current version is a separate deployment, which begins as `current` and names the deployment that it undid.

A step is one transaction, with its record, under the lock of its gallery's row: after a kill it is done completely or
not at all. At most one deployment of a gallery is on its way, that is not yet current, at a time.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, insert

from index.errors import RegraftError
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.store.galleries.gallery import gallery_row, take_seq
from service.store.rows import DeploymentRow, GalleryRow, one_of
from service.store.tables import deployment
from service.upgrades.deployments.history import (
    ON_ITS_WAY,
    DeploymentState,
    check_unchanged,
    deployment_row,
    history,
    on_its_way,
    rollback_chain,
)
from service.upgrades.deployments.steps import BEGINNINGS, TRANSITIONS
from service.upgrades.deployments.transition import TransitionContext, TransitionRequest


class AlreadyCurrent(RegraftError):
    """The version is already the gallery's current one."""

    status = 409
    code = "already_current"


class DeploymentActive(RegraftError):
    """Another deployment of this gallery is in progress: finish it or roll it back."""

    status = 409
    code = "deployment_active"


class IllegalTransition(RegraftError):
    """The deployment cannot move to this state from its current one."""

    status = 409
    code = "illegal_transition"


class NothingToRollBack(RegraftError):
    """No version was current before."""

    status = 409
    code = "nothing_to_roll_back"


def lock(connection: Connection, gallery_id: int, if_match: str | None = None) -> GalleryRow:
    """Lock a gallery's row until the commit, and take a feed number, by which every replica notices the change.

    Raises:
        UnknownGallery: it was deleted.
        ChangedMeanwhile: `if_match` is not the gallery's ETag.
    """
    take_seq(connection, gallery_id, 1)
    row = gallery_row(connection, gallery_id)
    assert row is not None
    check_unchanged(connection, gallery_id, if_match)
    return row


def begin(
    connection: Connection, registry: Registry, gallery_id: int, version: LoadedVersion, request: TransitionRequest
) -> TransitionContext:
    """Begin a deployment of a version, in state `registered`.

    Raises:
        AlreadyCurrent: the version is current.
        DeploymentActive: another deployment of the gallery is on its way.
        ChangedMeanwhile: see `lock`.
    """
    locked = lock(connection, gallery_id, request.if_match)
    if other := on_its_way(connection, gallery_id):
        named = registry.by_id(other.version_id).name
        raise DeploymentActive(f"deployment {other.id} of {named!r} is {other.state}: finish it or roll it back")
    if locked.current_id == version.id:
        raise AlreadyCurrent(f"version {version.name!r} is already current", pointer="/version")
    return _begin(connection, registry, locked, version, DeploymentState.REGISTERED, request)


def move(transition: TransitionContext, after: DeploymentState) -> None:
    """Take one step and record it.

    Raises:
        IllegalTransition: there is no such step from the deployment's state.
        RegraftError: the step's own checks failed.
    """
    before = DeploymentState(transition.row.state)
    legal = TRANSITIONS[before]
    if after not in legal:
        raise IllegalTransition(f"deployment {transition.row.id} is {before.value}; {_possible(before)}", pointer="/to")
    transition.enter(after, legal[after](transition), before=before)


def _possible(state: DeploymentState) -> str:
    """What a client can do with a deployment in this state, in words."""
    if state is DeploymentState.CURRENT:
        return "legal next states: none; a rollback returns to the version before it"
    if state in ON_ITS_WAY:
        steps = ", ".join(step for step in TRANSITIONS[state] if step is not DeploymentState.ROLLED_BACK)
        return f"legal next states: {steps}; a rollback ends it"
    return "legal next states: none; it is over, so begin another deployment"


def roll_back(connection: Connection, registry: Registry, gallery_id: int, request: TransitionRequest) -> DeploymentRow:
    """Undo the newest decision: end the deployment on its way, or make the version before the current one current.

    If items become unreachable, because only newer versions have embedded them, the request needs `force`.

    Returns:
        The deployment that was ended, or the new one that made the previous version current again.

    Raises:
        NothingToRollBack: no version was current before, or its embeddings were freed.
        ReachLost: items would become unreachable; says how many, by version.
        ChangedMeanwhile: see `lock`.
    """
    locked = lock(connection, gallery_id, request.if_match)
    if row := on_its_way(connection, gallery_id):
        transition = TransitionContext(connection, registry, locked, row, request)
        move(transition, DeploymentState.ROLLED_BACK)
        return transition.row
    rows = rollback_chain(history(connection, gallery_id))
    if len(rows) < 2:
        undone = rows and rows[-1].undoes_id and deployment_row(connection, gallery_id, rows[-1].undoes_id)
        again = f"; {registry.by_id(undone.version_id).name!r} was rolled back: deploy it to return" if undone else ""
        raise NothingToRollBack(f"there is no previous version to roll back to{again}")
    target = registry.by_id(rows[-2].version_id)
    if rows[-2].state == DeploymentState.RETIRED:
        raise NothingToRollBack(f"version {target.name!r} was retired: deploy it again and start a backfill")
    # The gate of the earlier deployment brings back its calibrations, so that answers are as before.
    back = {"undoes_id": rows[-1].id, "gate_id": rows[-2].gate_id}
    return _begin(connection, registry, locked, target, DeploymentState.CURRENT, request, **back).row


def begin_retired(
    connection: Connection, registry: Registry, locked: GalleryRow, version: LoadedVersion, request: TransitionRequest
) -> TransitionContext:
    """Record the freeing of embeddings that came with items, not from a deployment of the version."""
    return _begin(connection, registry, locked, version, DeploymentState.RETIRED, request)


def _begin(
    connection: Connection,
    registry: Registry,
    locked: GalleryRow,
    version: LoadedVersion,
    state: DeploymentState,
    request: TransitionRequest,
    **values: Any,
) -> TransitionContext:
    row = {
        "gallery_id": locked.id,
        "version_id": version.id,
        "previous_id": locked.current_id,
        "state": DeploymentState.REGISTERED.value,
        "activated": 0,
        "reason": request.why,
        "created": time.time(),
        **values,
    }
    inserted = one_of(DeploymentRow, connection.execute(insert(deployment).values(row).returning(deployment)))
    transition = TransitionContext(connection, registry, locked, inserted, request)
    transition.enter(state, BEGINNINGS[state](transition), before=None)
    return transition
