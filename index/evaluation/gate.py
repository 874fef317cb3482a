"""The gate (`gate`): M(new/old) compared with M(old/old) on the same queries, before a new version is deployed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from index.errors import InvalidArgument
from index.evaluation.measures import PerQuery
from index.evaluation.metrics import (
    Bools,
    Floats,
    Retrieval,
    mean_interval,
    negative_flips,
    t_interval,
    update_gain,
)
from index.version import Score

Measured = Retrieval | PerQuery

MIN_QUERIES = 5
"""Smallest number of queries, in all or of a slice, for an interval."""

ERROR_RATE = 0.05
"""Error rate of an interval, and of the intervals of all slices together, so that none looks worse by chance."""


class GateVerdict(StrEnum):
    """The answer of a gate."""

    PASS = "pass"  # noqa: S105 - the word is a verdict
    WARN = "warn"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Slice:
    """The result for the queries that share a value of a metadata field.

    The intervals of `difference`, by Student's t, hold for all slices together at 95 % (Bonferroni).
    """

    value: str
    queries: int
    old_old: float
    new_old: float
    difference: Score


@dataclass(frozen=True)
class Verdict:
    """The verdict of a gate and its evidence.

    Attributes:
        verdict: `pass` if the interval of `difference` is above 0, `refuse` if it is below, else `warn`. Also `warn`
            instead of `pass` if the interval of a slice is below 0, and always if there are fewer than MIN_QUERIES
            queries, or the results are not `decisive`.
        metric: "cmc@<k>", "mAP@1.0", "TAR@FAR=<f>" or "recall@<k>".
        old_old: M(old/old) with its interval.
        new_old: M(new/old), along the route that serving would take.
        new_new: M(new/new), if measured: the result after a full backfill.
        difference: M(new/old) - M(old/old) by paired bootstrap; each resample of TAR@FAR has a threshold of its own.
        negative_flips: number of queries whose first match is relevant under old/old but not under new/old.
        gap_closed: (new/old - old/old) / (new/new - old/old): the share of the whole gain that is reached before any
            backfill; None if new/new is unknown, or one of them is not better than old/old.
        queries: number of queries compared; those without a relevant item are skipped.
        slices: worst difference first, without slices of fewer than MIN_QUERIES queries.
    """

    verdict: GateVerdict
    metric: str
    old_old: Score
    new_old: Score
    new_new: Score | None
    difference: Score
    negative_flips: int
    gap_closed: float | None
    queries: int
    slices: tuple[Slice, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        return asdict(self)


def gate(
    old_old: Measured,
    new_old: Measured,
    new_new: Measured | None = None,
    metric: str = "cmc@1",
    *,
    seed: int = 0,
    slice_of: Sequence[str | None] | None = None,
) -> Verdict:
    """Compare the answers of the gallery after a deployment with its present ones.

    Args:
        old_old: the current version's queries over the stored items.
        new_old: the new version's queries over the same items, along the route that serving would take.
        new_new: the new version's queries over the items embedded by it, if measured.
        metric: the metric that decides, measured in all of them. Flips are counted on CMC@1, which must be measured.
        seed: seed of the bootstrap.
        slice_of: (Q,) the slice of each query, None for none.

    Raises:
        InvalidArgument: an unknown metric, different queries, or no query with a relevant item.
    """
    old_Q, new_Q = old_old.per_query(metric), new_old.per_query(metric)
    if old_Q.shape != new_Q.shape:
        raise InvalidArgument(f"a gate compares the same queries, not {len(old_Q)} and {len(new_Q)}")
    valid_Q = old_old.valid & new_old.valid
    if not valid_Q.any():
        raise InvalidArgument("a gate needs at least one query with an item of its class")
    drawn_old, drawn_new = (side.resampled(metric)[valid_Q] for side in (old_old, new_old))
    difference = _interval((new_Q - old_Q)[valid_Q], drawn_new - drawn_old, seed, least=-1.0)
    before, after = _interval(old_Q[valid_Q], drawn_old, seed), _interval(new_Q[valid_Q], drawn_new, seed)
    best = None
    if new_new is not None:
        best = _interval(new_new.per_query(metric)[new_new.valid], new_new.resampled(metric)[new_new.valid], seed)
    slices = [] if slice_of is None else _slices(old_Q, new_Q, valid_Q, slice_of)
    decisive = valid_Q.sum() >= MIN_QUERIES and old_old.decisive and new_old.decisive
    return Verdict(
        verdict=_decide(difference, slices) if decisive else GateVerdict.WARN,
        metric=metric,
        old_old=before,
        new_old=after,
        new_new=best,
        difference=difference,
        negative_flips=negative_flips(old_old.per_query("cmc@1")[valid_Q], new_old.per_query("cmc@1")[valid_Q]),
        gap_closed=update_gain(before.value, after.value, best.value) if best else None,
        queries=int(valid_Q.sum()),
        slices=tuple(slices),
    )


def _decide(difference: Score, slices: Sequence[Slice]) -> GateVerdict:
    if difference.high < 0:
        return GateVerdict.REFUSE
    worse = any(found.difference.high < 0 for found in slices)
    return GateVerdict.PASS if difference.low > 0 and not worse else GateVerdict.WARN


def _slices(old_Q: Floats, new_Q: Floats, valid_Q: Bools, slice_of: Sequence[str | None]) -> list[Slice]:
    rows_of: dict[str, list[int]] = {}
    for row in np.flatnonzero(valid_Q).tolist():
        if (name := slice_of[row]) is not None:
            rows_of.setdefault(name, []).append(row)
    large = [(value, rows) for value, rows in sorted(rows_of.items()) if len(rows) >= MIN_QUERIES]
    found = []
    for value, rows in large:
        old, new = old_Q[rows], new_Q[rows]
        difference = _within(-1.0, t_interval(new - old, 1 - ERROR_RATE / len(large)))
        found.append(Slice(value, len(rows), float(old.mean()), float(new.mean()), difference))
    return sorted(found, key=lambda one: one.difference.value)


def _interval(values: Floats, resampled: Floats, seed: int, least: float = 0.0) -> Score:
    """The mean of values, with the bootstrap interval of those to resample (`PerQuery.shifts`)."""
    drawn = mean_interval(resampled, seed)
    return _within(least, Score(float(values.mean()), drawn.low, drawn.high))


def _within(least: float, score: Score) -> Score:
    """The interval cut to what metrics in [0, 1], or their differences, can be: `least` to 1."""
    return Score(score.value, max(score.low, least), min(score.high, 1.0))
