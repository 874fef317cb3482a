"""Loss curves from a training's CSV logs: the mean of the loss and its parts in each epoch, over all its starts."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

TIMES = {"epoch", "step"}

LossCurves = Mapping[str, Mapping[int, float]]
"""quantity -> epoch (from 1) -> mean; the loss first."""


def read_loss_curves(logs: Path) -> LossCurves:
    """Read the CSV logs of a training.

    Args:
        logs: `training.fitting.logs_of` its folder, with `version_0` and one more folder each time it resumed; an
            epoch that was trained again counts as the last start logged it. A start at the first epoch belongs to
            another training than those before it.

    Returns:
        Empty where there are no logs, or none that can be read.
    """
    means: dict[str, dict[int, float]] = {}
    for path in sorted(logs.glob("version_*/metrics.csv"), key=lambda path: int(path.parent.name.partition("_")[2])):
        values = _epochs(path)
        if any(1 in epochs for epochs in values.values()):
            means = {}  # started anew: the logs before are of another training
        for name, epochs in values.items():
            means.setdefault(name, {}).update({epoch: sum(xs) / len(xs) for epoch, xs in epochs.items()})
    return dict(sorted(means.items(), key=lambda item: (item[0] != "loss", item[0])))


def _epochs(path: Path) -> dict[str, dict[int, list[float]]]:
    values: dict[str, dict[int, list[float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if (epoch := _number(row.get("epoch"))) is None:
                continue
            for name in row.keys() - TIMES:
                if (value := _number(row[name])) is not None:
                    values.setdefault(name, {}).setdefault(int(epoch) + 1, []).append(value)
    return values


def _number(text: object) -> float | None:
    """None also for what a full disk or a kill left of a row: fields that are missing, cut off or too many."""
    try:
        value = float(text) if isinstance(text, str) else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None
