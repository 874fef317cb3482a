"""The life of a deployment: begin it, take its steps, roll it back; `steps` has what each step does.

    registered -> verified -> gated -> shadow -> canary -> current -> superseded -> retired

States before `current` can be skipped, all but the first two, and each can end in `rolled_back`, as `current` can. A
rollback of the current version is a deployment of its own, which is born `current` and names what it undid.

A step is one transaction under the lock of its gallery's row: it is there with everything it changes, its record
included, or not at all, whoever is killed when. At most one deployment of a gallery is on its way at a time.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, insert

from index.errors import RegraftError
from service.registry.registry import LoadedVersion, Registry
from service.store.repository import gallery_row, take_seq
from service.store.rows import DeploymentRow, GalleryRow, one_of
from service.store.tables import deployment
from service.upgrades.deployments.history import (
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
    """The version is the gallery's current one already."""

    status = 409
    code = "already_current"


class DeploymentActive(RegraftError):
    """Another deployment of this gallery is on its way: let it become current, or roll it back."""

    status = 409
    code = "deployment_active"


class IllegalTransition(RegraftError):
    """The deployment cannot become this from where it is."""

    status = 409
    code = "illegal_transition"


class NothingToRollBack(RegraftError):
    """No version was current before."""

    status = 409
    code = "nothing_to_roll_back"


def lock(connection: Connection, gallery_id: int, if_match: str | None = None) -> GalleryRow:
    """Lock a gallery's row until the commit. The feed number that this takes tells every replica of a change.

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
    """A new deployment of a version, `registered`.

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
        raise AlreadyCurrent(f"version {version.name!r} is current already", pointer="/version")
    return _begin(connection, registry, locked, version, DeploymentState.REGISTERED, request)


def move(transition: TransitionContext, after: DeploymentState) -> None:
    """Take one step and record it.

    Raises:
        IllegalTransition: there is no such step from where the deployment is.
        RegraftError: what the step itself refuses.
    """
    before = DeploymentState(transition.row.state)
    legal = TRANSITIONS[before]
    if after not in legal:
        states = ", ".join(legal) or "nothing else"
        raise IllegalTransition(
            f"deployment {transition.row.id} is {before.value}; from there it can become {states}", pointer="/to"
        )
    transition.enter(after, legal[after](transition), before=before)


def roll_back(connection: Connection, registry: Registry, gallery_id: int, request: TransitionRequest) -> DeploymentRow:
    """Undo the newest decision: end the deployment on its way, or make the version before the current one current.

    Items that only newer versions have embedded may be out of reach then: that needs the request's `force`.

    Returns:
        The deployment that was ended, or the new one that made the version before current again.

    Raises:
        NothingToRollBack: no version was current before, or its embeddings were freed.
        ReachLost: says how many items, by version.
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
        raise NothingToRollBack(f"no version was current before: there is nothing to roll back to{again}")
    target = registry.by_id(rows[-2].version_id)
    if rows[-2].state == DeploymentState.RETIRED:
        raise NothingToRollBack(f"version {target.name!r} was retired: deploy it again, and backfill what it needs")
    # With its gate come back the calibrations that rest on it: answers are those from before.
    back = {"undoes_id": rows[-1].id, "gate_id": rows[-2].gate_id}
    return _begin(connection, registry, locked, target, DeploymentState.CURRENT, request, **back).row


def begin_retired(
    connection: Connection, registry: Registry, locked: GalleryRow, version: LoadedVersion, request: TransitionRequest
) -> TransitionContext:
    """The record of freeing embeddings that no deployment left behind: items brought them along."""
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
