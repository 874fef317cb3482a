"""The papers' own CIFAR-100 tables, to print beside ours: `regraft reproduce`.

Percent, CMC-1 with mAP; queries and items are the 10,000 test images, self left out. Figures are those of
docs/methods.md's sources; P_com is computed from them, against the independent version of the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from index.evaluation.metrics import p_com
from training.comparison import PAIRS, Run, independent_of
from training.recipes.family import FIRSTS


@dataclass(frozen=True)
class Published:
    """One row of a paper's table; NaN where it has none.

    Args:
        paper: short name of docs/methods.md, and whose run where it is not the method's own.
        old_old, new_old, new_new: CMC-1 in percent.
    """

    paper: str
    old_old: float
    new_old: float
    new_new: float


@dataclass(frozen=True)
class Protocol:
    """What `regraft reproduce` trains.

    Args:
        family: of recipes, one of `training.comparison.COMPARED`.
        title: what it is.
        published: part of the family -> rows of papers.
    """

    family: str
    title: str
    published: Mapping[str, Sequence[Published]]


def _hbct(new_old: float, new_new: float, old_old: float = 37.6) -> list[Published]:
    return [Published("HBCT, Table 1", old_old, new_old, new_new)]


PROTOCOLS: dict[str, Protocol] = {
    "cifar100-b": Protocol(
        "cifar100_class",
        "protocol B: ResNet-18 at 32 pixels, classes 0-49 -> 0-99 (HBCT and its baselines)",
        {
            "independent": _hbct(1.9, 71.6),
            "l2": _hbct(47.8, 71.2),
            "bct": _hbct(44.7, 69.5),
            "hot_refresh": _hbct(49.8, 71.5),
            "advbct": _hbct(45.9, 70.8),
            "hoc": _hbct(49.0, 71.3),
            "hbct": _hbct(57.2, 72.2, 42.5),
        },
    ),
    "cifar100-a": Protocol(
        "cifar100_resnet50",
        "protocol A: ResNet-50 at 224 pixels, classes 0-49 -> 0-99 (BT2, OCA, FCT)",
        {
            "independent": [Published("BT2", 33.6, 0.8, 62.7), Published("OCA", 31.3, 1.0, 56.8)],
            "bct": [Published("BT2's run", 33.6, 23.5, 56.1), Published("OCA's run", 31.3, 36.7, 54.8)],
            "bt2": [Published("BT2", 33.6, 43.3, 64.2), Published("OCA's run", 31.3, 38.6, 61.8)],
            "oca": [Published("OCA", 31.3, 41.4, 62.0)],
            "fct": [Published("FCT, public code", 32.9, 50.6, 56.4)],
        },
    ),
}
"""name -> protocol."""
HEADER = ("method", "whose", *PAIRS, "P_com")


def beside(protocol: Protocol, runs: Sequence[Run], parts: Sequence[str]) -> str:
    """The papers' rows and ours as a markdown table, CMC-1 in percent, means over seeds; ours below each method's."""
    rows = [line for part in parts if not part.endswith("v1") for line in _rows(protocol, runs, part)]
    return "\n".join([f"| {' | '.join(HEADER)} |", f"|{' --- |' * len(HEADER)}", *rows])


def ordering(protocol: Protocol, runs: Sequence[Run], parts: Sequence[str]) -> Iterator[str]:
    """Methods by P_com, best first: one line for each paper's run, one for ours."""
    values: dict[str, dict[str, float]] = {}
    for part in parts:
        for whose, _, value in _measured(protocol, runs, part):
            if part not in FIRSTS and not np.isnan(value):
                values.setdefault(whose.removesuffix("'s run"), {})[part] = value
    for whose, found in values.items():
        if len(found) > 1:
            yield f"{whose}: {ranked(found)}"


def ranked(found: Mapping[str, float]) -> str:
    """Methods by P_com, best first; old/old stands before those that find less in old items than the old version."""
    order = sorted(found, key=lambda part: -found[part])
    return " > ".join([*(p for p in order if found[p] > 0), "old/old", *(p for p in order if found[p] <= 0)])


def _rows(protocol: Protocol, runs: Sequence[Run], part: str) -> Iterator[str]:
    for whose, triple, value in _measured(protocol, runs, part):
        cells = ["" if np.isnan(x) else f"{x:.1f}" for x in triple]
        yield f"| {' | '.join([part, whose, *cells, '' if np.isnan(value) else f'{value:.3f}'])} |"


def _measured(
    protocol: Protocol, runs: Sequence[Run], part: str
) -> Iterator[tuple[str, tuple[float, float, float], float]]:
    """(whose, (old/old, new/old, new/new), P_com) of the papers' rows, then of ours where it is measured."""
    for row in protocol.published.get(part, ()):
        triple = (row.old_old, row.new_old, row.new_new)
        own = [x.new_new for x in protocol.published["independent"] if x.paper.split("'")[0] == row.paper.split("'")[0]]
        yield row.paper, triple, p_com(row.old_old, row.new_old, own[0]) if own else float("nan")
    ours = _ours(runs, part)
    if ours is not None:
        independent = _ours(runs, independent_of(part))
        best = float("nan") if independent is None else independent[2]
        yield f"ours ({_seeds(runs, part)})", ours, p_com(ours[0], ours[1], best)


def _ours(runs: Sequence[Run], part: str) -> tuple[float, float, float] | None:
    found = [results for run in runs if (results := run.results(part)) is not None]
    if not found:
        return None
    old_old, new_old, new_new = (
        float(np.mean([100 * x[f"{pair} cmc@1"].mean() if f"{pair} cmc@1" in x else np.nan for x in found]))
        for pair in PAIRS
    )
    return old_old, new_old, new_new


def _seeds(runs: Sequence[Run], part: str) -> str:
    count = sum(run.results(part) is not None for run in runs)
    return f"{count} seed{'s' if count > 1 else ''}"
