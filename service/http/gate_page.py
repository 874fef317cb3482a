"""A gate report as one HTML page: inline SVG and small images, no script, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from service.http.gate_plots import BETTER, OPEN, WORSE, bars, differences

COLOURS = {"pass": BETTER, "warn": OPEN, "refuse": WORSE}
WORDS = {
    "pass": "The new version is better over what is stored: deploying it improves every answer at once.",
    "warn": "The measured difference does not decide, or a slice gets worse: look before deploying.",
    "refuse": "The new version is worse over what is stored: deploying it needs a written reason.",
}
BARS = (("old_old", "M(old/old), now"), ("new_old", "M(new/old), at once"), ("new_new", "M(new/new), after a backfill"))
DIFFERENCE = "M(new/old) - M(old/old), percentage points: right of 0 is better"

MOST_SLICES = 50
"""Slices the page draws."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 54rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } table { border-collapse: collapse; }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; font-variant-numeric: tabular-nums; }
.verdict { display: inline-block; padding: .1rem .7rem; border-radius: 1rem; color: white; } svg { max-width: 100%; }
.flips td { vertical-align: top; overflow-wrap: anywhere; } .flips img { display: block; min-width: 48px; }
"""


def page(gallery: str, report: Mapping[str, Any], images: Mapping[str, str]) -> str:
    """The page of a report.

    Args:
        gallery: its name.
        report: as `regraft.models.GateReport` gives it.
        images: data URIs of what its flips name, by id; one without an image is shown as its id alone.
    """
    title = f"Gate {report['id']}: {report['current']} to {report['version']} in {gallery}"
    verdict, metric = report["verdict"], report["metric"]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p><span class="verdict" style="background:{COLOURS[verdict]}">{verdict}</span> {WORDS[verdict]}</p>',
        f"<h2>{escape(metric)}</h2>",
        bars([(name, report[field]) for field, name in BARS if report[field]], f"{metric} with its 95 % interval"),
        "<h2>Difference M(new/old) - M(old/old)</h2>",
        differences([("all queries", report["difference"])], DIFFERENCE),
        "<h2>What was measured</h2>",
        _table(_measured(report)),
        "<h2>What came of it</h2>",
        _table(_facts(report)),
        *_flips(report, images),
        *_slices(report),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _measured(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    chosen = "every one that can ask" if report["exhaustive"] else f"at most {report['sample']}, drawn"
    covered = "every one that can be compared" if report["whole"] else "a sample"
    of = "own items" if report["evaluation"] is None else f"evaluation set {report['evaluation']}"
    label = report["label"] or ("that of each entry" if report["labelled"] else "none")
    return [
        ("measured on", f"the gallery's {of}"),
        ("label", label),
        ("metric", report["metric"]),
        ("queries", f"{report['queries']} ({chosen}) that had something to find"),
        ("items on the gallery side", f"{report['items']} ({covered})"),
        ("left out", f"{report['unreadable']} that could not be read, {report['unlabelled']} without a label"),
        ("seed", str(report["seed"])),
        ("date", datetime.fromtimestamp(report["created"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")),
        ("by", report["who"]),
    ]


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    gap = report["gap_closed"]
    facts = [
        ("route", " → ".join(report["route"]) or "the same version"),
        ("negative flips", f"{report['negative_flips']} first matches were right and are wrong"),
        ("share of the gap closed", "unknown" if gap is None else f"{gap:.0%} before any backfill"),
        ("calibrations fitted", str(report["calibrations"])),
    ]
    for name, took in report["latency_ms"].items():
        facts.append((f"encoding by {name}", f"p50 {took['p50']:.2f} ms, p99 {took['p99']:.2f} ms an image"))
    return facts


def _flips(report: Mapping[str, Any], images: Mapping[str, str]) -> list[str]:
    """The queries that the new version gets wrong, as images where they are there."""
    flips = report["flips"]
    if not flips:
        return []
    columns = ("query", "its first match by the new version, wrong", "place of the first right item")
    head = f"<tr>{''.join(f'<th>{column}</th>' for column in columns)}</tr>"
    rows = "".join(
        f"<tr><td>{_end(flip['query'], images)}</td><td>{_end(flip['wrong'], images)}</td>"
        f"<td>{flip['rank']} (was 1)</td></tr>"
        for flip in flips
    )
    said = f"{len(flips)} of {report['negative_flips']}, by how far the first right item fell, the deepest fall first."
    return ["<h2>Negative flips</h2>", f"<p>{said}</p>", f'<table class="flips">{head}{rows}</table>']


def _end(end: Mapping[str, Any], images: Mapping[str, str]) -> str:
    name = escape(end["id"])
    shown = f'<img src="{escape(images[end["id"]])}" alt="{name}">' if end["id"] in images else ""
    label = "" if end["label"] is None else f"<br>label {escape(_plain(end['label']))}"
    return f"{shown}{name}{label}"


def _slices(report: Mapping[str, Any]) -> list[str]:
    if not report["slices"]:
        return []
    shown = report["slices"][:MOST_SLICES]
    named = [(f"{_plain(one['value'])} ({one['queries']})", one["difference"]) for one in shown]
    parts = [f"<h2>Slices by {escape(report['slice'] or '')}, worst first</h2>", differences(named, DIFFERENCE)]
    if left := len(report["slices"]) - len(shown):
        parts.append(f"<p>and {left} more, which lose less</p>")
    return parts


def _plain(value: str) -> str:
    """A label or a slice as people read it: JSON, but for a string the string itself; as it is where it was cut."""
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return found if isinstance(found, str) else value


def _table(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f"<table>{rows}</table>"
