"""What `training.comparison` has measured, as a markdown table, and that table kept inside a document.

A value is the mean over seeds; its interval is the 95 % percentile bootstrap over queries, each query's value being its
mean over seeds; "sd" is the standard deviation over training seeds of CMC-1. That of the gain says how sure an order of
methods is: a seed's old version is the same for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import isnan, nan
from pathlib import Path

import numpy as np

from index.errors import InvalidArgument
from index.evaluation.metrics import MEAN_AP, mean_interval, p_com, p_up, paired_bootstrap
from index.version import Score
from training.comparison import METRICS, PAIRS, MetricValues, Run, independent_of
from training.recipes.family import METHOD_PARTS, STANDALONE_PARTS

GAINS = ("new/old - old/old, CMC-1", "the same, mAP")
DEVIATIONS = {"sd new/old": ("new/old",), "sd gain": ("new/old", "old/old"), "sd new/new": ("new/new",)}
"""column -> whose deviation over seeds it shows, see `deviation`."""
INTERVAL = re.compile(r"(\S+) \((\S+) to (\S+)\)")
"""What `interval` writes."""
COLUMNS = ("method", *PAIRS, *GAINS, "P_com", "P_up", "flips", "seeds", *DEVIATIONS, "training, s")


def table(runs: Sequence[Run], parts: Sequence[str]) -> str:
    """A line for each part that is measured."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    return "\n".join([*lines, *(line for part in parts if not part.endswith("v1") for line in row(part, runs))])


def row(part: str, runs: Sequence[Run]) -> Iterator[str]:
    """One line of the table; none before the first seed is measured.

    No P_com and P_up before the independent version is measured with each seed.
    """
    seeds = [(run, found) for run in runs if (found := run.results(part)) is not None]
    if not seeds:
        return
    mean = {name: np.mean([found[name] for _, found in seeds], axis=0) for name in seeds[0][1]}
    alone = [found for run, _ in seeds if (found := run.results(independent_of(part))) is not None]
    independent = float(np.mean([found["new/new cmc@1"] for found in alone])) if len(alone) == len(seeds) else nan
    cells = [part, *(cell(mean, pair) for pair in PAIRS)]
    if "new/old cmc@1" in mean:
        old_old, new_old, new_new = (float(mean[f"{pair} cmc@1"].mean()) for pair in PAIRS)
        flips = np.mean([(found["old/old cmc@1"] > found["new/old cmc@1"]).mean() for _, found in seeds])
        cells += [
            *(interval(paired_bootstrap(mean[f"new/old {m}"], mean[f"old/old {m}"])) for m in METRICS),
            "" if isnan(independent) else f"{p_com(old_old, new_old, independent):z.3f}",
            "" if isnan(independent) else f"{p_up(new_new, independent):+z.3f}",
            f"{flips:.1%}",
        ]
    else:
        cells += [""] * 5
    measured = [found for _, found in seeds]
    cells += [str(len(seeds)), *(deviation(measured, *pairs) for pairs in DEVIATIONS.values())]
    took = [seconds for run, _ in seeds if (seconds := run.seconds(part)) is not None]
    yield f"| {' | '.join([*cells, f'{np.mean(took):.0f}' if took else ''])} |"


def drawn(text: str) -> list[tuple[str, list[Score]]]:
    """CMC-1 of PAIRS by a table's text, for each method whose row has all three."""
    rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:])
    found = ((method, [score for cell in cells[: len(PAIRS)] for score in _scores(cell)]) for method, *cells in rows)
    return [(method, scores) for method, scores in found if method in METHOD_PARTS and len(scores) == len(PAIRS)]


def deviation(seeds: Sequence[MetricValues], pair: str, above: str | None = None) -> str:
    """Standard deviation over training seeds of CMC-1, or of its gain `above` another pair, in points.

    Nothing with one seed.
    """
    values = [
        100 * (found[f"{pair} cmc@1"].mean() - (found[f"{above} cmc@1"].mean() if above else 0.0))
        for found in seeds
        if f"{pair} cmc@1" in found
    ]
    return f"{np.std(values, ddof=1):.1f}" if len(values) > 1 else ""


def cell(mean: MetricValues, pair: str) -> str:
    """CMC-1 with its interval, and mAP in brackets, in percent as in the papers' tables."""
    if f"{pair} cmc@1" not in mean:
        return ""
    return f"{interval(mean_interval(mean[f'{pair} cmc@1']))} [{100 * mean[f'{pair} {MEAN_AP}'].mean():.1f}]"


def interval(score: Score) -> str:
    """In percent."""
    return f"{100 * score.value:.1f} ({100 * score.low:.1f} to {100 * score.high:.1f})"


def amend(document: Path, name: str, text: str) -> str:
    """`put_into` for a table of methods: rows of the document stay where the new table has none of their method.

    So a table grows over machines that do not have each other's versions. Returns the whole table.

    Raises:
        InvalidArgument: the document has no such place.
    """
    held = _place(name).search(document.read_text())
    header, rule, *rows = text.splitlines()
    if held is not None and header in (before := held[2].strip().splitlines()):
        new = {_method(row) for row in rows}
        rows += [row for row in before[before.index(header) + 2 :] if _method(row) not in new]
    order = [*STANDALONE_PARTS, *METHOD_PARTS]
    whole = "\n".join([header, rule, *sorted(rows, key=lambda row: order.index(_method(row)))])
    put_into(document, name, whole)
    return whole


def put_into(document: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- table NAME -->` and the next `<!-- end -->`.

    Raises:
        InvalidArgument: the document has no such place.
    """
    written, count = _place(name).subn(lambda found: f"{found[1]}\n{text}\n\n{found[3]}", document.read_text())
    if not count:
        raise InvalidArgument(f"{document} has no place marked <!-- table {name} -->")
    document.write_text(written)


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- table {re.escape(name)} -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def _scores(cell: str) -> Iterator[Score]:
    for found in INTERVAL.findall(cell):
        yield Score(*(float(value) / 100 for value in found))


def _method(row: str) -> str:
    return row.split("|")[1].strip()
