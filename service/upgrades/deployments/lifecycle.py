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
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from index.errors import InvalidArgument, NoEncoder, RegraftError
from service.backfills.planner import cancel_backfills
from service.errors import NoCurrentVersion
from service.registry.placement import activate, check_kept, check_reachable
from service.registry.registry import Catalog, Registered, registered_sha256
from service.registry.rollout_records import CanaryIn, ShadowIn, summary
from service.store.repository import gallery_row, take_seq
from service.store.tables import deployment, deployment_transition, gallery, trial_report
from service.upgrades.deployments.history import State, etag, history, on_its_way, standing
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


class ChangedMeanwhile(RegraftError):
    """A deployment of this gallery changed since the ETag in `If-Match` was given out: look again, then decide."""

    status = 412
    code = "changed_meanwhile"


@dataclass(frozen=True)
class Order:
    """Who wants a step and why, and what it needs: `gate`, `checked` of the folder, the `settings` given of a trial.

    `force`: go back, whatever gets out of reach.
    """

    who: str
    why: str = ""
    if_match: str | None = None
    gate: int | None = None
    override: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    checked: Evidence = field(default_factory=dict)
    force: bool = False


@dataclass
class Moving:
    """A deployment inside one transaction that holds its gallery's lock; `gallery` is as the lock found it."""

    connection: Connection
    catalog: Catalog
    gallery: Row[Any]
    row: Row[Any]
    order: Order

    @property
    def version(self) -> Registered:
        """The version that is being deployed."""
        return self.catalog.by_id(self.row.version_id)

    @property
    def current(self) -> str | None:
        """The version that is current as the lock found it."""
        return None if self.gallery.current_id is None else self.catalog.by_id(self.gallery.current_id).name

    def change(self, **values: Any) -> None:
        """Write columns of the deployment."""
        mine = update(deployment).where(deployment.c.id == self.row.id).values(values)
        self.row = self.connection.execute(mine.returning(deployment)).one()


# The steps: each does what its transition means, and returns what it rests on.


def register(moving: Moving) -> Evidence:
    """Nothing changes yet."""
    return {"card_sha256": registered_sha256(moving.connection, moving.version.name)}


def verify(moving: Moving) -> Evidence:
    """The folder is what was registered, and queries of the version will reach every live item."""
    check_reachable(moving.connection, moving.catalog, moving.gallery.id, moving.version)
    return moving.order.checked


def pass_gate(moving: Moving) -> Evidence:
    """A gate compared this version with the current one, and does not refuse it, or somebody says why not."""
    number = moving.order.gate
    if number is None:
        raise InvalidArgument("gate: this step needs the number of a gate report", pointer="/gate")
    row = named_report(moving.connection, moving.gallery.id, moving.version, moving.current, number)
    return _rest_on(moving, row)


def shadow(moving: Moving) -> Evidence:
    """From now on queries are also answered by the version, which changes no answer: a refused one may be tried too."""
    return _try_out(moving, State.SHADOW, ShadowIn(**moving.order.settings))


def canary(moving: Moving) -> Evidence:
    """From now on queries are partly answered by the version; a canary that is changed keeps what is not named."""
    kept = moving.row.settings if moving.row.state == State.CANARY else {}
    said = _verdict(moving)
    return {**said, **_try_out(moving, State.CANARY, CanaryIn(**{**kept, **moving.order.settings}))}


def become_current(moving: Moving) -> Evidence:
    """Queries go through the version at once, and items that hold an embedding it prefers move to it."""
    connection, now = moving.connection, time.time()
    if moving.gallery.current_id == moving.row.version_id:
        raise AlreadyCurrent(f"version {moving.version.name!r} is current already", pointer="/version")
    moving.version.check()
    # What was current before needs nobody's leave to return.
    said = _verdict(moving) if moving.row.undoes_id is None else {}
    _end_current(moving, State.SUPERSEDED)
    mine = update(gallery).where(gallery.c.id == moving.gallery.id)
    connection.execute(mine.values(current_id=moving.row.version_id))
    stopped = cancel_backfills(connection, moving.gallery.id, moving.row.version_id)
    # Whoever removes an edge locks every gallery first: what is there now stays until this commit.
    moving.catalog.sync_edges()
    lost = {}
    if moving.row.undoes_id is not None:
        lost = check_kept(connection, moving.catalog, moving.gallery, moving.version, moving.order.force)
    moved = activate(connection, moving.catalog, moving.gallery.id, moving.version)
    moving.change(since=now, previous_id=moving.gallery.current_id, activated=moved)
    if moving.row.undoes_id is None:
        check_reachable(connection, moving.catalog, moving.gallery.id, moving.version)
    return {**said, "activated": moved, "backfills_cancelled": stopped, **lost, **_measured(moving)}


