"""A gate report as one HTML page: inline SVG and small images, no script, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from regraft.models import GateReport
from service.http.upgrades.gate_images import End
from service.http.upgrades.gate_plots import BETTER, OPEN, WORSE, bars, differences

COLOURS = {"pass": BETTER, "warn": OPEN, "refuse": WORSE}
WORDS = {
    "pass": "The new version is better over the stored items: deploying it improves answers at once.",
    "warn": "The measured difference is not significant, or a slice gets worse: check before deploying.",
    "refuse": "The new version is worse over the stored items: deploying it requires a reason.",
}
BARS = (
    ("old_old", "M(old/old), now"),
    ("new_old", "M(new/old), after deploying"),
    ("new_new", "M(new/new), after a backfill"),
)
DIFFERENCE = "M(new/old) - M(old/old), percentage points: right of 0 is better"

TEMPLATES = Environment(
    loader=PackageLoader("service.http.upgrades"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)
MOST_SLICES = 50
"""Most slices that the page draws."""


def page(gallery: str, gate: GateReport, images: Mapping[End, str]) -> str:
    """The page of a report.

    Args:
        gallery: its name.
        gate: the report.
        images: data URIs of the images of its flips, by end and id; without an image, only the id is shown.
    """
    report = gate.model_dump()
    shown = report["slices"][:MOST_SLICES]
    named = [(f"{plain(part['value'])} ({part['queries']})", part["difference"]) for part in shown]
    scores = [(name, report[field]) for field, name in BARS if report[field]]
    return TEMPLATES.get_template("gate.html").render(
        title=f"Gate {gate.id}: {gate.current} to {gate.version} in {gallery}",
        report=report,
        images=images,
        plain=plain,
        colour=COLOURS[gate.verdict],
        words=WORDS[gate.verdict],
        scores=bars(scores, f"{gate.metric} with its 95 % interval"),
        difference=differences([("all queries", report["difference"])], DIFFERENCE),
        measured=_measured(report),
        outcome=_facts(report),
        slices=differences(named, DIFFERENCE),
        more_slices=len(report["slices"]) - len(shown),
    )


def _measured(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    chosen = "all" if report["exhaustive"] else f"at most {report['sample']}, sampled"
    covered = "all comparable items" if report["whole"] else "a sample"
    of = "own items" if report["evaluation"] is None else f"evaluation set {report['evaluation']}"
    label = report["label"] or ("that of each entry" if report["labelled"] else "none")
    return [
        ("measured on", f"the gallery's {of}"),
        ("label", label),
        ("metric", report["metric"]),
        ("queries", f"{report['queries']} ({chosen}) with a relevant item"),
        ("items in the gallery", f"{report['items']} ({covered})"),
        ("left out", f"{report['unreadable']} unreadable, {report['unlabelled']} without a label"),
        ("seed", str(report["seed"])),
        ("date", datetime.fromtimestamp(report["created"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")),
        ("by", report["who"]),
    ]


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    gap = report["gap_closed"]
    facts = [
        ("route", " → ".join(report["route"]) or "the same version"),
        ("negative flips", f"{report['negative_flips']} queries whose first match was right and is now wrong"),
        ("share of the gap closed", "unknown" if gap is None else f"{gap:.0%} before any backfill"),
        ("calibrations fitted", str(report["calibrations"])),
    ]
    for name, took in report["latency_ms"].items():
        facts.append((f"encoding by {name}", f"p50 {took['p50']:.2f} ms, p99 {took['p99']:.2f} ms an image"))
    return facts


def plain(value: str) -> str:
    """A label or slice for display: JSON, except that a string has no quotes; unchanged if it was cut."""
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return found if isinstance(found, str) else value
