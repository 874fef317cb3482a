"""Merge the results of several shards into one ranked list. Pure functions over arrays.

Three modes:

- `raw`: by the scores that users see; correct only if the scores of all shards are comparable.
- `calibrated`: by the log-odds of each shard's own map, which makes scores comparable.
- `rank`: by the rank in the item's own shard, weighted by its size (after reciprocal rank fusion: Cormack 2009); always
  possible, but the least precise.

Each mode keeps the order inside every shard, so a single shard ranks the same in all three. Ties keep the order of the
shards, then of their results. Shape suffixes: Q queries, K results wanted, S results of all shards concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from index.edges.calibration import Calibration, probability
from index.engines.base import Hits
from index.engines.merge_parts import Merged, merge, merge_single
from index.errors import InvalidArgument, ModeUnavailable
from index.space import Space

K0 = 60
"""The constant of reciprocal rank fusion, as in its paper."""


class Mode(StrEnum):
    """How matches of several shards rank as one list."""

    CALIBRATED = "calibrated"
    RAW = "raw"
    RANK = "rank"


def choose_mode(asked: str | None, spaces: Sequence[Space], calibrated: bool, preferred: Mode | None = None) -> Mode:
    """The mode asked for, else the preferred one if it is legal, else the first legal one: calibrated, raw, rank.

    Args:
        asked: a mode, or None.
        spaces: the spaces of the shards to be merged.
        calibrated: whether all of them have a map.
        preferred: the mode measured to be best for these shards, or a default.

    Raises:
        InvalidArgument: an unknown mode.
        ModeUnavailable: the shards cannot be merged in the mode asked for; gives the reason and the legal modes.
    """
    if asked is not None and asked not in list(Mode):
        raise InvalidArgument(f"mode must be one of {', '.join(Mode)}, not {asked!r}", pointer="/mode")
    kinds = sorted({space.kind for space in spaces})
    why = {
        Mode.CALIBRATED: "" if calibrated else "some items have no calibration for the route that reaches them",
        Mode.RAW: "" if len(kinds) <= 1 else f"scores of spaces {' and '.join(kinds)} are not comparable",
        Mode.RANK: "",
    }
    legal = [mode for mode in Mode if not why[mode]]
    default = preferred if preferred in legal else legal[0]
    mode = default if asked is None else Mode(asked)
    if mode not in legal:
        raise ModeUnavailable(
            f"mode {mode.value!r} cannot rank these items: {why[mode]}; legal now: {', '.join(legal)}", pointer="/mode"
        )
    return mode


def no_matches(queries: int) -> Merged:
    """The result of Q queries without shards: (Q, 0)."""
    nothing = np.empty((queries, 0), np.int64)
    return Merged(nothing.astype(np.float64), nothing.astype(np.float32), nothing, nothing, full=True)


def merge_raw(found: Sequence[Hits], higher_is_better: Sequence[bool], k: int) -> Merged:
    """Rank by raw scores; `higher_is_better`: of the space of each shard."""
    if len(found) == 1:
        return merge_single(found[0], found[0].scores_QK)
    goodness = [
        hits.scores_QK if higher else -hits.scores_QK for hits, higher in zip(found, higher_is_better, strict=True)
    ]
    merged = merge(found, goodness, k)
    return Merged(merged.raw_QK, *merged[1:])


def merge_calibrated(found: Sequence[Hits], maps: Sequence[Calibration], k: int) -> Merged:
    """Rank by the log-odds of each shard's map. The score is the probability that the match is relevant."""
    odds = [calibrate.log_odds(hits.scores_QK) for calibrate, hits in zip(maps, found, strict=True)]
    # Rounding at a knot must not swap two results of one shard.
    merged = merge(found, [np.minimum.accumulate(odds_QK, axis=1) for odds_QK in odds], k)
    return merged._replace(scores_QK=probability(merged.scores_QK))


def merge_rank(found: Sequence[Hits], sizes: Sequence[int], k: int) -> Merged:
    """Rank by 1 / (60 + weighted rank), which is the score.

    The weighted rank is the rank in the item's own shard, from 1, times the number of items of all shards divided by
    that of its own. Without the weight a small shard would take as many places as a large one.
    """
    total, goodness = sum(sizes), []
    for hits, size in zip(found, sizes, strict=True):
        rank_K = (1 + np.arange(hits.scores_QK.shape[1])) * total / max(size, 1)
        goodness.append(np.broadcast_to(1.0 / (K0 + rank_K), hits.scores_QK.shape))
    return merge(found, goodness, k)
