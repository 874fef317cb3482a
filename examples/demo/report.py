"""The results of the demo: a table, demo-report.json, and unmet expectations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from examples.demo import steps as stepping
from examples.demo.measure import as_row, difference
from examples.demo.traffic import Counts
from examples.demo.upgrade import Upgrade

Report = dict[str, Any]

ROWS = ("old_old", "new_old", "new_new")
GAINS = ("new_old - old_old", "new_new - new_old")
QUERY_SIDE = ("identity", "truncate")
MAX_GAP = 0.25
"""Largest distance of two points of a curve: a busy machine measures late, a killed worker catches up."""
MAX_APART = 0.05
"""Largest difference of the areas under the service's curve and the client's.

Single points cannot be compared: they were measured at different times, with different temporary items.
"""
ABOUT_INTERRUPTED = (
    "Requests that got no answer because the demo had just killed the service; each was sent again until answered. "
    "They are not among failed_queries, which counts errors and wrong answers."
)


def build(
    upgrades: Sequence[Upgrade], kill: Report, versions: Sequence[Report], timings: Report, steps: Report
) -> Report:
    """All results, as JSON."""
    counts = Counts()
    for one in upgrades:
        counts.add(one.counts)
    return {
        "table": {one.way.name: {row: as_row(getattr(one, row)) for row in ROWS} for one in upgrades},
        "differences": {
            one.way.name: {
                GAINS[0]: difference(one.new_old, one.old_old),
                GAINS[1]: difference(one.new_new, one.new_old),
            }
            for one in upgrades
        },
        "at_deploy": {one.way.name: as_row(one.at_deploy) for one in upgrades},
        "routes": {one.way.name: one.routes for one in upgrades},
        "edges": {one.way.name: one.way.edge for one in upgrades},
        "gates": {one.way.name: one.gate for one in upgrades},
        "curves": {one.way.name: [vars(point) for point in one.curve] for one in upgrades},
        "live_curves": {one.way.name: one.live for one in upgrades},
        "queries_served": counts.queries_served,
        "failed_queries": counts.queries_failed,
        "interrupted_queries": counts.queries_interrupted,
        "interrupted_queries_meaning": ABOUT_INTERRUPTED,
        "acknowledged_writes": counts.writes_acknowledged,
        "failed_writes": counts.writes_failed,
        "interrupted_writes": counts.writes_interrupted,
        "failures": counts.reasons,
        "lost_items": sum(len(one.lost) for one in upgrades),
        "resurrected_items": sum(len(one.resurrected) for one in upgrades),
        "query_seconds": _percentiles(counts.seconds),
        "kill": kill,
        "rollback": {one.way.name: one.rollback for one in upgrades},
        "timings": {**timings, "upgrades": {one.way.name: one.seconds for one in upgrades}},
        "versions": list(versions),
        "steps": steps,
    }


def unmet(report: Report) -> list[str]:
    """The unmet expectations, as sentences."""
    return [sentence for sentence, holds in expectations(report) if not holds]


def expectations(report: Report) -> Iterator[tuple[str, bool]]:
    """All expectations: the message if it is not met, and whether it is met."""
    for name in ("failed_queries", "failed_writes", "lost_items", "resurrected_items"):
        yield f"{name} is {report[name]}, not 0 {report['failures'][:3]}", report[name] == 0
    yield "no query was served during the upgrades", report["queries_served"] > 0
    for way, gains in report["differences"].items():
        for pair, gain in gains.items():
            # After a forward edge, encoding the images again may add nothing.
            if pair == GAINS[0] or report["edges"][way] in QUERY_SIDE:
                yield f"{way}: {pair} on CMC-1 is {_cell(gain['cmc1'])}, not surely above 0", gain["cmc1"]["low"] > 0
        curve = report["curves"][way]
        gap = max(b["moved"] - a["moved"] for a, b in itertools.pairwise(curve))
        yield f"{way}: the curve has a gap of {gap:.0%}", gap <= MAX_GAP
        live = report["live_curves"][way]
        complete = live["state"] == "complete"
        yield f"{way}: the service's curve is {live['state']} {live['error'] or ''}", complete
        apart = _apart(live, curve) if complete else 0.0
        yield f"{way}: areas under the curves of service and client are {apart:.1%} apart", apart <= MAX_APART
        back = report["rollback"][way]
        yield f"{way}: after the rollback answers differ from old/old", back["answers_equal_old_old"]
        yield f"{way}: deployed again, answers differ from new/new", back["forward_answers_equal_new_new"]
    kill = report["kill"]
    yield "after kill -9 the backfill stood behind where it was", kill["done_after"] >= kill["done_before"]
    yield "after kill -9 the final state differs from a run without it", kill["state_equal"]
    yield "after kill -9 the final answers differ from a run without it", kill["answers_equal"]
    yield from stepping.expectations(report["steps"])


def table(report: Report) -> Table:
    """Old/old, new/old and new/new of every method, in per cent."""
    shown = Table("query/item", "CMC-1 %", "CMC-5 %", "mAP %", title="Before, during and after the upgrade")
    for way, rows in report["table"].items():
        for row in ROWS:
            shown.add_row(f"{way} {row.replace('_', '/')}", *(_cell(score) for score in rows[row].values()))
        shown.add_section()
    return shown


def summary(report: Report) -> str:
    """The counts under the table."""
    kill, times = report["kill"], report["query_seconds"]
    rollback = max(seconds["rollback"] for seconds in report["timings"]["upgrades"].values())
    return (
        f"queries during the upgrades: {report['queries_served']} served, {report['failed_queries']} failed, "
        f"{report['interrupted_queries']} sent again because the service had been killed "
        f"(median {times['p50'] * 1000:.0f} ms, 99 % within {times['p99'] * 1000:.0f} ms)\n"
        f"writes meanwhile: {report['acknowledged_writes']} acknowledged, {report['failed_writes']} failed\n"
        f"items lost: {report['lost_items']}, deleted items seen again: {report['resurrected_items']}\n"
        f"kill -9 at {kill['moved']:.0%} of the backfill: back after {kill['seconds_down']:.1f} s, final state "
        f"{'equal to' if kill['state_equal'] else 'DIFFERENT from'} a run without it\n"
        f"the service's own curves: {_lengths(report)} points, areas {_areas(report)}\n"
        f"rollback: one call, at most {rollback * 1000:.0f} ms, answers as before the deployment"
    )


def _apart(live: Report, curve: Sequence[Report]) -> float:
    moved, cmc1 = ([point[name] for point in curve] for name in ("moved", "cmc1_of_all"))
    return abs(float(live["area"]) - float(np.trapezoid(cmc1, moved)))


def _lengths(report: Report) -> str:
    return ", ".join(str(len(live["points"])) for live in report["live_curves"].values())


def _areas(report: Report) -> str:
    """The areas under the curves in per cent; a dash for an incomplete curve."""
    areas = [live["area"] for live in report["live_curves"].values()]
    return ", ".join("-" if area is None else f"{area:.1%}" for area in areas)


def _cell(score: dict[str, float]) -> str:
    return f"{100 * score['value']:.1f} [{100 * score['low']:.1f}, {100 * score['high']:.1f}]"


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(seconds, q)) if seconds else float("nan") for q in (50, 95, 99)}
