"""Notes on the risks of a deployment, which never stop it: items behind old encoders, lost entrances, verdicts ...

Every function runs in its caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import Connection

from index.evaluation.gate import GateVerdict
from service.registry.loaded_version import LoadedVersion
from service.registry.placement import ItemCounts, placement_in, placement_of
from service.registry.registry import Registry
from service.store.galleries.gallery import gallery_row
from service.store.galleries.held_versions import versions_with_embeddings
from service.store.rows import DeploymentRow, GateRow, TransitionRow
from service.upgrades.deployments.history import DeploymentState, transitions
from service.upgrades.deployments.verdicts import deciding_report


def notes(connection: Connection, registry: Registry, item_counts: ItemCounts, row: DeploymentRow) -> list[str]:
    """The notes on a deployment that is on its way, or has become current by its last step."""
    version = registry.by_id(row.version_id)
    found = list(_by_old_encoders(connection, registry, item_counts, row.gallery_id, version))
    if row.previous_id is not None:
        current = registry.by_id(row.previous_id)
        found += _lost_entrances(version, current)
        report = deciding_report(connection, row.gallery_id, version, current.name)
        found += _verdict(report, version.name, current.name)
        if report is not None:
            found += _third_versions(connection, registry, item_counts, report, version, current)
    step = transitions(connection, row.id)[-1]
    return [*found, *_short_canary(step, row.settings or {}), *cancelled_backfills(step)]


def cancelled_backfills(step: TransitionRow) -> Iterator[str]:
    """Backfills to other versions that the step cancelled, running or paused."""
    if count := step.evidence.get("backfills_cancelled"):
        which = "an unfinished backfill" if count == 1 else f"{count} unfinished backfills"
        yield f"this cancels {which} to another version: what was moved stays moved"


def _by_old_encoders(
    connection: Connection, registry: Registry, item_counts: ItemCounts, gallery_id: int, version: LoadedVersion
) -> Iterator[str]:
    """Items that queries reach only by `dual`, that is by the old encoder, or not at all."""
    stored = {registry.by_id(version_id).name for version_id in versions_with_embeddings(connection, gallery_id)}
    routes = {name: registry.route(version.name, name) for name in stored}
    waiting = {name for name, route in routes.items() if route is None or route.dual}
    gallery = gallery_row(connection, gallery_id)
    if not waiting or gallery is None:  # the usual case, in which no item has to be counted
        return
    # Counted in memory, because writers wait for this transaction.
    order = [registry.by_id(version_id).name for version_id in placement_in(registry, gallery).version_order]
    counted = item_counts.items_by_version(gallery_id, order)
    for old in sorted(waiting & counted.keys()):
        yield (
            f"no edge leads from {version.name!r} to {old!r}: {counted[old]} items are searched with queries that "
            f"{old!r} embeds, until a backfill moves them"
        )


def _lost_entrances(version: LoadedVersion, current: LoadedVersion) -> Iterator[str]:
    """Images or texts that the current version embeds and the new one does not."""
    new, old = version.card, current.card
    for kind, lost in (("images", old.encoder and not new.encoder), ("texts", old.text and not new.text)):
        if lost:
            yield (
                f"{version.name!r} does not embed {kind}, as {current.name!r} does: {kind} can no longer be stored, "
                f"and queries by {kind} are refused as soon as {version.name!r} serves items"
            )


def _verdict(report: GateRow | None, version: str, current: str) -> Iterator[str]:
    if report is None:
        yield f"no gate has compared {version!r} with {current!r}, so the effect on answers is unknown"
    elif report.verdict == GateVerdict.REFUSE:
        yield f"gate {report.id} refused {version!r}: it measured worse answers"
    elif report.verdict != GateVerdict.PASS:
        yield f"gate {report.id} warned: it is uncertain whether {version!r} gives better answers than {current!r}"


def _third_versions(
    connection: Connection,
    registry: Registry,
    item_counts: ItemCounts,
    report: GateRow,
    version: LoadedVersion,
    current: LoadedVersion,
) -> Iterator[str]:
    """Items that a third version serves: a gate measures as if the current version had embedded all items."""
    if versions_with_embeddings(connection, report.gallery_id) <= {version.id, current.id}:
        return
    order = [registry.by_id(version_id).name for version_id in placement_of(registry, version).version_order]
    counted = item_counts.items_by_version(report.gallery_id, order)
    for third in sorted(counted.keys() - {version.name, current.name}):
        yield (
            f"gate {report.id} measured only embeddings by {current.name!r}: the results of {version.name!r} "
            f"among the {counted[third]} items that {third!r} serves are unknown"
        )


def _short_canary(step: TransitionRow, settings: Mapping[str, Any]) -> Iterator[str]:
    """A canary that became current before it had answered enough queries to be checked against its limits."""
    if (step.before, step.after) != (DeploymentState.CANARY, DeploymentState.CURRENT):
        return
    answered, least = step.evidence.get("canary", {}).get("queries", {}).get("new", 0), settings["min_queries"]
    if answered < least:
        yield f"the canary answered {answered} queries, fewer than min_queries ({least}), so its limits did not apply"
