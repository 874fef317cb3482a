"""A gate report as one HTML page: inline SVG, no script, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

COLOURS = {"pass": "#1a7f37", "warn": "#9a6700", "refuse": "#cf222e"}
WORDS = {
    "pass": "The new version is better over what is stored: deploying it improves every answer at once.",
    "warn": "The measured difference does not decide, or a slice gets worse: look before deploying.",
    "refuse": "The new version is worse over what is stored: deploying it needs a written reason.",
}
BARS = (("old_old", "M(old/old), now"), ("new_old", "M(new/old), at once"), ("new_new", "M(new/new), after a backfill"))

LEFT, WIDTH, ROW = 240, 420, 28
"""Pixels: room for names, the axis from 0 to 1, and the height of a bar."""

MOST_SLICES = 50
"""Slices the page draws."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } table { border-collapse: collapse; }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; font-variant-numeric: tabular-nums; }
.verdict { display: inline-block; padding: .1rem .7rem; border-radius: 1rem; color: white; } svg { max-width: 100%; }
"""


def page(gallery: str, report: Mapping[str, Any]) -> str:
    """The page of a report, as `service.http.gates.GateOut` gives it."""
    title = f"Gate {report['id']}: {report['current']} to {report['version']} in {gallery}"
    verdict = report["verdict"]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p><span class="verdict" style="background:{COLOURS[verdict]}">{verdict}</span> {WORDS[verdict]}</p>',
        f"<h2>{escape(report['metric'])}</h2>",
        _bars([(name, report[field]) for field, name in BARS if report[field]]),
        "<h2>Difference M(new/old) - M(old/old)</h2>",
        _differences([("all queries", report["difference"])]),
        _table(_facts(report)),
    ]
    if report["slices"]:
        shown = report["slices"][:MOST_SLICES]
        named = [(f"{_plain(one['value'])} ({one['queries']})", one["difference"]) for one in shown]
        parts += [f"<h2>Slices by {escape(report['slice'] or '')}, worst first</h2>", _differences(named)]
        if left := len(report["slices"]) - len(shown):
            parts.append(f"<p>and {left} more, which lose less</p>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    gap = report["gap_closed"]
    facts = [
        ("route", " → ".join(report["route"]) or "the same version"),
        ("queries", f"{report['queries']} of {report['items']} entries"),
        ("left out", f"{report['unreadable']} that could not be read, {report['unlabelled']} without a label"),
        ("negative flips", f"{report['negative_flips']} first matches were right and are wrong"),
        ("share of the gap closed", "unknown" if gap is None else f"{gap:.0%} before any backfill"),
        ("calibrations fitted", str(report["calibrations"])),
    ]
    for name, took in report["latency_ms"].items():
        facts.append((f"encoding by {name}", f"p50 {took['p50']:.2f} ms, p99 {took['p99']:.2f} ms an image"))
    return facts


def _plain(value: str) -> str:
    """A slice as people read it: JSON, but for a string the string itself."""
    found = json.loads(value)
    return found if isinstance(found, str) else value


def _table(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f"<table>{rows}</table>"


def _bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Bars from 0 to 1 with their intervals."""
    shapes = []
    for number, (name, score) in enumerate(rows):
        y = number * ROW
        value, low, high = (LEFT + WIDTH * score[field] for field in ("value", "low", "high"))
        shapes.append(_name(name, y))
        shapes.append(f'<rect x="{LEFT}" y="{y + 6}" width="{value - LEFT:.1f}" height="16" fill="#54aeff"/>')
        shapes.append(_interval(low, high, y))
        shapes.append(_label(f"{score['value']:.1%} [{score['low']:.1%}, {score['high']:.1%}]", y))
    return _svg(shapes, len(rows))


def _differences(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Differences around 0, on the scale of the widest."""
    most = max((abs(score[field]) for _, score in rows for field in ("low", "high")), default=0) or 1.0
    centre, scale = LEFT + WIDTH / 2, WIDTH / 2 / most
    shapes = [f'<line x1="{centre}" x2="{centre}" y1="0" y2="{len(rows) * ROW}" stroke="#8c959f"/>']
    for number, (name, score) in enumerate(rows):
        y = number * ROW
        value, low, high = (centre + scale * score[field] for field in ("value", "low", "high"))
        colour = COLOURS["refuse"] if score["high"] < 0 else COLOURS["pass"] if score["low"] > 0 else COLOURS["warn"]
        shapes.append(_name(name, y))
        shapes.append(_interval(low, high, y))
        shapes.append(f'<circle cx="{value:.1f}" cy="{y + 14}" r="5" fill="{colour}"/>')
        shapes.append(_label(f"{100 * score['value']:+.1f} [{100 * score['low']:+.1f}, {100 * score['high']:+.1f}]", y))
    return _svg(shapes, len(rows))


def _svg(shapes: Sequence[str], rows: int) -> str:
    width, height = LEFT + WIDTH + 200, rows * ROW + 2
    start = f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-size="13" role="img">'
    return f"{start}{''.join(shapes)}</svg>"


def _name(text: str, y: float) -> str:
    return f'<text x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{escape(text[:40])}</text>'


def _label(text: str, y: float) -> str:
    return f'<text x="{LEFT + WIDTH + 10}" y="{y + 18}">{escape(text)}</text>'


def _interval(low: float, high: float, y: float) -> str:
    return f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 14}" y2="{y + 14}" stroke="#1f2328" stroke-width="2"/>'
