"""Trials: the settings of a shadow or canary, its counts, and the limits at which a canary ends.

The counts of several processes are added up in the database, so a report has only sums and histograms, and its size
does not grow with the number of queries. Times are in milliseconds.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import Field
from sqlalchemy import Connection, insert, select, update

from service.registry.registry import LoadedVersion, Registry
from service.schemas import Body
from service.store.tables import deployment, trial_report

SHADOW, CANARY = "shadow", "canary"

STEP = 1.1
"""Each bucket of a latency histogram is this factor wider than the one before: quantiles are exact to about 5 %."""
ERRORS_KEPT = 5
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


@dataclass
class Counters:
    """Sums of one phase: plain counts, latency histograms of the old and the new version, and the last errors."""

    counts: Counter[str] = field(default_factory=Counter)
    latency: dict[str, Counter[int]] = field(default_factory=lambda: {"old": Counter(), "new": Counter()})
    errors: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **amounts: float) -> None:
        """Add to counts."""
        for name, amount in amounts.items():
            self.counts[name] += amount  # type: ignore[assignment]  # sums of overlaps are fractions

    def add_latency(self, side: str, seconds: float, queries: int = 1) -> None:
        """Add the latency of queries that were answered together; `side`: by the version `old` or `new`."""
        self.latency[side][bucket(seconds * 1000)] += queries

    def add_error(self, error: Exception, queries: int = 1) -> None:
        """Add queries that the new version could not answer."""
        self.add(errors=queries)
        text = f"{type(error).__name__}: {error}"[:500]
        self.errors = [*self.errors, {"at": time.time(), "error": text}][-ERRORS_KEPT:]

    def as_json(self) -> dict[str, Any]:
        """The counts in their stored form."""
        latency = {side: {str(b): n for b, n in found.items()} for side, found in self.latency.items()}
        return {"counts": dict(self.counts), "latency": latency, "errors": self.errors}

    def __iadd__(self, other: Counters) -> Self:
        self.counts.update(other.counts)
        for side, found in other.latency.items():
            self.latency[side].update(found)
        self.errors = [*self.errors, *other.errors][-ERRORS_KEPT:]
        return self


def counters_from_json(value: Mapping[str, Any]) -> Counters:
    """The counters of a stored report."""
    latency = {side: Counter({int(b): n for b, n in found.items()}) for side, found in value["latency"].items()}
    return Counters(Counter(value["counts"]), latency, list(value["errors"]))


def bucket(milliseconds: float) -> int:
    """The number of the histogram bucket of a time above 0."""
    return math.floor(math.log(max(milliseconds, 1e-3)) / math.log(STEP))


def quantile(histogram: Mapping[int, int], q: float) -> float | None:
    """The latency (ms) below which a share `q` of the answers lies; None: there are no answers."""
    remaining = q * sum(histogram.values())
    for number in sorted(histogram):
        remaining -= histogram[number]
        if remaining <= 1e-9:
            return float(STEP ** (number + 0.5))
    return None


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """The public summary of a stored report."""
    counters = counters_from_json(report)
    counts, compared = counters.counts, counters.counts["compared"]
    answered = counts["new"]
    return {
        "queries": {"old": int(counts["old"]), "new": int(answered)},
        "errors": int(counts["errors"]),
        "error_rate": counts["errors"] / answered if answered else None,
        "dropped": int(counts["dropped"]),
        "compared": int(compared),
        "overlap": counts["overlap"] / compared if compared else None,
        "rank_correlation": counts["rank_correlation"] / counts["correlated"] if counts["correlated"] else None,
        "first_match_flips": int(counts["flips"]),
        "latency_ms": {
            side: {"p50": quantile(found, 0.5), "p99": quantile(found, 0.99)}
            for side, found in counters.latency.items()
        },
        "last_errors": counters.errors,
    }


def exceeded_limit(settings: Mapping[str, Any], report: Mapping[str, Any]) -> str | None:
    """The limit that a canary's newest counts exceed, in words; None: none, or too few queries were answered."""
    counted = summary(report)
    answered, rate, p99 = counted["queries"]["new"], counted["error_rate"], counted["latency_ms"]["new"]["p99"]
    if answered < settings.get("min_queries", 1):
        return None
    max_rate, max_p99 = settings.get("max_error_rate"), settings.get("max_p99_ms")
    if max_rate is not None and rate > max_rate:
        return f"error rate {rate:.1%} of {answered} queries is above the limit of {max_rate:.1%}"
    if max_p99 is not None and p99 is not None and p99 > max_p99:
        return f"p99 latency {p99:.1f} ms of {answered} queries is above the limit of {max_p99:g} ms"
    return None


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
