"""Backfill curves on the command line: options and output."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from regraft.models import CurveInfo, CurvePoint
from regraft.routes.backfills import CurveOptions
from regraft.terminal.answers import out
from regraft.terminal.printing import print_table, score

BARS = "▁▂▃▄▅▆▇█"

Label = Annotated[
    str | None,
    typer.Option("--label", help="Curve: metadata field with the label of each item.", show_default=False),
]
Evaluation = Annotated[
    int | None,
    typer.Option("--evaluation", help="Curve: number of the evaluation set with the queries.", show_default=False),
]
Metric = Annotated[
    str | None,
    typer.Option("--metric", help="Curve: cmc@1, cmc@5, mAP@1.0, or recall@k (needs no labels).", show_default=False),
]
Sample = Annotated[
    int | None, typer.Option("--sample", min=2, help="Curve: maximum number of queries.", show_default=False)
]
K = Annotated[int | None, typer.Option("-k", min=1, help="Curve: matches for recall@k.", show_default=False)]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Curve: seed of the sample.", show_default=False)]
Marks = Annotated[int | None, typer.Option("--marks", min=1, help="Curve: number of equal steps.", show_default=False)]


def curve_options(**options: str | int | None) -> CurveOptions | None:
    """The given curve options; None if there are none."""
    return cast(CurveOptions, {name: value for name, value in options.items() if value is not None}) or None


def sparkline(curve: CurveInfo) -> str:
    """The values as bars, scaled from the lowest to the highest value."""
    values = [point.value for point in curve.points]
    low, span = min(values), max(values) - min(values)
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1)) if span else 0] for value in values)


def summary_line(curve: CurveInfo) -> str:
    """Metric, sparkline, and the first and the newest value."""
    first, newest = curve.points[0], curve.points[-1]
    return f"{curve.metric} {first.value:.1%} {sparkline(curve)} {newest.value:.1%}"


def print_curve(curve: CurveInfo) -> None:
    """The curve in one line, and its points as a table."""
    area = "" if curve.area is None else f", area {curve.area:.1%}"
    out.print(f"{summary_line(curve)}, largest dip {curve.largest_dip:.1%}{area}: {curve.state}")
    if curve.error:
        out.print(f"  {curve.error}")
    rows = [[f"{point.share:.1%}", _moved(point), score(point), point.queries] for point in curve.points]
    print_table(["share", "moved", curve.metric, "queries"], rows)


def _moved(point: CurvePoint) -> str:
    """Items moved when the measurement began, and when it ended if others were moved meanwhile."""
    return f"{point.moved} to {point.moved + point.meanwhile}" if point.meanwhile else str(point.moved)
