"""The life of a deployment: which states there are, what leads from one to the next, and the record of each step.

    registered -> verified -> gated -> shadow -> canary -> current -> superseded -> retired

States before `current` can be skipped, all but the first two, and each can end in `rolled_back`, as `current` can. A
rollback of the current version is a deployment of its own, which is born `current` and names what it undid.

A step is one transaction under the lock of its gallery's row: it is there with everything it changes, its record
included, or not at all, whoever is killed when. At most one deployment of a gallery is on its way at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from index.errors import InvalidArgument, NoEncoder, RegraftError
from service.backfills.planner import cancel_backfills
from service.errors import NoCurrentVersion
from service.registry.placement import PlacedItems, check_kept, check_reachable
from service.registry.registry import LoadedVersion, Registry
from service.registry.rollout_records import CanaryIn, ShadowIn, summary
from service.registry.version_records import registered_sha256
from service.store.repository import gallery_row, take_seq
from service.store.rows import DeploymentRow, GalleryRow, GateRow, first_of, one_of
from service.store.tables import deployment, deployment_transition, gallery, trial_report
from service.upgrades.deployments.history import (
    DeploymentState,
    check_unchanged,
    deployment_row,
    history,
    on_its_way,
    standing,
)
from service.upgrades.deployments.verdicts import REFUSE, deciding_report, named_report, weigh

Evidence = Mapping[str, Any]


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


@dataclass(frozen=True)
class TransitionRequest:
    """Who wants a step and why, and what it needs: `gate`, `checked` of the folder, the `settings` given of a trial.

    `force`: go back, whatever gets out of reach. `placed`: counts what a change does to a gallery's items.
    """

    who: str
    placed: PlacedItems
    why: str = ""
    if_match: str | None = None
    gate: int | None = None
    override: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    checked: Evidence = field(default_factory=dict)
    force: bool = False


@dataclass
class TransitionContext:
    """A deployment inside one transaction that holds its gallery's lock; `gallery` is as the lock found it."""

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
        """The version that is current as the lock found it."""
        return None if self.gallery.current_id is None else self.registry.by_id(self.gallery.current_id).name

    def change(self, **values: Any) -> None:
        """Write columns of the deployment."""
        mine = update(deployment).where(deployment.c.id == self.row.id).values(values)
        self.row = one_of(DeploymentRow, self.connection.execute(mine.returning(deployment)))


def register(transition: TransitionContext) -> Evidence:
    """Nothing changes yet."""
    return {"card_sha256": registered_sha256(transition.connection, transition.version.name)}


def verify(transition: TransitionContext) -> Evidence:
    """The folder is what was registered, and queries of the version will reach every live item."""
    gallery_id, request = transition.gallery.id, transition.request
    check_reachable(transition.connection, transition.registry, gallery_id, transition.version, request.placed)
    return request.checked


def pass_gate(transition: TransitionContext) -> Evidence:
    """A gate compared this version with the current one, and does not refuse it, or somebody says why not."""
    number = transition.request.gate
    if number is None:
        raise InvalidArgument("gate: this step needs the number of a gate report", pointer="/gate")
    row = named_report(transition.connection, transition.gallery.id, transition.version, transition.current, number)
    return _rest_on(transition, row)


def shadow(transition: TransitionContext) -> Evidence:
    """From now on queries are also answered by the version, which changes no answer: a refused one may be tried too."""
    return _try_out(transition, DeploymentState.SHADOW, ShadowIn(**transition.request.settings))


def canary(transition: TransitionContext) -> Evidence:
    """From now on queries are partly answered by the version; a canary that is changed keeps what is not named."""
    kept = transition.row.settings or {} if transition.row.state == DeploymentState.CANARY else {}
    said = _verdict(transition)
    return {**said, **_try_out(transition, DeploymentState.CANARY, CanaryIn(**{**kept, **transition.request.settings}))}


def become_current(transition: TransitionContext) -> Evidence:
    """Queries go through the version at once, and an embedding it prefers serves each item: no item is written."""
    connection, registry, now = transition.connection, transition.registry, time.time()
    if transition.gallery.current_id == transition.row.version_id:
        raise AlreadyCurrent(f"version {transition.version.name!r} is current already", pointer="/version")
    transition.version.check()
    # What was current before needs nobody's leave to return.
    said = _verdict(transition) if transition.row.undoes_id is None else {}
    _end_current(transition, DeploymentState.SUPERSEDED)
    mine = update(gallery).where(gallery.c.id == transition.gallery.id)
    connection.execute(mine.values(current_id=transition.row.version_id))
    stopped = cancel_backfills(connection, transition.gallery.id, transition.row.version_id)
    # Whoever removes an edge locks every gallery first: what is there now stays until this commit.
    registry.sync_edges()
    lost, placed = {}, transition.request.placed
    if transition.row.undoes_id is not None:
        forced = transition.request.force
        lost = check_kept(connection, registry, transition.gallery, transition.version, placed, forced)
    moved = placed.moving(transition.gallery.id, transition.version)
    transition.change(since=now, previous_id=transition.gallery.current_id, activated=moved)
    if transition.row.undoes_id is None:
        check_reachable(connection, registry, transition.gallery.id, transition.version, placed)
    return {**said, "activated": moved, "backfills_cancelled": stopped, **lost, **_measured(transition)}


def end_current(transition: TransitionContext) -> Evidence:
    """Another version takes its place, in the same transaction."""
    return {"since": transition.row.since}


def abandon(transition: TransitionContext) -> Evidence:
    """The gallery stays as it is; what the trial has shown is kept."""
    return _measured(transition)


def retire(transition: TransitionContext) -> Evidence:
    """Its embeddings are freed after this transaction, block by block; see `service.upgrades.deployments.reaper`."""
    return transition.request.checked


