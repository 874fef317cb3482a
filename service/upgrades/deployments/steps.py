"""The steps of deployments: the table of legal transitions (TRANSITIONS), and a function for each.

Each function makes its changes in the transaction of its `TransitionContext` and returns the evidence to record;
`service.upgrades.deployments.lifecycle` calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from sqlalchemy import delete, select, update

from index.errors import InvalidArgument, NoEncoder
from index.evaluation.gate import GateVerdict
from service.backfills.states import cancel_backfills
from service.errors import NoCurrentVersion
from service.registry.loaded_version import LoadedVersion
from service.registry.placement import check_reachable, check_rollback_reach
from service.registry.trial_counters import summary
from service.registry.trial_records import CanaryIn, ShadowIn
from service.registry.version_records import registered_sha256
from service.store.rows import DeploymentRow, GateRow, first_of
from service.store.tables import deployment, gallery, trial_report
from service.upgrades.deployments.history import DeploymentState
from service.upgrades.deployments.transition import Evidence, TransitionContext
from service.upgrades.deployments.verdicts import deciding_report, named_report, weigh


def register(transition: TransitionContext) -> Evidence:
    """Record the hash of the card; nothing else changes."""
    return {"card_sha256": registered_sha256(transition.connection, transition.version.name)}


def verify(transition: TransitionContext) -> Evidence:
    """Check that queries of the version will reach every live item; the caller has checked the version's folder."""
    gallery_id, request = transition.gallery.id, transition.request
    check_reachable(transition.connection, transition.registry, gallery_id, transition.version, request.item_counts)
    return request.checked


def pass_gate(transition: TransitionContext) -> Evidence:
    """Require a gate report on this version and the current one that does not refuse, or a reason in `override`."""
    number = transition.request.gate
    if number is None:
        raise InvalidArgument("gate: this step requires the number of a gate report", pointer="/gate")
    row = named_report(transition.connection, transition.gallery.id, transition.version, transition.current, number)
    return _rest_on(transition, row)


def shadow(transition: TransitionContext) -> Evidence:
    """Begin a shadow: the version also answers queries, but no response changes, so a refused version is allowed."""
    return _try_out(transition, DeploymentState.SHADOW, ShadowIn(**transition.request.settings))


def canary(transition: TransitionContext) -> Evidence:
    """Begin or change a canary: the version answers a share of queries. A change keeps the settings not given."""
    kept = transition.row.settings or {} if transition.row.state == DeploymentState.CANARY else {}
    verdict = _verdict(transition)
    return {
        **verdict,
        **_try_out(transition, DeploymentState.CANARY, CanaryIn(**{**kept, **transition.request.settings})),
    }


def become_current(transition: TransitionContext) -> Evidence:
    """Make the version current: queries use it at once, and placement follows from it, so no item is written."""
    connection, registry, now = transition.connection, transition.registry, time.time()
    transition.version.check()
    # A rollback returns to what was current before: it needs no verdict.
    verdict = _verdict(transition) if transition.row.undoes_id is None else {}
    _end_current(transition)
    this_gallery = update(gallery).where(gallery.c.id == transition.gallery.id)
    connection.execute(this_gallery.values(current_id=transition.row.version_id))
    stopped = cancel_backfills(connection, transition.gallery.id, transition.row.version_id)
    # A removal of an edge locks every gallery first: the edges known now stay until this commit.
    registry.sync_edges()
    lost, item_counts = {}, transition.request.item_counts
    if transition.row.undoes_id is not None:
        forced = transition.request.force
        lost = check_rollback_reach(connection, registry, transition.gallery, transition.version, item_counts, forced)
    moved = item_counts.moving(transition.gallery.id, transition.version)
    transition.change(since=now, previous_id=transition.gallery.current_id, activated=moved)
    if transition.row.undoes_id is None:
        check_reachable(connection, registry, transition.gallery.id, transition.version, item_counts)
    return {**verdict, "activated": moved, "backfills_cancelled": stopped, **lost, **_measured(transition)}


def end_current(transition: TransitionContext) -> Evidence:
    """Evidence of the current deployment's end: another version takes its place in the same transaction."""
    return {"since": transition.row.since}


def abandon(transition: TransitionContext) -> Evidence:
    """End a deployment on its way; the gallery does not change, and what a trial measured is kept."""
    return _measured(transition)


