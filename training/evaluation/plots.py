"""Pictures of an evaluation, drawn without a display and without global state: matrix, curves, bars."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from index.evaluation.curves import CALIBRATED, RAW
from index.evaluation.scores import METRICS
from index.version import Score
from training.evaluation.loss_curves import LossCurves
from training.evaluation.matrix import Evaluation
from training.measurement import HELD_OUT_PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Told apart by most colour-blind readers (Okabe and Ito 2008)."""
GREY = "#7f7f7f"


def matrix_figure(measured: Evaluation) -> Figure:
    """A panel for each metric: M(row/column), empty where no edge leads."""
    size = 1.6 + 0.75 * len(measured.names)
    figure = _figure(len(METRICS) * size, size)
    for axes, metric in zip(figure.subplots(1, len(METRICS), squeeze=False)[0], METRICS, strict=True):
        _draw_matrix(axes, measured, metric)
    return figure


def curves_figure(measured: Evaluation) -> Figure:
    """A panel for each pair and kind of backfill: the metric over the share of items moved, raw and calibrated.

    Raises:
        ValueError: nothing was measured to draw.
    """
    panels = list(dict.fromkeys(key[:3] for key in measured.curves))
    if not panels:
        raise ValueError("there is no backfill curve to draw")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure(4.6 * columns, 3.4 * rows)
    places = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for axes, panel in zip(places, panels, strict=False):
        _draw_curves(axes, measured, panel)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    return figure


def bars_figure(bars: Sequence[tuple[str, Sequence[Score]]]) -> Figure:
    """Groups of bars with their intervals: (label, one score for each of METRICS)."""
    figure = _figure(5.6, 3.4)
    axes = figure.subplots()
    width = 0.8 / len(bars)
    for place, (label, scores) in enumerate(bars):
        x = np.arange(len(METRICS)) + (place - (len(bars) - 1) / 2) * width
        height = [score.value for score in scores]
        error = [[score.value - score.low for score in scores], [score.high - score.value for score in scores]]
        colour = COLOURS[place % len(COLOURS)]
        axes.bar(x, height, width * 0.92, yerr=error, label=label, color=colour, ecolor="#333333", capsize=3)
    axes.set(xticks=range(len(METRICS)), xticklabels=METRICS, ylim=(0, 1.02))
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=len(bars))
    _lighten(axes)
    return figure


def pairs_figure(methods: Sequence[tuple[str, Sequence[Score]]]) -> Figure:
    """A line for each method, the best new/old on top: CMC-1 of old/old, new/old with its interval, new/new."""
    ranked = sorted(methods, key=lambda method: method[1][1].value)
    figure = _figure(7.0, 1.0 + 0.27 * len(ranked))
    axes = figure.subplots()
    lines = np.arange(len(ranked))
    old, new_old, new = (np.array([pairs[place].value for _, pairs in ranked]) for place in range(3))
    error = 100 * np.array([[pairs[1].value - pairs[1].low, pairs[1].high - pairs[1].value] for _, pairs in ranked]).T
    axes.hlines(lines, 100 * old, 100 * new_old, color=GREY, alpha=0.4, linewidth=4)
    axes.plot(100 * old, lines, "|", color=GREY, markersize=11, markeredgewidth=2, label="old/old")
    axes.errorbar(100 * new_old, lines, xerr=error, fmt="o", color=COLOURS[0], capsize=2, label="new/old")
    axes.plot(100 * new, lines, "o", color=COLOURS[2], markerfacecolor="none", label="new/new")
    axes.set(yticks=lines, yticklabels=[name for name, _ in ranked], xlabel="CMC-1 (%)")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    _lighten(axes)
    return figure


def learning_figure(curves: LossCurves) -> Figure:
    """A panel each for the mean loss of an epoch, the parts that the method logs, and scores of held-out images."""
    panels: dict[str, list[str]] = {}
    for name in curves:
        panels.setdefault(_panel_of(name), []).append(name)
    figure = _figure(4.6 * len(panels), 3.2)
    for axes, (title, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for place, name in enumerate(names):
            label, colour = name.removeprefix(HELD_OUT_PREFIX), COLOURS[place % len(COLOURS)]
            axes.plot(list(curves[name]), list(curves[name].values()), label=label, color=colour)
        axes.set(title=title, xlabel="epoch")
        if title == "loss":
            axes.set_ylim(min(0, *axes.get_ylim()), None)
        else:
            axes.legend(frameon=False, fontsize=8)
        _lighten(axes)
    return figure


def _panel_of(name: str) -> str:
    """The title of the panel that a logged quantity is drawn in."""
    if name == "loss":
        return "loss"
    return "CMC-1, held-out images" if name.startswith(HELD_OUT_PREFIX) else "its parts"


def as_svg(figure: Figure) -> bytes:
    """The picture as SVG; the same figure gives the same bytes."""
    import matplotlib as mpl

    stream = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "regraft"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=120)


def _draw_matrix(axes: Axes, measured: Evaluation, metric: str) -> None:
    values = measured.matrix(metric).values
    axes.imshow(np.ma.masked_invalid(values), cmap="Blues", vmin=0, vmax=1.8)  # 1 stays light enough for black digits
    for row, column in zip(*np.nonzero(np.isfinite(values)), strict=True):
        axes.text(column, row, f"{values[row, column]:.3f}", ha="center", va="center", fontsize=8)
    ticks = range(len(measured.names))
    axes.set(title=metric, xlabel="items", ylabel="queries", xticks=ticks, yticks=ticks)
    axes.set_xticklabels(measured.names, rotation=30, ha="right")
    axes.set_yticklabels(measured.names)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_curves(axes: Axes, measured: Evaluation, panel: tuple[str, str, str]) -> None:
    new, old, way = panel
    orders = dict.fromkeys(key[3] for key in measured.curves if key[:3] == panel)
    for colour, order in zip(COLOURS, orders, strict=False):
        for scale, style in ((RAW, "--"), (CALIBRATED, "-")):
            curve = measured.curves[*panel, order, scale].curve
            axes.plot(100 * curve.shares, curve.values, style, color=colour, label=f"{order}, {scale}")
    for name, label in ((old, "old/old"), (new, "new/new")):
        level = measured.cells[name, name].retrieval.mean(measured.metric)
        axes.axhline(level, color=GREY, linewidth=1, linestyle=":")
        axes.annotate(
            label, (1.0, level), (2, 0), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8
        )
    axes.set(title=f"{new} over {old}: {way}", ylabel=measured.metric, xlabel="items moved (%)", xlim=(0, 100))
    axes.legend(frameon=False, fontsize=8)
    _lighten(axes)


def _lighten(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
