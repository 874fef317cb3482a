"""The papers' own CIFAR-100 tables, to print beside ours: `regraft reproduce`.

Percent; queries and items are the 10,000 test images, self left out. Figures are those of docs/methods.md's sources;
P_com is computed from them, against the independent version of the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan

import numpy as np

from index.evaluation.metrics import p_com
from training.comparison.runs import METRICS, PAIRS, Run, independent_part
from training.recipes.family import STANDALONE_PARTS

Triple = tuple[float, float, float]
"""Of PAIRS, in percent; NaN where a paper says nothing."""


@dataclass(frozen=True)
class Published:
    """One row of a paper's table.

    Args:
        paper: short name of docs/methods.md, and whose run where it is not the method's own.
        values: CMC-1 and mAP, as METRICS.
    """

    paper: str
    values: tuple[Triple, Triple]


@dataclass(frozen=True)
class Protocol:
    """What `regraft reproduce` trains.

    Args:
        family: of recipes, one of `training.comparison.runs.COMPARED_FAMILIES`.
        title: what it is.
        published: part of the family -> rows of papers.
    """

    family: str
    title: str
    published: Mapping[str, Sequence[Published]]


def _hbct(cmc: tuple[float, float], mean_ap: tuple[float, float], old: tuple[float, float] = (37.6, 31.0)) -> Published:
    """new/old and new/new of both metrics, classes 0-49 -> 0-99."""
    return Published("HBCT, Table 1", ((old[0], *cmc), (old[1], *mean_ap)))


def _hbct_data(new_old: float, new_new: float, old: float = 57.2) -> Published:
    """CMC-1 of 30 % of the images -> all."""
    return Published("HBCT, Table 1, Ext-data", ((old, new_old, new_new), (nan, nan, nan)))


def _bt2(whose: str, cmc: tuple[float, float], mean_ap: tuple[float, float]) -> Published:
    return Published(whose, ((33.6, *cmc), (24.4, *mean_ap)))


def _oca(whose: str, cmc: tuple[float, float], mean_ap: tuple[float, float]) -> Published:
    return Published(whose, ((31.3, *cmc), (23.3, *mean_ap)))


PROTOCOLS: dict[str, Protocol] = {
    "cifar100-b": Protocol(
        "cifar100_class",
        "protocol B: ResNet-18 at 32 pixels, classes 0-49 -> 0-99 (HBCT and its baselines)",
        {
            "independent": [_hbct((1.9, 71.6), (1.9, 65.4))],
            "l2": [_hbct((47.8, 71.2), (34.2, 65.3))],
            "bct": [_hbct((44.7, 69.5), (32.8, 62.4))],
            "hot_refresh": [_hbct((49.8, 71.5), (34.8, 64.9))],
            "advbct": [_hbct((45.9, 70.8), (33.7, 64.2))],
            "hoc": [_hbct((49.0, 71.3), (34.6, 65.1))],
            # The paper's own P_com is 0.495, against a hyperbolic independent version, whose scores it does not print.
            "hbct": [_hbct((57.2, 72.2), (39.8, 65.5), (42.5, 33.0))],
        },
    ),
    "cifar100-b-data": Protocol(
        "cifar100_data",
        "protocol B: ResNet-18 at 32 pixels, 30 % of the images -> all (HBCT and its baselines)",
        {
            # It is the independent version of 0-49 -> 0-99, too.
            "independent": [_hbct_data(nan, 71.6)],
            "l2": [_hbct_data(64.5, 68.0)],
            "bct": [_hbct_data(70.1, 70.6)],
            "hot_refresh": [_hbct_data(67.1, 71.8)],
            "hoc": [_hbct_data(67.0, 72.0)],
            "hbct": [_hbct_data(71.6, 72.1, 57.6)],
        },
    ),
    "cifar100-a": Protocol(
        "cifar100_resnet50",
        "protocol A: ResNet-50 at 224 pixels, classes 0-49 -> 0-99 (BT2, OCA, FCT)",
        {
            "independent": [_bt2("BT2", (0.8, 62.7), (nan, 49.9)), _oca("OCA", (1.0, 56.8), (nan, 45.4))],
            "bct": [_bt2("BT2's run", (23.5, 56.1), (23.9, 43.6)), _oca("OCA's run", (36.7, 54.8), (25.1, 43.9))],
            "bt2": [_bt2("BT2", (43.3, 64.2), (27.7, 53.1)), _oca("OCA's run", (38.6, 61.8), (26.1, 50.4))],
            "oca": [_oca("OCA", (41.4, 62.0), (26.4, 52.1))],
            "fct": [Published("FCT, public code", ((32.9, 50.6, 56.4), (16.1, 34.2, 36.5)))],
        },
    ),
}
"""name -> protocol."""
HEADER = ("method", "whose", *PAIRS, "P_com", "P_com of mAP")


def beside(protocol: Protocol, runs: Sequence[Run], parts: Sequence[str]) -> str:
    """The papers' rows and ours as a markdown table, means over seeds; ours below each method's.

    CMC-1 in percent, mAP in brackets.
    """
    rows = [line for part in parts if not part.endswith("v1") for line in _rows(protocol, runs, part)]
    return "\n".join([f"| {' | '.join(HEADER)} |", f"|{' --- |' * len(HEADER)}", *rows])


def ordering(
    protocol: Protocol, runs: Sequence[Run], parts: Sequence[str], metric: str = METRICS[0]
) -> Iterator[tuple[str, str]]:
    """Whose run, and its methods by P_com of a metric, best first: each paper's run, then ours."""
    found: dict[str, dict[str, float]] = {}
    for part in parts:
        for whose, values, independent in _measured(protocol, runs, part):
            value = _p_coms(values, independent)[METRICS.index(metric)]
            if part not in STANDALONE_PARTS and not isnan(value):
                found.setdefault(whose.removesuffix("'s run"), {})[part] = value
    for whose, methods in found.items():
        if len(methods) > 1:
            yield whose, ranked(methods)


