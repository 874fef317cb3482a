"""The figure of the demo: accuracy along each backfill, and the matches of some queries at each stage."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from examples.demo.pictures import Pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGES = {
    "before": "before: v1 over v1's items",
    "at_deploy": "at deployment: v2 over v1's",
    "after": "after: v2 over v2's",
}
QUERIES, FIRST = 6, 5
COLOURS = ("#0072b2", "#d55e00", "#009e73")
"""Distinguishable for most colour-blind readers (Okabe and Ito 2008)."""
RIGHT, WRONG, GREY = "#009e73", "#d55e00", "#6b6b6b"
GAP = 0.6
"""Between the stages of the contact sheet, in tiles."""


def examples(found: Mapping[str, Sequence[Sequence[str]]], pictures: Pictures) -> list[dict[str, Any]]:
    """Queries to show: first those that the deployment improved, then those it worsened, then others.

    Args:
        found: stage -> the first ids of each query.
        pictures: the queries and items.
    """

    def right(stage: str) -> NDArray[np.bool_]:
        digits = [pictures.item_digits.get(ids[0], -1) for ids in found[stage]]
        return np.equal(digits, pictures.query_digits)

    was, now = right("before"), right("at_deploy")
    mended, broken, rest = (np.flatnonzero(x) for x in (~was & now, was & ~now, was == now))
    rows = np.concatenate([mended[: QUERIES - 2], broken[:1], rest])[:QUERIES]
    return [{"query": int(row), **{stage: list(found[stage][row][:FIRST]) for stage in STAGES}} for row in rows]


def draw(report: Mapping[str, Any], pictures: Pictures, path: Path) -> None:
    """Write the figure as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 10), facecolor="white")
    curves, sheet = figure.add_axes((0.075, 0.5, 0.9, 0.39)), figure.add_axes((0.03, 0.015, 0.94, 0.39))
    figure.suptitle("A new embedding model, deployed over the old one's gallery", fontsize=17, fontweight="bold")
    _draw_curves(curves, report)
    _draw_sheet(sheet, report["examples"], pictures)
    figure.savefig(path, dpi=130)


def _draw_curves(axes: Axes, report: Mapping[str, Any]) -> None:
    for colour, (way, curve) in zip(COLOURS, report["curves"].items(), strict=False):
        moved, cmc1 = ([100 * point[name] for point in curve] for name in ("moved", "cmc1"))
        edge = report["edges"][way]
        axes.plot(moved, cmc1, color=colour, marker="o", markersize=4, linewidth=2, label=f"{way.upper()} ({edge})")
        best = 100 * report["table"][way]["new_new"]["cmc1"]["value"]
        axes.axhline(best, color=colour, linewidth=1, linestyle=":", label=f"{way.upper()} new/new, {best:.1f} %")
    old = 100 * next(iter(report["table"].values()))["old_old"]["cmc1"]["value"]
    axes.axhline(old, color=GREY, linewidth=1.5, linestyle="--", label=f"old/old, {old:.1f} %")
    axes.set_title("Accuracy while the gallery is backfilled: every point is asked of the running service", fontsize=12)
    axes.set(xlabel="items moved to the new version (%)", ylabel="queries whose first match is right (CMC-1, %)")
    low, high = axes.dataLim.y0, axes.dataLim.y1
    room = max(high - low, 1) * 0.35  # for the legend, below every line
    axes.set(xlim=(-1, 101), ylim=(low - room, high + room / 6))
    axes.legend(loc="lower right", ncols=2, fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_sheet(axes: Axes, rows: Sequence[Mapping[str, Any]], pictures: Pictures) -> None:
    files = {item.id: item.image for item in pictures.items}
    axes.set_title("What some queries find first: green is the same digit, orange another", fontsize=12, pad=24)
    for y, row in enumerate(rows):
        digit = int(pictures.query_digits[row["query"]])
        _tile(axes, 0, y, pictures.queries[row["query"]], GREY)
        for n, stage in enumerate(STAGES):
            start = 1 + GAP + n * (FIRST + GAP)
            for place, item in enumerate(row[stage]):
                colour = RIGHT if pictures.item_digits.get(item) == digit else WRONG
                _tile(axes, start + place, y, files[item], colour)
    axes.text(0.5, -0.15, "query", ha="center", fontsize=10)
    for n, title in enumerate(STAGES.values()):
        axes.text(1 + GAP + n * (FIRST + GAP) + FIRST / 2, -0.15, title, ha="center", fontsize=10)
    axes.set(xlim=(-0.1, 1 + 3 * (FIRST + GAP) + 0.1), ylim=(len(rows) + 0.1, -0.1), aspect="equal")
    axes.set_axis_off()


def _tile(axes: Axes, x: float, y: float, file: bytes, colour: str) -> None:
    from matplotlib.patches import Rectangle

    shown = np.asarray(Image.open(io.BytesIO(file)).convert("L"))
    axes.imshow(255 - shown, cmap="gray", vmin=0, vmax=255, extent=(x + 0.07, x + 0.93, y + 0.93, y + 0.07))
    axes.add_patch(Rectangle((x + 0.05, y + 0.05), 0.9, 0.9, fill=False, edgecolor=colour, linewidth=2.5))
