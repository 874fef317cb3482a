"""Choose the kind of adapter to fit on pairs (`choose_kind`), and judge the result.

The kind is chosen on the fitting share alone: every kind is fitted on four fifths of it and measured with the rest. The
pairs that measure the edge in the end are not used, so the reported score of the chosen kind is as unbiased as that of
a kind chosen by name. The scores of the choice are reported separately; the best of several is slightly optimistic.

`learning_curve` estimates whether more pairs would help; `recommendation` judges the edge in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from index.edges.transform import normalise_or_zero
from index.errors import InvalidArgument
from index.evaluation.adapters import Affine, SlerpAdapter
from index.evaluation.fitting import MAX_COMPARED_PAIRS, Pairs, measure, split_pairs
from index.evaluation.metrics import MEAN_AP, Retrieval
from index.evaluation.scores import gain
from index.space import Vectors, space_from_json
from index.version import Card, Score

AUTO = "auto"
"""Stands for a kind: choose the best one."""
METRIC = "cmc@1"
SHARES = (4, 2)
"""Points of the learning curve before the last: a quarter and a half of the fitting pairs."""
CHANCE = 3
"""Queries that may find their own item although an edge maps at random: among Q items one of Q does on average."""
MIN_GAIN = 0.01
"""If the last doubling gained significantly less, more pairs are reported as not worth it."""

Search = Callable[[Vectors, Vectors], Vectors]
"""(queries of the new version (Q, M), the same of the old version (Q, N)) -> queries that search old items (Q, N)."""
Fit = Callable[[str, Pairs], Search]
"""Fits a kind on pairs. Raises InvalidArgument if it cannot be fitted on them."""


@dataclass(frozen=True)
class ChosenKind:
    """The chosen kind, the scores of all kinds on the held-out pairs, and the reasons why others were not tried."""

    kind: str
    reached: Mapping[str, Retrieval]
    left_out: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """`tried`: kind -> metrics; `left_out`: kind -> reason."""
        tried = {
            kind: {metric: vars(measured.interval(metric)) for metric in (METRIC, MEAN_AP)}
            for kind, measured in self.reached.items()
        }
        return {"tried": tried, "left_out": dict(self.left_out)}

    def in_words(self) -> str:
        """The best kind compared with the next best, and whether the difference is significant."""
        best = self.reached[self.kind]
        others = sorted(
            (kind for kind in self.reached if kind != self.kind), key=lambda kind: -kind_score(self, kind)[0]
        )
        if not others:
            return f"{self.kind} is the only kind that could be fitted."
        ahead = gain(best, self.reached[others[0]])
        sure = "" if ahead.low > 0 else ", which may be chance"
        return f"{self.kind} was chosen, {ahead.value:.1%} of queries ahead of {others[0]}{sure}."


@dataclass(frozen=True)
class LearningCurve:
    """The score of a kind, on the same queries, by the number of pairs that it was fitted on.

    Attributes:
        scores: number of pairs -> CMC@1, ascending.
        queries: number of queries.
        doubled: the gain of the last doubling, paired over queries; None if half of the pairs are too few to fit on.
    """

    scores: Mapping[int, Score]
    queries: int
    doubled: Score | None

    def as_json(self) -> list[dict[str, Any]]:
        """A point for each number of pairs."""
        return [{"pairs": count, METRIC: vars(score)} for count, score in self.scores.items()]

    def in_words(self) -> str:
        """Whether more pairs would help."""
        if self.doubled is None:
            return "Too few pairs to say whether more would help."
        half, every = list(self.scores)[-2:]
        told = f"from {half} to {every} pairs it gained {_interval(self.doubled)}"
        if self.doubled.low > 0:
            return f"More pairs would probably help: {told}."
        # An event that none of n queries shows may still have a rate of 3 / n (rule of three, 95 %), which resampling
        # cannot show.
        if max(self.doubled.high, 3 / self.queries) < MIN_GAIN:
            return f"More pairs would hardly help: {told}."
        return f"Whether more pairs would help cannot be told: {told}."


def kind_score(choice: ChosenKind, kind: str) -> tuple[float, float]:
    """The sort key of a kind: CMC@1, then mAP."""
    measured = choice.reached[kind]
    return measured.mean(METRIC), measured.mean(MEAN_AP)


def choose_kind(kinds: Iterable[str], fit: Fit, pairs: Pairs, old: Card, seed: int = 0) -> ChosenKind:
    """Fit every kind on four fifths of the fitting share and measure it with the rest; best by CMC@1, ties by mAP.

    Args:
        kinds: the simplest first; of equal ones the first is chosen.
        fit: fits one kind.
        pairs: from `split_pairs`; its queries are not used.
        old: card of the older version.
        seed: seed of the split.

    Raises:
        InvalidArgument: no held-out query has a relevant item, or no kind could be fitted.
    """
    inner = split_pairs(pairs.new_SM, pairs.old_SN, pairs.labels_S, seed)
    if not inner.relevance.valid.any():
        raise InvalidArgument(f"kind {AUTO} has too few pairs of one label to choose by; name a kind", pointer="/kind")
    reached: dict[str, Retrieval] = {}
    left_out: dict[str, str] = {}
    for kind in kinds:
        try:
            _check_fits(kind, pairs, old)
            reached[kind] = measure(fit(kind, inner)(inner.new_QM, inner.old_QN), inner, old)
        except InvalidArgument as error:
            left_out[kind] = error.message
    if not reached:
        raise InvalidArgument(f"no kind can be fitted: {left_out}", pointer="/kind")
    found = ChosenKind("", reached, left_out)
    return replace(found, kind=max(reached, key=lambda kind: kind_score(found, kind)))


def learning_curve(kind: str, fit: Fit, pairs: Pairs, old: Card, whole: Retrieval) -> LearningCurve:
    """Fit on a quarter and on half of the pairs, and measure with the queries that measured the edge.

    Nothing is chosen by the curve, so the queries stay unbiased. Numbers of pairs that do not determine a map are
    skipped.

    Args:
        kind: the fitted kind.
        fit: fits one kind.
        pairs: the pairs that it was fitted on and measured with.
        old: card of the older version.
        whole: the result of the edge that was fitted on all pairs.
    """
    points: dict[int, Retrieval] = {}
    counts = [len(pairs.new_SM) // share for share in SHARES]
    for count in counts:
        labels_S = None if pairs.labels_S is None else pairs.labels_S[:count]
        fewer = replace(pairs, new_SM=pairs.new_SM[:count], old_SN=pairs.old_SN[:count], labels_S=labels_S)
        with suppress(InvalidArgument):
            points[count] = measure(fit(kind, fewer)(pairs.new_QM, pairs.old_QN), pairs, old)
    doubled = gain(whole, points[counts[-1]]) if counts[-1] in points else None
    points[len(pairs.new_SM)] = whole
    return LearningCurve(
        {count: measured.interval(METRIC) for count, measured in points.items()}, int(whole.valid.sum()), doubled
    )


def recommendation(kind: str, new_old: Retrieval, old_old: Retrieval | None) -> str:
    """How to judge a measured edge.

    Args:
        kind: kind of the adapter.
        new_old: result of queries along the edge.
        old_old: result of the old version's own queries; None without labels, as each query would find itself.
    """
    cost = " Each query is encoded by both versions." if kind == "slerp" else ""
    if old_old is None:
        queries = int(new_old.valid.sum())
        found_own = round(new_old.mean(METRIC) * queries) if queries else 0
        if found_own <= min(CHANCE, queries // 10):
            return (
                f"Only {found_own} of {queries} held-out queries find their own item first, which may be chance: are "
                f"the new and old embeddings of the same inputs, row by row? Queries along it find nothing.{cost}"
            )
        found = f"{new_old.mean(METRIC):.1%} of held-out queries find their own item first"
        return f"{found}; labels, or a gate, would tell whether what is alike is found.{cost}"
    difference = gain(new_old, old_old)
    told = f"new queries against the old version's own, among old items: {_interval(difference)}"
    if difference.low > 0:
        return f"Worth deploying: {told}.{cost}"
    if difference.high < 0:
        return f"Old items are found worse until a backfill moves them: {told}.{cost}"
    return f"As good as before, as far as {int(new_old.valid.sum())} queries tell: {told}.{cost}"


def serving_map(adapter: Affine | SlerpAdapter, old: Card) -> Search:
    """The map that serving applies to queries, without writing files."""
    if isinstance(adapter, SlerpAdapter):
        return adapter
    space = space_from_json(old.space)
    return lambda new_QM, _: normalise_or_zero(space, adapter(new_QM))


def _check_fits(kind: str, pairs: Pairs, old: Card) -> None:
    """Raise InvalidArgument if a kind could be fitted but not served, or would take too long."""
    if kind != "slerp":
        return
    if not old.encoder:
        raise InvalidArgument(f"needs queries by the encoder of {old.name!r}, which has none", pointer="/kind")
    if len(pairs.new_SM) > MAX_COMPARED_PAIRS:
        raise InvalidArgument(f"takes at most {MAX_COMPARED_PAIRS} pairs", pointer="/kind")


def _interval(score: Score) -> str:
    return f"{score.value:+.1%} [{score.low:+.1%}, {score.high:+.1%}]"