def end_current(moving: Moving) -> Evidence:
    """Another version takes its place, in the same transaction."""
    return {"since": moving.row.since}


def abandon(moving: Moving) -> Evidence:
    """The gallery stays as it is; what the trial has shown is kept."""
    return _measured(moving)


def retire(moving: Moving) -> Evidence:
    """Its embeddings are freed after this transaction, block by block; see `service.upgrades.deployments.freeing`."""
    return moving.order.checked


Step = Callable[[Moving], Evidence]

BEGINNINGS: dict[State, Step] = {
    State.REGISTERED: register,
    State.CURRENT: become_current,
    State.RETIRED: retire,
}
"""A deployment begins as registered; a rollback as current; as retired, what frees embeddings that items brought."""

TRANSITIONS: dict[State, dict[State, Step]] = {
    State.REGISTERED: {State.VERIFIED: verify, State.ROLLED_BACK: abandon},
    State.VERIFIED: {
        State.GATED: pass_gate,
        State.SHADOW: shadow,
        State.CANARY: canary,
        State.CURRENT: become_current,
        State.ROLLED_BACK: abandon,
    },
    State.GATED: {
        State.SHADOW: shadow,
        State.CANARY: canary,
        State.CURRENT: become_current,
        State.ROLLED_BACK: abandon,
    },
    State.SHADOW: {State.CANARY: canary, State.CURRENT: become_current, State.ROLLED_BACK: abandon},
    # To itself: with another share, or other limits.
    State.CANARY: {State.CANARY: canary, State.CURRENT: become_current, State.ROLLED_BACK: abandon},
    State.CURRENT: {State.SUPERSEDED: end_current, State.ROLLED_BACK: end_current},
    State.SUPERSEDED: {State.RETIRED: retire},
    State.ROLLED_BACK: {State.RETIRED: retire},
    State.RETIRED: {},
}
"""Every legal transition and the step that makes it."""


def lock(connection: Connection, gallery_id: int, if_match: str | None = None) -> Row[Any]:
    """The gallery's row, ours until the commit. The number taken tells every replica that something changed.

    Raises:
        UnknownGallery: it was deleted.
        ChangedMeanwhile: `if_match` is not the gallery's ETag.
    """
    take_seq(connection, gallery_id, 1)
    row = gallery_row(connection, gallery_id)
    assert row is not None
    if if_match is not None and not _matches(if_match, etag(connection, gallery_id)):
        raise ChangedMeanwhile
    return row


def begin(connection: Connection, catalog: Catalog, gallery_id: int, version: Registered, order: Order) -> Moving:
    """A new deployment of a version, `registered`.

    Raises:
        AlreadyCurrent: the version is current.
        DeploymentActive: another deployment of the gallery is on its way.
        ChangedMeanwhile: see `lock`.
    """
    locked = lock(connection, gallery_id, order.if_match)
    if other := on_its_way(connection, gallery_id):
        named = catalog.by_id(other.version_id).name
        raise DeploymentActive(f"deployment {other.id} of {named!r} is {other.state}: finish it or roll it back")
    if locked.current_id == version.id:
        raise AlreadyCurrent(f"version {version.name!r} is current already", pointer="/version")
    return _begin(connection, catalog, locked, version, State.REGISTERED, order)


def move(moving: Moving, after: State) -> None:
    """Take one step and record it.

    Raises:
        IllegalTransition: there is no such step from where the deployment is.
        RegraftError: what the step itself refuses.
    """
    before = State(moving.row.state)
    legal = TRANSITIONS[before]
    if after not in legal:
        ways = ", ".join(legal) or "nothing else"
        raise IllegalTransition(
            f"deployment {moving.row.id} is {before.value}; from there it can become {ways}", pointer="/to"
        )
    evidence = legal[after](moving)
    moving.change(state=after.value)
    _record(moving, before, after, evidence)


