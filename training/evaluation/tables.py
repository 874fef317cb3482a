"""An evaluation as text to print and as JSON to keep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from index.evaluation.curves import CALIBRATED, RAW, MeasuredCurve
from index.evaluation.scores import METRICS
from index.version import Score
from training.evaluation.matrix import Cell, Evaluation, Upgrade

NONE = "-"


def lines(measured: Evaluation) -> Iterator[str]:
    """Everything measured, as tables of plain text."""
    yield f"{measured.queries} queries ({measured.skipped} without a relevant item), {measured.items} items"
    for metric in METRICS:
        yield ""
        yield f"{metric}: queries by the version of the row, items by the version of the column"
        yield from _matrix(measured, metric)
        if measured.upgrades:
            better = sum(upgrade.difference[metric].value > 0 for upgrade in measured.upgrades.values())
            yield f"new/old > old/old in {better} of {len(measured.upgrades)} pairs of versions with an edge"
    for title, header, rows in (
        ("verification", *_rates(measured)),
        ("upgrades; P_com and update gain where --independent beats old/old", *_upgrades(measured)),
        ("P_up: what compatibility gave (cost, below 0) the new version itself", *_p_up(measured)),
        (f"backfill curves, {measured.metric}", *_curves(measured)),
    ):
        if rows:
            yield ""
            yield title
            yield from table(header, rows)


def as_json(measured: Evaluation) -> dict[str, Any]:
    """Everything measured, as JSON values; pairs are written new/old, what is unknown is null."""
    return {
        "queries": measured.queries,
        "items": measured.items,
        "skipped": measured.skipped,
        "versions": [
            {"name": name, "dim": card.dim, "space": dict(card.space), "method": card.method, "encoder": card.encoder}
            for name, card in measured.cards.items()
        ],
        "average_compatibility": {m: _number(measured.matrix(m).average_compatibility) for m in METRICS},
        "matrix": {_pair(pair): _cell_json(cell) for pair, cell in measured.cells.items()},
        "upgrades": {_pair(pair): _upgrade_json(upgrade) for pair, upgrade in measured.upgrades.items()},
        "p_up": {name: _scores_json(scores) for name, scores in measured.p_up.items()},
        "curves": [
            {
                **dict(zip(("new", "old", "kind", "order", "scores"), key, strict=True)),
                "metric": measured.metric,
                "shares": curve.curve.shares.tolist(),
                "values": curve.curve.values.tolist(),
                "area": vars(curve.area),
                "largest_dip": curve.curve.largest_dip,
            }
            for key, curve in measured.curves.items()
        ],
    }


def interval(score: Score | None) -> str:
    """A score with its interval."""
    return NONE if score is None else f"{score.value:.3f} ({score.low:.3f} - {score.high:.3f})"


def route(kinds: Sequence[str]) -> str:
    """The edges on a way, in the order they are taken."""
    return " + ".join(kinds) or NONE


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as their widest cell, two blanks apart."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _matrix(measured: Evaluation, metric: str) -> Iterator[str]:
    def cell(new: str, old: str) -> str:
        found = measured.cells.get((new, old))
        return NONE if found is None else interval(found.retrieval.interval(metric))

    names = measured.names
    rows = [
        [new, *(cell(new, old) for old in names[: row + 1]), *[""] * (len(names) - row - 1)]
        for row, new in enumerate(names)
    ]
    return table(["", *names], rows)


def _rates(measured: Evaluation) -> tuple[list[str], list[list[str]]]:
    asked = {pair: cell.rates for pair, cell in measured.cells.items() if cell.rates}
    columns = list(next(iter(asked.values()), {}))
    return ["queries/items", *columns], [
        [_pair(pair), *(f"{rates[column]:.3f}" for column in columns)] for pair, rates in asked.items()
    ]


def _upgrades(measured: Evaluation) -> tuple[list[str], list[list[str]]]:
    header = [
        "new/old",
        "edges",
        "metric",
        "new/old - old/old",
        "P_com",
        "update gain",
        "negative flips",
        "CKA",
        "strict: same, other",
    ]
    rows = []
    for pair, upgrade in measured.upgrades.items():
        for metric in METRICS:
            first = metric == METRICS[0]
            rows.append(
                [
                    _pair(pair) if first else "",
                    route(measured.cells[pair].kinds) if first else "",
                    metric,
                    interval(upgrade.difference[metric]),
                    interval(upgrade.p_com.get(metric)),
                    interval(upgrade.update_gain.get(metric)),
                    f"{upgrade.flips}: {interval(upgrade.flip_share)}" if first else "",
                    f"{upgrade.cka:.3f}" if first else "",
                    _strict(upgrade) if first else "",
                ]
            )
    return header, rows


def _strict(upgrade: Upgrade) -> str:
    return NONE if upgrade.strict is None else f"{upgrade.strict.same:.3f}, {upgrade.strict.other:.3f}"


def _p_up(measured: Evaluation) -> tuple[list[str], list[list[str]]]:
    rows = [[name, *(interval(scores.get(m)) for m in METRICS)] for name, scores in measured.p_up.items()]
    return ["version", *METRICS], rows


def _curves(measured: Evaluation) -> tuple[list[str], list[list[str]]]:
    header = ["new/old", "kind", "order", "area, raw", "largest dip", "area, calibrated", "largest dip"]
    keys = dict.fromkeys(key[:4] for key in measured.curves)
    return header, [
        [f"{new}/{old}", way, order, *_area_and_dip(measured.curves, (new, old, way, order))]
        for new, old, way, order in keys
    ]


def _area_and_dip(
    curves: Mapping[tuple[str, str, str, str, str], MeasuredCurve], key: tuple[str, str, str, str]
) -> Iterator[str]:
    for scale in (RAW, CALIBRATED):
        curve = curves[*key, scale]
        yield interval(curve.area)
        yield f"{curve.curve.largest_dip:.3f}"


def _cell_json(cell: Cell) -> dict[str, Any]:
    scores = {metric: vars(cell.retrieval.interval(metric)) for metric in METRICS}
    rates = {"verification": {name: _number(rate) for name, rate in cell.rates.items()}} if cell.rates else {}
    return {"edges": list(cell.kinds), **scores, **rates}


def _upgrade_json(upgrade: Upgrade) -> dict[str, Any]:
    return {
        "difference": _scores_json(upgrade.difference),
        "p_com": _scores_json(upgrade.p_com),
        "update_gain": _scores_json(upgrade.update_gain),
        "negative_flips": {"count": upgrade.flips, "share": vars(upgrade.flip_share)},
        "cka": _number(upgrade.cka),
        "strict": upgrade.strict and {name: _number(share) for name, share in vars(upgrade.strict).items()},
    }


def _scores_json(scores: Mapping[str, Score]) -> dict[str, dict[str, float]]:
    return {metric: vars(score) for metric, score in scores.items()}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _pair(pair: tuple[str, str]) -> str:
    return "/".join(pair)
