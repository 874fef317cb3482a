"""Trials in the database: the settings of a shadow or canary, the running one of a gallery, and its stored counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from sqlalchemy import Connection, insert, select, update

from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.registry.trial_counters import Counters, counters_from_json
from service.schemas import Body
from service.store.tables import deployment, trial_report

SHADOW, CANARY = "shadow", "canary"
RECENT = 100
"""A canary's limits apply to its newest answers: this many times `min_queries`, up to twice as many.

Over all answers, a version that breaks late would serve about as long again before this is noticed. Over only ten times
`min_queries`, a version with half the error rate of a 1 % limit would exceed it by chance sooner or later.
"""

Share = Annotated[float, Field(gt=0, le=1)]


class ShadowIn(Body):
    """A shadow: the share of queries that both versions answer."""

    share: Share = 1.0


class CanaryIn(Body):
    """A canary: the share of queries that the new version answers, and the limits beyond which it is rolled back.

    The limits apply once the new version has answered `min_queries`.
    """

    share: Share = 0.05
    max_error_rate: Annotated[float | None, Field(ge=0, le=1)] = None
    max_p99_ms: Annotated[float | None, Field(gt=0)] = None
    min_queries: Annotated[int, Field(ge=1)] = 100


@dataclass(frozen=True)
class Trial:
    """The running trial of a gallery."""

    deployment: int
    version: LoadedVersion
    phase: str
    settings: Mapping[str, Any]

    @property
    def share(self) -> float:
        """The share of queries that take part, in (0, 1]."""
        return float(self.settings["share"])


def active_trial(connection: Connection, registry: Registry, gallery_id: int) -> tuple[Trial | None, tuple[int, ...]]:
    """The running trial of a gallery, and the gates on which its current deployment and the trial rest."""
    active = deployment.c.state.in_((SHADOW, CANARY, "current"))
    rows = connection.execute(
        select(deployment).where(deployment.c.gallery_id == gallery_id, active).order_by(deployment.c.id)
    ).all()
    trials = [Trial(row.id, registry.by_id(row.version_id), row.state, row.settings) for row in rows if row.settings]
    trial = next((found for found in trials if found.phase in (SHADOW, CANARY)), None)
    return trial, tuple(row.gate_id for row in rows if row.gate_id is not None)


def trial_versions(connection: Connection) -> dict[int, int]:
    """Gallery -> the version in shadow or canary, of all galleries that have one."""
    statement = select(deployment.c.gallery_id, deployment.c.version_id)
    rows = connection.execute(statement.where(deployment.c.state.in_((SHADOW, CANARY))))
    return {row.gallery_id: row.version_id for row in rows}


def report_of(connection: Connection, deployment_id: int) -> dict[str, dict[str, Any]]:
    """The counts of a deployment's trials since they began, by phase."""
    rows = connection.execute(select(trial_report).where(trial_report.c.deployment_id == deployment_id))
    return {row.phase: row.report for row in rows}


def add_counters(
    connection: Connection, deployment_id: int, phase: str, counters: Counters
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Add counts to a report; returns the trial's settings and newest counts, None if the trial is over."""
    # The lock keeps two processes from overwriting each other's report.
    statement = select(deployment.c.settings).where(deployment.c.id == deployment_id, deployment.c.state == phase)
    trial = connection.execute(statement.with_for_update()).first()
    if trial is None:
        return None
    conditions = (trial_report.c.deployment_id == deployment_id, trial_report.c.phase == phase)
    stored = connection.execute(select(trial_report.c.report).where(*conditions)).scalar()
    total = counters_from_json(stored) if stored else Counters()
    total += counters
    parts = _newest(stored, counters, RECENT * trial.settings.get("min_queries", 1))
    report = {**total.as_json(), "recent": [part.as_json() for part in parts]}
    if stored is None:
        values = {"deployment_id": deployment_id, "phase": phase, "report": report}
        connection.execute(insert(trial_report).values(values))
    else:
        connection.execute(update(trial_report).where(*conditions).values(report=report))
    recent = Counters()
    for part in parts:
        recent += part
    return trial.settings, recent.as_json()


def _newest(stored: Mapping[str, Any] | None, counters: Counters, size: int) -> list[Counters]:
    """The newest counts, these included, in two parts: at `size` answers a new part begins and the first is dropped."""
    # A report of an older release has no `recent`.
    parts = [counters_from_json(part) for part in stored.get("recent", [stored])] if stored else [Counters()]
    if counters.counts["new"] and parts[-1].counts["new"] >= size:
        parts = [parts[-1], Counters()]
    parts[-1] += counters
    return parts