Transition = Callable[[TransitionContext], Evidence]
"""A step: it does what its transition means, and returns what it rests on."""

BEGINNINGS: dict[DeploymentState, Transition] = {
    DeploymentState.REGISTERED: register,
    DeploymentState.CURRENT: become_current,
    DeploymentState.RETIRED: retire,
}
"""A deployment begins as registered; a rollback as current; as retired, what frees embeddings that items brought."""

_ENDS: dict[DeploymentState, Transition] = {
    DeploymentState.CURRENT: become_current,
    DeploymentState.ROLLED_BACK: abandon,
}
_TRIALS: dict[DeploymentState, Transition] = {DeploymentState.SHADOW: shadow, DeploymentState.CANARY: canary}

TRANSITIONS: dict[DeploymentState, dict[DeploymentState, Transition]] = {
    DeploymentState.REGISTERED: {DeploymentState.VERIFIED: verify, DeploymentState.ROLLED_BACK: abandon},
    DeploymentState.VERIFIED: {DeploymentState.GATED: pass_gate, **_TRIALS, **_ENDS},
    DeploymentState.GATED: {**_TRIALS, **_ENDS},
    DeploymentState.SHADOW: {DeploymentState.CANARY: canary, **_ENDS},
    # To itself: with another share, or other limits.
    DeploymentState.CANARY: {DeploymentState.CANARY: canary, **_ENDS},
    DeploymentState.CURRENT: {DeploymentState.SUPERSEDED: end_current, DeploymentState.ROLLED_BACK: end_current},
    DeploymentState.SUPERSEDED: {DeploymentState.RETIRED: retire},
    DeploymentState.ROLLED_BACK: {DeploymentState.RETIRED: retire},
    DeploymentState.RETIRED: {},
}
"""Every legal transition and the step that makes it."""


def lock(connection: Connection, gallery_id: int, if_match: str | None = None) -> GalleryRow:
    """The gallery's row, ours until the commit. The number taken tells every replica that something changed.

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
        ways = ", ".join(legal) or "nothing else"
        raise IllegalTransition(
            f"deployment {transition.row.id} is {before.value}; from there it can become {ways}", pointer="/to"
        )
    evidence = legal[after](transition)
    transition.change(state=after.value)
    _record(transition, before, after, evidence)


def roll_back(connection: Connection, registry: Registry, gallery_id: int, request: TransitionRequest) -> DeploymentRow:
    """Undo the newest decision: end the deployment on its way, or make the version before the current one current.

    Items that only newer versions know may be out of reach then: that needs the order's `force`.

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
    rows = standing(history(connection, gallery_id))
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
    evidence = BEGINNINGS[state](transition)
    transition.change(state=state.value)
    _record(transition, None, state, evidence)
    return transition


def _record(
    transition: TransitionContext, before: DeploymentState | None, after: DeploymentState, evidence: Evidence
) -> None:
    row = {
        "deployment_id": transition.row.id,
        "before": before and before.value,
        "after": after.value,
        "who": transition.request.who,
        "why": transition.request.why or transition.request.override or "",
        "evidence": dict(evidence),
        "at": time.time(),
    }
    transition.connection.execute(insert(deployment_transition).values(row))


def _end_current(transition: TransitionContext, after: DeploymentState) -> None:
    """End the deployment that is current, if there is one: superseded, or rolled back by `transition`."""
    mine = (deployment.c.gallery_id == transition.gallery.id, deployment.c.state == DeploymentState.CURRENT.value)
    row = first_of(DeploymentRow, transition.connection.execute(select(deployment).where(*mine)))
    if row is not None:
        move(replace(transition, row=row), after if transition.row.undoes_id is None else DeploymentState.ROLLED_BACK)


def _rest_on(transition: TransitionContext, report: GateRow) -> Evidence:
    """Weigh a report; the deployment names the one it rests on, and why it goes on if that refuses."""
    said = weigh(transition.connection, transition.row.id, transition.version, report, transition.request.override)
    transition.change(gate_id=report.id, reason=said["override"] or transition.row.reason)
    return said


def _verdict(transition: TransitionContext) -> Evidence:
    """What gates say of a version that is about to answer queries; nothing where none measured it."""
    report = deciding_report(transition.connection, transition.gallery.id, transition.version, transition.current)
    if report is None:
        return {}
    if report.verdict == REFUSE:
        return _rest_on(transition, report)
    return weigh(transition.connection, transition.row.id, transition.version, report, transition.request.override)


def _try_out(transition: TransitionContext, phase: DeploymentState, settings: ShadowIn | CanaryIn) -> Evidence:
    """Begin a trial, counting from zero; what the one before it counted is kept with this step."""
    if transition.gallery.current_id is None:
        raise NoCurrentVersion("there is no current version to compare with: deploy without shadow and canary")
    if not (transition.version.card.encoder or transition.version.card.text):
        raise NoEncoder(f"version {transition.version.name!r} has no encoder: no query can be tried out on it")
    transition.version.check()
    # The deployment's row first, as whoever adds counts locks it: `rollout_records.add_counters`.
    transition.change(settings=settings.model_dump())
    counted = _measured(transition)
    mine = (trial_report.c.deployment_id == transition.row.id, trial_report.c.phase == phase.value)
    transition.connection.execute(delete(trial_report).where(*mine))
    return {"settings": transition.row.settings, **counted}


def _measured(transition: TransitionContext) -> Evidence:
    """What the trial that ends has measured, by its phase."""
    mine = (trial_report.c.deployment_id == transition.row.id, trial_report.c.phase == transition.row.state)
    return {row.phase: summary(row.report) for row in transition.connection.execute(select(trial_report).where(*mine))}
