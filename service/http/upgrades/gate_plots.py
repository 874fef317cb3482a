"""The plots of a gate's page as inline SVG: scores from 0 to 1 and differences around 0, each over a labelled axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup, escape

LEFT, WIDTH, RIGHT = 240, 420, 200
"""Pixels: room for names, the axis, and room for numbers."""
ROW, AXIS = 28, 44
"""Pixels: the height of a bar, and of the ticks with the axis's name under them."""
MOST_NAME = 40
"""Most characters of a row's name."""

BETTER, OPEN, WORSE = "#1a7f37", "#9a6700", "#cf222e"

Interval = Mapping[str, float]
"""`value`, `low` and `high`."""


def bars(rows: Sequence[tuple[str, Interval]], axis: str) -> Markup:
    """Bars from 0 to 1 with their intervals."""
    shapes = _axis([n / 4 for n in range(5)], len(rows), axis, lambda share: LEFT + WIDTH * share, "{:.0%}")
    for number, (name, score) in enumerate(rows):
        y = number * ROW
        value, low, high = (LEFT + WIDTH * score[field] for field in ("value", "low", "high"))
        shapes.append(_name(name, y))
        shapes.append(f'<rect x="{LEFT}" y="{y + 6}" width="{value - LEFT:.1f}" height="16" fill="#54aeff"/>')
        shapes.append(_interval(low, high, y))
        shapes.append(_label(f"{score['value']:.1%} [{score['low']:.1%}, {score['high']:.1%}]", y))
    return _svg(shapes, len(rows), axis)


def differences(rows: Sequence[tuple[str, Interval]], axis: str) -> Markup:
    """Differences around 0, in percentage points, on the scale of the widest."""
    most = 100 * max((abs(score[field]) for _, score in rows for field in ("low", "high")), default=0) or 1.0

    def place(points: float) -> float:
        return LEFT + WIDTH / 2 + WIDTH / 2 * points / most

    shapes = _axis(ticks(most), len(rows), axis, place, "{:+g}")
    shapes.append(f'<line x1="{place(0)}" x2="{place(0)}" y1="0" y2="{len(rows) * ROW}" stroke="#57606a"/>')
    for number, (name, score) in enumerate(rows):
        y = number * ROW
        value, low, high = (100 * score[field] for field in ("value", "low", "high"))
        colour = WORSE if high < 0 else BETTER if low > 0 else OPEN
        shapes.append(_name(name, y))
        shapes.append(_interval(place(low), place(high), y))
        shapes.append(f'<circle cx="{place(value):.1f}" cy="{y + 14}" r="5" fill="{colour}"/>')
        shapes.append(_label(f"{value:+.1f} [{low:+.1f}, {high:+.1f}]", y))
    return _svg(shapes, len(rows), axis)


def ticks(most: float) -> list[float]:
    """Round numbers from -most to most with 0 among them, two to four on each side; `most` is above 0."""
    power = 10 ** math.floor(math.log10(most))
    step = next(factor * power for factor in (0.25, 0.5, 1, 2.5, 5) if most / (factor * power) < 5)
    each = math.floor(most / step + 1e-9)
    return [round(n * step, 12) for n in range(-each, each + 1)]


def _axis(at: Sequence[float], rows: int, name: str, place: Callable[[float], float], form: str) -> list[str]:
    """Vertical lines through all rows, with their numbers and the axis's name below."""
    bottom = rows * ROW
    shapes = [f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{bottom}" y2="{bottom}" stroke="#57606a"/>']
    for tick in at:
        x = place(tick)
        text = form.format(tick) if tick else form.replace("+", "").format(tick)
        shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom + 4}" stroke="#d0d7de"/>')
        shapes.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>')
    middle = LEFT + WIDTH / 2
    shapes.append(f'<text class="axis" x="{middle}" y="{bottom + 36}" text-anchor="middle">{escape(name)}</text>')
    return shapes


def _svg(shapes: Sequence[str], rows: int, title: str) -> Markup:
    width, height = LEFT + WIDTH + RIGHT, rows * ROW + AXIS
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    # Names in the shapes are already escaped.
    return Markup(f'<svg {size} font-size="13" role="img" aria-label="{escape(title)}">{"".join(shapes)}</svg>')  # noqa: S704


def _name(text: str, y: float) -> str:
    return f'<text x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{escape(text[:MOST_NAME])}</text>'


def _label(text: str, y: float) -> str:
    return f'<text x="{LEFT + WIDTH + 10}" y="{y + 18}">{escape(text)}</text>'


def _interval(low: float, high: float, y: float) -> str:
    return f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 14}" y2="{y + 14}" stroke="#1f2328" stroke-width="2"/>'