def roll_back(connection: Connection, catalog: Catalog, gallery_id: int, order: Order) -> Row[Any]:
    """Undo the newest decision: end the deployment on its way, or make the version before the current one current.

    Items that only newer versions know may be out of reach then: that needs the order's `force`.

    Returns:
        The deployment that was ended, or the new one that made the version before current again.

    Raises:
        NothingToRollBack: no version was current before, or its embeddings were freed.
        ReachLost: says how many items, by version.
        ChangedMeanwhile: see `lock`.
    """
    locked = lock(connection, gallery_id, order.if_match)
    if row := on_its_way(connection, gallery_id):
        moving = Moving(connection, catalog, locked, row, order)
        move(moving, State.ROLLED_BACK)
        return moving.row
    rows = standing(history(connection, gallery_id))
    if len(rows) < 2:
        raise NothingToRollBack("no version was current before: there is nothing to roll back to")
    target = catalog.by_id(rows[-2].version_id)
    if rows[-2].state == State.RETIRED:
        raise NothingToRollBack(f"version {target.name!r} was retired: deploy it again, and backfill what it needs")
    # With its gate come back the calibrations that rest on it: answers are those from before.
    back = {"undoes_id": rows[-1].id, "gate_id": rows[-2].gate_id}
    return _begin(connection, catalog, locked, target, State.CURRENT, order, **back).row


def begin_retired(
    connection: Connection, catalog: Catalog, locked: Row[Any], version: Registered, order: Order
) -> Moving:
    """The record of freeing embeddings that no deployment left behind: items brought them along."""
    return _begin(connection, catalog, locked, version, State.RETIRED, order)


def _begin(
    connection: Connection,
    catalog: Catalog,
    locked: Row[Any],
    version: Registered,
    state: State,
    order: Order,
    **values: Any,
) -> Moving:
    row = {
        "gallery_id": locked.id,
        "version_id": version.id,
        "previous_id": locked.current_id,
        "state": State.REGISTERED.value,
        "activated": 0,
        "reason": order.why,
        "created": time.time(),
        **values,
    }
    inserted = connection.execute(insert(deployment).values(row).returning(deployment)).one()
    moving = Moving(connection, catalog, locked, inserted, order)
    evidence = BEGINNINGS[state](moving)
    moving.change(state=state.value)
    _record(moving, None, state, evidence)
    return moving


def _record(moving: Moving, before: State | None, after: State, evidence: Evidence) -> None:
    row = {
        "deployment_id": moving.row.id,
        "before": before and before.value,
        "after": after.value,
        "who": moving.order.who,
        "why": moving.order.why or moving.order.override or "",
        "evidence": dict(evidence),
        "at": time.time(),
    }
    moving.connection.execute(insert(deployment_transition).values(row))


def _end_current(moving: Moving, after: State) -> None:
    """End the deployment that is current, if there is one: superseded, or rolled back by `moving`."""
    mine = (deployment.c.gallery_id == moving.gallery.id, deployment.c.state == State.CURRENT.value)
    row = moving.connection.execute(select(deployment).where(*mine)).first()
    if row is not None:
        ended = Moving(moving.connection, moving.catalog, moving.gallery, row, moving.order)
        move(ended, after if moving.row.undoes_id is None else State.ROLLED_BACK)


def _rest_on(moving: Moving, report: Row[Any]) -> Evidence:
    """Weigh a report; the deployment names the one it rests on, and why it goes on if that refuses."""
    said = weigh(moving.connection, moving.row.id, moving.version, report, moving.order.override)
    moving.change(gate_id=report.id, reason=said["override"] or moving.row.reason)
    return said


def _verdict(moving: Moving) -> Evidence:
    """What gates say of a version that is about to answer queries; nothing where none measured it."""
    report = deciding_report(moving.connection, moving.gallery.id, moving.version, moving.current)
    if report is None:
        return {}
    if report.verdict == REFUSE:
        return _rest_on(moving, report)
    return weigh(moving.connection, moving.row.id, moving.version, report, moving.order.override)


def _try_out(moving: Moving, phase: State, settings: ShadowIn | CanaryIn) -> Evidence:
    """Begin a trial, counting from zero; what the one before it counted is kept with this step."""
    if moving.gallery.current_id is None:
        raise NoCurrentVersion("there is no current version to compare with: deploy without shadow and canary")
    if not moving.version.card.encoder:
        raise NoEncoder(f"version {moving.version.name!r} has no encoder: no query can be tried out on it")
    moving.version.check()
    counted = _measured(moving)
    mine = (trial_report.c.deployment_id == moving.row.id, trial_report.c.phase == phase.value)
    moving.connection.execute(delete(trial_report).where(*mine))
    moving.change(settings=settings.model_dump())
    return {"settings": moving.row.settings, **counted}


def _measured(moving: Moving) -> Evidence:
    """What the trial that ends has measured, by its phase."""
    mine = (trial_report.c.deployment_id == moving.row.id, trial_report.c.phase == moving.row.state)
    rows = moving.connection.execute(select(trial_report).where(*mine))
    return {row.phase: summary(row.report) for row in rows}


def _matches(if_match: str, current: str) -> bool:
    return "*" in if_match.split(",") or current in [given.strip() for given in if_match.split(",")]