def retire(transition: TransitionContext) -> Evidence:
    """Record the check; the embeddings are freed after this transaction, see `service.upgrades.deployments.reaper`."""
    return transition.request.checked


def _end_current(transition: TransitionContext) -> None:
    """End the deployment that is current, if there is one: superseded, or rolled back by `transition`."""
    condition = (deployment.c.gallery_id == transition.gallery.id, deployment.c.state == DeploymentState.CURRENT.value)
    after = DeploymentState.SUPERSEDED if transition.row.undoes_id is None else DeploymentState.ROLLED_BACK
    row = first_of(DeploymentRow, transition.connection.execute(select(deployment).where(*condition)))
    if row is not None:
        current = replace(transition, row=row)
        current.enter(after, end_current(current), before=DeploymentState.CURRENT)


def _rest_on(transition: TransitionContext, report: GateRow) -> Evidence:
    """Weigh a report and store its number in the deployment's row, with the reason for overriding a refusal."""
    verdict = weigh(transition.connection, transition.row.id, transition.version, report, transition.request.override)
    transition.change(gate_id=report.id, reason=verdict["override"] or transition.row.reason)
    return verdict


def _verdict(transition: TransitionContext) -> Evidence:
    """The verdict of gates on a version that is about to answer queries; empty if no gate measured it."""
    report = deciding_report(transition.connection, transition.gallery.id, transition.version, transition.current)
    if report is None:
        return {}
    if report.verdict == GateVerdict.REFUSE:
        return _rest_on(transition, report)
    return weigh(transition.connection, transition.row.id, transition.version, report, transition.request.override)


def _try_out(transition: TransitionContext, phase: DeploymentState, settings: ShadowIn | CanaryIn) -> Evidence:
    """Begin a trial with counts of zero; the counts of the trial before it become evidence of this step."""
    if transition.gallery.current_id is None:
        raise NoCurrentVersion("the gallery has no current version to compare with: deploy without shadow and canary")
    _check_comparable(transition.version, transition.registry.by_id(transition.gallery.current_id))
    transition.version.check()
    # Locks the deployment's row first, as `trial_records.add_counters` does.
    transition.change(settings=settings.model_dump())
    measured = _measured(transition)
    condition = (trial_report.c.deployment_id == transition.row.id, trial_report.c.phase == phase.value)
    transition.connection.execute(delete(trial_report).where(*condition))
    return {"settings": transition.row.settings, **measured}


def _check_comparable(new: LoadedVersion, current: LoadedVersion) -> None:
    """Raise NoEncoder if no query could take part in a trial: both versions must embed images, or both texts."""
    cards = (new.card, current.card)
    if not (all(card.encoder for card in cards) or all(card.text for card in cards)):
        raise NoEncoder(
            f"{new.name!r} and the current version {current.name!r} do not both embed images, nor both texts, so no "
            "query can take part in a shadow or canary: deploy without them"
        )


def _measured(transition: TransitionContext) -> Evidence:
    """The measurements of the trial that ends, by its phase."""
    condition = (trial_report.c.deployment_id == transition.row.id, trial_report.c.phase == transition.row.state)
    reports = transition.connection.execute(select(trial_report).where(*condition))
    return {row.phase: summary(row.report) for row in reports}


Transition = Callable[[TransitionContext], Evidence]
"""A step: makes the changes of its transition and returns its evidence."""

BEGINNINGS: dict[DeploymentState, Transition] = {
    DeploymentState.REGISTERED: register,
    DeploymentState.CURRENT: become_current,
    DeploymentState.RETIRED: retire,
}
"""The first step: a deployment begins as registered, a rollback as current, a `begin_retired` record as retired."""

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
    # To itself: to change the share or the limits.
    DeploymentState.CANARY: {DeploymentState.CANARY: canary, **_ENDS},
    DeploymentState.CURRENT: {DeploymentState.SUPERSEDED: end_current, DeploymentState.ROLLED_BACK: end_current},
    DeploymentState.SUPERSEDED: {DeploymentState.RETIRED: retire},
    DeploymentState.ROLLED_BACK: {DeploymentState.RETIRED: retire},
    DeploymentState.RETIRED: {},
}
"""Every legal transition and the step that makes it."""
