"""The verdicts of gates on a deployment's version, and whether it may serve queries despite a refusal.

Every report that compared the version with the current one counts, whether or not the deployment names it: leaving out
the number of a refusal, or measuring less, does not avoid it. A refusal stands until a report of at least its strength
passes: the same metric on the same labels or evaluation set, with at least as many queries and items, or with all that
exist. Every function runs in its caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, select

from index.errors import InvalidArgument, RegraftError
from index.evaluation.gate import GateVerdict
from service.registry.loaded_version import LoadedVersion
from service.store.rows import GateRow, all_of, first_of
from service.store.tables import deployment_transition, gate_report


class GateRefused(RegraftError):
    """The gate refused this version; deploying it requires a reason in `override`."""

    status = 422
    code = "gate_refused"


def named_report(
    connection: Connection, gallery_id: int, version: LoadedVersion, current: str | None, number: int
) -> GateRow:
    """The gate report of this number, which must have compared this version with the current one.

    Raises:
        InvalidArgument: there is none, or it compared other versions.
    """
    conditions = (gate_report.c.id == number, gate_report.c.gallery_id == gallery_id)
    row = first_of(GateRow, connection.execute(select(gate_report).where(*conditions)))
    if row is None:
        raise InvalidArgument(f"gate: the gallery has no gate report {number}", pointer="/gate")
    if (row.version_id, row.report["current"]) != (version.id, current):
        compared = f"{row.report['version']!r} with {row.report['current']!r}"
        this = f"{version.name!r} over {current!r}"
        raise InvalidArgument(
            f"gate: report {number} compared {compared}, but the deployment is of {this}", pointer="/gate"
        )
    return row


def deciding_report(
    connection: Connection, gallery_id: int, version: LoadedVersion, current: str | None
) -> GateRow | None:
    """The newest standing refusal of this version over the current one, else the newest report, if any."""
    conditions = (gate_report.c.gallery_id == gallery_id, gate_report.c.version_id == version.id)
    rows = all_of(GateRow, connection.execute(select(gate_report).where(*conditions).order_by(gate_report.c.id)))
    # Not filtered in SQL: reports of earlier releases may hold NaN, which SQLite cannot parse.
    reports = [row for row in rows if row.report["current"] == current]
    refusals: list[GateRow] = []
    for row in reports:
        if row.verdict == GateVerdict.PASS:
            refusals = [refused for refused in refusals if not _at_least(row.report, refused.report)]
        elif row.verdict == GateVerdict.REFUSE:
            refusals.append(row)
    deciding = refusals or reports
    return deciding[-1] if deciding else None


def _at_least(report: Mapping[str, Any], refused: Mapping[str, Any]) -> bool:
    """Whether a report is of at least the strength of one that refused."""
    alike = all(report.get(field) == refused.get(field) for field in ("metric", "label", "evaluation"))
    more = all(report[field] >= refused[field] for field in ("queries", "items"))
    # Items deleted since cannot be measured again, so a report on all that exist is enough.
    return alike and (more or bool(report.get("exhaustive")))


def weigh(
    connection: Connection, deployment_id: int, version: LoadedVersion, report: GateRow, override: str | None
) -> Mapping[str, Any]:
    """The evidence of a step that rests on a report.

    Raises:
        GateRefused: the report refuses, `override` gives no reason, and none was given at an earlier step.
    """
    reason = (override or "").strip() or None
    if report.verdict == GateVerdict.REFUSE and reason is None:
        reason = _overridden_before(connection, deployment_id, report.id)
        if reason is None:
            why = f"gate {report.id} refused {version.name!r}: give a reason in `override` to deploy it"
            raise GateRefused(why, pointer="/override")
    return {"gate": report.id, "verdict": report.verdict, "override": reason}


def _overridden_before(connection: Connection, deployment_id: int, number: int) -> str | None:
    condition = deployment_transition.c.deployment_id == deployment_id
    evidence = connection.execute(select(deployment_transition.c.evidence).where(condition)).scalars()
    return next((step["override"] for step in evidence if step.get("gate") == number and step.get("override")), None)
