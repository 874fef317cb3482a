"""What a trial counts (`Counters`): answers, errors and latencies of both versions; the limits of a canary on these.

The counts of several processes are added up in the database, so a report has only sums and histograms, and its size
does not grow with the number of queries. Times are in milliseconds.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

STEP = 1.1
"""Each bucket of a latency histogram is this factor wider than the one before: quantiles are exact to about 5 %."""
ERRORS_KEPT = 5


@dataclass
class Counters:
    """Sums of one phase: plain counts, latency histograms of the old and the new version, and the last errors."""

    counts: Counter[str] = field(default_factory=Counter)
    latency: dict[str, Counter[int]] = field(default_factory=lambda: {"old": Counter(), "new": Counter()})
    errors: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **amounts: float) -> None:
        """Add to counts."""
        for name, amount in amounts.items():
            self.counts[name] += amount  # type: ignore[assignment]  # sums of overlaps are fractions

    def add_latency(self, side: str, seconds: float, queries: int = 1) -> None:
        """Add the latency of queries that were answered together; `side`: by the version `old` or `new`."""
        self.latency[side][bucket(seconds * 1000)] += queries

    def add_error(self, error: Exception, queries: int = 1) -> None:
        """Add queries that the new version could not answer."""
        self.add(errors=queries)
        text = f"{type(error).__name__}: {error}"[:500]
        self.errors = [*self.errors, {"at": time.time(), "error": text}][-ERRORS_KEPT:]

    def as_json(self) -> dict[str, Any]:
        """The counts in their stored form."""
        latency = {side: {str(b): n for b, n in found.items()} for side, found in self.latency.items()}
        return {"counts": dict(self.counts), "latency": latency, "errors": self.errors}

    def __iadd__(self, other: Counters) -> Self:
        self.counts.update(other.counts)
        for side, found in other.latency.items():
            self.latency[side].update(found)
        self.errors = [*self.errors, *other.errors][-ERRORS_KEPT:]
        return self


def counters_from_json(value: Mapping[str, Any]) -> Counters:
    """The counters of a stored report."""
    latency = {side: Counter({int(b): n for b, n in found.items()}) for side, found in value["latency"].items()}
    return Counters(Counter(value["counts"]), latency, list(value["errors"]))


def bucket(milliseconds: float) -> int:
    """The number of the histogram bucket of a time above 0."""
    return math.floor(math.log(max(milliseconds, 1e-3)) / math.log(STEP))


def quantile(histogram: Mapping[int, int], q: float) -> float | None:
    """The latency (ms) below which a share `q` of the answers lies; None: there are no answers."""
    remaining = q * sum(histogram.values())
    for number in sorted(histogram):
        remaining -= histogram[number]
        if remaining <= 1e-9:
            return float(STEP ** (number + 0.5))
    return None


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """The public summary of a stored report."""
    counters = counters_from_json(report)
    counts, compared = counters.counts, counters.counts["compared"]
    answered = counts["new"]
    return {
        "queries": {"old": int(counts["old"]), "new": int(answered)},
        "errors": int(counts["errors"]),
        "error_rate": counts["errors"] / answered if answered else None,
        "dropped": int(counts["dropped"]),
        "compared": int(compared),
        "overlap": counts["overlap"] / compared if compared else None,
        "rank_correlation": counts["rank_correlation"] / counts["correlated"] if counts["correlated"] else None,
        "first_match_flips": int(counts["flips"]),
        "latency_ms": {
            side: {"p50": quantile(found, 0.5), "p99": quantile(found, 0.99)}
            for side, found in counters.latency.items()
        },
        "last_errors": counters.errors,
    }


def exceeded_limit(settings: Mapping[str, Any], report: Mapping[str, Any]) -> str | None:
    """The limit that a canary's newest counts exceed, in words; None: none, or too few queries were answered."""
    counted = summary(report)
    answered, rate, p99 = counted["queries"]["new"], counted["error_rate"], counted["latency_ms"]["new"]["p99"]
    if answered < settings.get("min_queries", 1):
        return None
    max_rate, max_p99 = settings.get("max_error_rate"), settings.get("max_p99_ms")
    if max_rate is not None and rate > max_rate:
        return f"error rate {rate:.1%} of {answered} queries is above the limit of {max_rate:.1%}"
    if max_p99 is not None and p99 is not None and p99 > max_p99:
        return f"p99 latency {p99:.1f} ms of {answered} queries is above the limit of {max_p99:g} ms"
    return None