def ranked(found: Mapping[str, float]) -> str:
    """Methods by P_com, best first, without those that have none (NaN).

    old/old stands before those that find less in old items than the old version.
    """
    order = sorted((part for part in found if not isnan(found[part])), key=lambda part: -found[part])
    return " > ".join([*(p for p in order if found[p] > 0), "old/old", *(p for p in order if found[p] <= 0)])


def _rows(protocol: Protocol, runs: Sequence[Run], part: str) -> Iterator[str]:
    for whose, values, independent in _measured(protocol, runs, part):
        pairs = zip(*values, strict=True)
        cells = ["" if isnan(cmc) else f"{cmc:.1f}" + ("" if isnan(ap) else f" [{ap:.1f}]") for cmc, ap in pairs]
        compatible = ["" if isnan(x) else f"{x:.3f}" for x in _p_coms(values, independent)]
        yield f"| {' | '.join([part, whose, *cells, *compatible])} |"


def _p_coms(values: tuple[Triple, Triple], independent: tuple[Triple, Triple] | None) -> list[float]:
    """Of METRICS; NaN without an independent version that is better than old/old."""
    if independent is None:
        return [nan] * len(METRICS)
    return [p_com(own[0], own[1], best[2]) for own, best in zip(values, independent, strict=True)]


def _measured(
    protocol: Protocol, runs: Sequence[Run], part: str
) -> Iterator[tuple[str, tuple[Triple, Triple], tuple[Triple, Triple] | None]]:
    """(whose, its values, those of the same run's independent version): the papers' rows, then ours if measured."""
    independents = {row.paper: row.values for row in protocol.published["independent"]}
    for row in protocol.published.get(part, ()):
        yield row.paper, row.values, independents.get(row.paper.removesuffix("'s run"))
    measured = [run for run in runs if run.results(part) is not None]
    ours = _ours(measured, part)
    if ours is not None:
        seeds = f"{len(measured)} seed{'s' if len(measured) > 1 else ''}"
        yield f"ours ({seeds})", ours, _ours(measured, independent_part(part))


def _ours(runs: Sequence[Run], part: str) -> tuple[Triple, Triple] | None:
    """Means over all of these seeds; None where one of them is not measured."""
    found = [results for run in runs if (results := run.results(part)) is not None]
    if not found or len(found) < len(runs):
        return None

    def mean(pair: str, metric: str) -> float:
        name = f"{pair} {metric}"
        return float(np.mean([100 * x[name].mean() if name in x else nan for x in found]))

    cmc, mean_ap = ((mean(PAIRS[0], m), mean(PAIRS[1], m), mean(PAIRS[2], m)) for m in METRICS)
    return cmc, mean_ap
