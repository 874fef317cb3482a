"""The results of `training.comparison.runs` as a markdown table, and such a table inside a document.

A value is the mean over seeds; its interval is the 95 % percentile bootstrap over queries, each query's value being its
mean over seeds; "sd" is the standard deviation of CMC-1 over training seeds. That of the gain tells how certain the
order of methods is, since all methods of a seed have the same old version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import isnan, nan
from pathlib import Path

import numpy as np

from index.durable import write_whole
from index.errors import InvalidArgument
from index.evaluation.metrics import MEAN_AP, mean_interval, p_com, p_up, paired_bootstrap
from index.version import Score
from training.comparison.runs import METRICS, PAIRS, MetricValues, Run, independent_part
from training.recipes.family import METHOD_PARTS, STANDALONE_PARTS

GAINS = ("new/old - old/old, CMC-1", "the same, mAP")
DEVIATIONS = {"sd new/old": ("new/old",), "sd gain": ("new/old", "old/old"), "sd new/new": ("new/new",)}
"""Column -> the pairs of `deviation`."""
INTERVAL = re.compile(r"(\S+) \((\S+) to (\S+)\)")
"""The format of `interval`."""
COLUMNS = ("method", *PAIRS, *GAINS, "P_com", "P_up", "flips", "seeds", *DEVIATIONS, "training, s")


def table(runs: Sequence[Run], parts: Sequence[str]) -> str:
    """The table, with a row for each part that is measured."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    return "\n".join([*lines, *(line for part in parts if not part.endswith("v1") for line in row(part, runs))])


def row(part: str, runs: Sequence[Run]) -> Iterator[str]:
    """A row of the table; nothing before the first seed is measured.

    P_com and P_up are empty until the independent version is measured with each seed, P_com also if it is not better
    than old/old.
    """
    seeds = [(run, results) for run in runs if (results := run.results(part)) is not None]
    if not seeds:
        return
    mean = {name: np.mean([results[name] for _, results in seeds], axis=0) for name in seeds[0][1]}
    references = [results for run, _ in seeds if (results := run.results(independent_part(part))) is not None]
    is_complete = len(references) == len(seeds)
    independent = float(np.mean([results["new/new cmc@1"] for results in references])) if is_complete else nan
    cells = [part, *(cell(mean, pair) for pair in PAIRS)]
    if "new/old cmc@1" in mean:
        old_old, new_old, new_new = (float(mean[f"{pair} cmc@1"].mean()) for pair in PAIRS)
        flips = np.mean([(results["old/old cmc@1"] > results["new/old cmc@1"]).mean() for _, results in seeds])
        cells += [
            *(interval(paired_bootstrap(mean[f"new/old {m}"], mean[f"old/old {m}"])) for m in METRICS),
            "" if isnan(share := p_com(old_old, new_old, independent)) else f"{share:z.3f}",
            "" if isnan(loss := p_up(new_new, independent)) else f"{loss:+z.3f}",
            f"{flips:.1%}",
        ]
    else:
        cells += [""] * 5
    by_seed = [results for _, results in seeds]
    cells += [str(len(seeds)), *(deviation(by_seed, *pairs) for pairs in DEVIATIONS.values())]
    took = [seconds for run, _ in seeds if (seconds := run.seconds(part)) is not None]
    yield f"| {' | '.join([*cells, f'{np.mean(took):.0f}' if took else ''])} |"


def read_pair_scores(text: str) -> list[tuple[str, list[Score]]]:
    """CMC-1 of PAIRS read from a table, for each method whose row has all three."""
    rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:])
    scored = ((method, [score for cell in cells[: len(PAIRS)] for score in _scores(cell)]) for method, *cells in rows)
    return [(method, scores) for method, scores in scored if method in METHOD_PARTS and len(scores) == len(PAIRS)]


def deviation(seeds: Sequence[MetricValues], pair: str, base: str | None = None) -> str:
    """Standard deviation over training seeds of CMC-1 of a pair, or of its gain over another, `base`, in points.

    "" with one seed.
    """
    values = [
        100 * (results[f"{pair} cmc@1"].mean() - (results[f"{base} cmc@1"].mean() if base else 0.0))
        for results in seeds
        if f"{pair} cmc@1" in results
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


def merge_table(document: Path, name: str, text: str) -> str:
    """Merge a table of methods into the one in a document, whose rows of other methods stay.

    So a table grows over machines that do not have each other's versions. Returns the merged table.

    Raises:
        InvalidArgument: the document has no such table.
    """
    existing = _marked(name).search(document.read_text())
    header, rule, *rows = text.splitlines()
    if existing is not None and header in (before := existing[2].strip().splitlines()):
        new = {_method(row) for row in rows}
        rows += [row for row in before[before.index(header) + 2 :] if _method(row) not in new]
    order = [*STANDALONE_PARTS, *METHOD_PARTS]
    merged = "\n".join([header, rule, *sorted(rows, key=lambda row: order.index(_method(row)))])
    replace_table(document, name, merged)
    return merged


def replace_table(document: Path, name: str, text: str) -> None:
    """Replace the table between `<!-- table NAME -->` and the next `<!-- end -->`.

    Raises:
        InvalidArgument: the document has no such table.
    """
    written, count = _marked(name).subn(lambda match: f"{match[1]}\n{text}\n\n{match[3]}", document.read_text())
    if not count:
        raise InvalidArgument(f"{document} has no place marked <!-- table {name} -->")
    write_whole(document, written.encode())


def _marked(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- table {re.escape(name)} -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def _scores(cell: str) -> Iterator[Score]:
    for found in INTERVAL.findall(cell):
        yield Score(*(float(value) / 100 for value in found))


def _method(row: str) -> str:
    return row.split("|")[1].strip()
