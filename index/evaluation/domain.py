"""The domain of a fitted edge: whether queries are similar to the pairs that it was fitted on.

A query is out of the domain if its similarity to the nearest of the fitted pairs' new vectors is below that of 99 of
100 held-out pairs. Few held-out pairs say little about others: of four, one is below this limit. So an edge is only
distrusted if more queries are out than so few pairs leave open.

Shape suffixes: R fitted pairs, Q queries, M new dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from index.evaluation.fitting import Pairs
from index.evaluation.metrics import Compared, blocks, comparable, costs, scores_of
from index.space import Space, Vectors
from index.version import EDGE_DOMAIN
from index.version_folder.artifacts import read_arrays

OUTSIDE = 0.01
"""The share of held-out pairs that is out of the domain by definition; of fewer than 100 pairs, one is."""
MOST_NUMBERS, LEAST_PAIRS, MOST_PAIRS = 1 << 20, 50, 1000
"""The stored sample of fitted pairs: largest number of floats, and fewest and most pairs."""
OUTSIDE_WARNING = 0.05
"""Share of queries out of the domain from which a warning is given: five times that of held-out pairs."""
Z95 = 1.96


@dataclass(frozen=True)
class Domain:
    """The domain of an edge.

    Attributes:
        reference_RM: vectors of fitted pairs.
        least: the least similarity of a query in the domain.
        held: number of held-out pairs; 0: unknown, in a file of an earlier release.
        outside: how many of them are out.
    """

    reference_RM: Vectors
    least: float
    held: int = 0
    outside: int = 0

    def save(self, folder: Path) -> None:
        """Write it into the folder of the edge."""
        least, held = np.array([self.least], np.float32), np.array([self.held, self.outside], np.float32)
        np.savez(folder / EDGE_DOMAIN, reference=self.reference_RM, least=least, held=held)

    @property
    def expected(self) -> float:
        """The share of held-out pairs that is out."""
        return self.outside / self.held if self.held else OUTSIDE

    @property
    def tolerated(self) -> float:
        """The share that may be out of queries like the pairs: five times OUTSIDE, or what so few pairs leave open."""
        return max(OUTSIDE_WARNING, _wilson(self.outside, self.held)[1]) if self.held else OUTSIDE_WARNING


@dataclass(frozen=True)
class DomainCoverage:
    """The number of `queries` out of the domain; `low` and `high` bound their share (95 %, Wilson).

    `expected` is the share of the `held` held-out pairs (0: unknown), and up to `tolerated` may be of queries like the
    pairs. `nearest` is the median similarity of a query to its nearest pair, `least` the limit of the domain. In `l2`
    and `lorentz` spaces the similarity is minus the distance.
    """

    queries: int
    outside: int
    low: float
    high: float
    expected: float
    held: int
    tolerated: float
    nearest: float
    least: float

    @property
    def share(self) -> float:
        """The share of queries out of the domain."""
        return self.outside / self.queries

    def in_words(self) -> str:
        """The result as text."""
        told = f"{self.share:.1%} [{self.low:.1%}, {self.high:.1%}] of {self.queries} queries are out of its domain"
        held = f"of {f'{self.held} ' if self.held else ''}held-out pairs {self.expected:.0%} are"
        if self.low > self.tolerated:
            return f"Do not trust the edge's measured scores: {told}, {held}. Fit it on pairs like these queries."
        if self.high <= OUTSIDE_WARNING:
            return f"These queries are like the pairs that the edge was fitted on: {told}, {held}."
        more = "Check more queries" if self.low <= OUTSIDE_WARNING else "Fit the edge on more pairs, to hold out more"
        return f"It is uncertain whether these queries are like the pairs: {told}, {held}. {more}."


def fit_domain(pairs: Pairs, space: Space) -> Domain:
    """The domain of an edge, from its fitted and held-out pairs. `space`: of the new version."""
    count = int(np.clip(MOST_NUMBERS // pairs.new_SM.shape[1], LEAST_PAIRS, MOST_PAIRS))
    reference_RM = pairs.new_SM[:count]  # these are in random order
    nearest_Q = _nearest(pairs.new_QM, reference_RM, space)
    least = np.float32(np.quantile(nearest_Q, OUTSIDE))
    return Domain(reference_RM, float(least), len(nearest_Q), int((nearest_Q < least).sum()))


def read_domain(folder: Path, dim: int, expected: str | None = None) -> Domain:
    """Read the file of `Domain.save`; `dim`: of the new version. Raises InvalidVersionFolder, ChangedOnDisk."""
    shapes = {"reference": (None, dim), "least": (1,), "held": (2,)}
    arrays = read_arrays(folder / EDGE_DOMAIN, EDGE_DOMAIN, shapes, frozenset({"held"}), expected)
    held, outside = arrays.get("held", np.zeros(2)).tolist()
    return Domain(arrays["reference"], float(arrays["least"][0]), int(held), int(outside))


def check_domain(domain: Domain, queries_QM: Vectors, space: Space) -> DomainCoverage:
    """Count the queries (at least one) that are out of a domain."""
    nearest_Q = _nearest(queries_QM, domain.reference_RM, space)
    outside, count = int((nearest_Q < domain.least).sum()), len(nearest_Q)
    low, high = _wilson(outside, count)
    return DomainCoverage(
        queries=count,
        outside=outside,
        low=low,
        high=high,
        expected=domain.expected,
        held=domain.held,
        tolerated=domain.tolerated,
        nearest=float(np.median(nearest_Q)),
        least=domain.least,
    )


def as_json(domain: Domain) -> dict[str, Any]:
    """The entry in the evidence of an edge."""
    return {"pairs": len(domain.reference_RM), "outside": OUTSIDE, "least": domain.least}


def _nearest(queries_QM: Vectors, reference_RM: Vectors, space: Space) -> Vectors:
    """The similarity of each query to the nearest pair (Q,), higher is more similar."""
    queries_QW, items_RW = comparable(Compared(queries_QM, reference_RM, space))
    least = [costs(queries_QW[rows], items_RW, space).min(axis=1) for rows in blocks(len(queries_QW), len(items_RW))]
    scores_Q = scores_of(np.concatenate(least), space)
    return scores_Q if space.higher_is_better else -scores_Q


def _wilson(hits: int, count: int) -> tuple[float, float]:
    """A 95 % interval of a share (Wilson 1927)."""
    share, z2 = hits / count, Z95**2
    centre, spread = share + z2 / (2 * count), Z95 * np.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    low, high = ((centre + side * spread) / (1 + z2 / count) for side in (-1, 1))
    return max(float(low), 0.0), min(float(high), 1.0)
