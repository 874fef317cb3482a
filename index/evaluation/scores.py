"""The scores of retrievals with their intervals over queries: of one, and the gain of one over another."""

from __future__ import annotations

from index.evaluation.metrics import MEAN_AP, Retrieval, paired_bootstrap
from index.version import Score

METRICS = ("cmc@1", "cmc@5", MEAN_AP)
"""What is reported of a retrieval; the first decides."""


def scores(measured: Retrieval) -> dict[str, Score]:
    """The metrics of `METRICS` with their bootstrap intervals."""
    return {metric: measured.interval(metric) for metric in METRICS}


def gain(better: Retrieval, worse: Retrieval, metric: str = METRICS[0]) -> Score:
    """The difference in a metric by paired bootstrap over the queries that are valid on both sides."""
    both = better.valid & worse.valid
    return paired_bootstrap(better.per_query(metric)[both], worse.per_query(metric)[both])


def compatibility(new_old_gain: Score) -> str:
    """Whether a version is compatible with an older one, by the interval of M(new/old) - M(old/old)."""
    if new_old_gain.low > 0:
        return "compatible"
    return "not compatible" if new_old_gain.high <= 0 else "perhaps compatible"
