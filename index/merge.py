"""Many shard results -> one ranked list. Pure functions over arrays.

Three ways to rank matches of several shards together:

- `raw`: by the score a user reads; right only where the scores of all shards mean the same.
- `calibrated`: by the log-odds of each shard's own map, so that unlike scores become comparable.
- `rank`: by the place in the own shard, in proportion to its size (after reciprocal rank fusion: Cormack 2009), which
  needs nothing but says least.

Each keeps the order inside every shard, so a single shard ranks the same in all three. Ties keep the order of the
shards, then of their own results. Shape suffixes: Q queries, K results wanted, S results of all shards side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.calibration import Calibration, probability
from index.engines.base import MISSING, Keys, has_missing
from index.errors import InvalidArgument, ModeUnavailable
from index.space import Space, Vectors

Floats = NDArray[np.float64]
ShardResults = Sequence[tuple[Vectors, Keys]]
"""Per shard the scores (Q, k), best first, and numbers (Q, k) that tell items apart, padded with MISSING."""

K0 = 60
"""Reciprocal rank fusion's constant, as in its paper."""


class Mode(StrEnum):
    """How matches of several shards rank as one list."""

    CALIBRATED = "calibrated"
    RAW = "raw"
    RANK = "rank"


class Merged(NamedTuple):
    """One ranked list a query, (Q, K) each, best first; rows with fewer results are padded.

    Attributes:
        scores_QK: what the list is ranked by, as its mode defines it.
        raw_QK: the score in the space of the item's version.
        keys_QK: the items by the shards' own numbers; MISSING where there is no result.
        shards_QK: the number of the shard each came from, -1 where there is no result.
    """

    scores_QK: Floats
    raw_QK: Vectors
    keys_QK: Keys
    shards_QK: NDArray[np.int64]


def choose_mode(asked: str | None, spaces: Sequence[Space], calibrated: bool, preferred: Mode | None = None) -> Mode:
    """The mode asked for, or else the preferred one if it is legal, or the first that is: calibrated, raw, rank.

    Args:
        asked: a mode, or None.
        spaces: of the shards to be merged.
        calibrated: whether all of them have a map.
        preferred: what was measured to serve these shards best, or a rule says.

    Raises:
        InvalidArgument: there is no such mode.
        ModeUnavailable: the shards cannot be merged in the mode asked for; says why, and which modes are legal.
    """
    if asked is not None and asked not in list(Mode):
        raise InvalidArgument(f"mode must be one of {', '.join(Mode)}, not {asked!r}", pointer="/mode")
    kinds = sorted({space.kind for space in spaces})
    why = {
        Mode.CALIBRATED: "" if calibrated else "some items have no calibration for the route that reaches them",
        Mode.RAW: "" if len(kinds) <= 1 else f"scores of spaces {' and '.join(kinds)} are not of one kind",
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
    """What Q queries find where there are no shards: (Q, 0)."""
    nothing = np.empty((queries, 0), np.int64)
    return Merged(nothing.astype(np.float64), nothing.astype(np.float32), nothing, nothing)


def merge_raw(found: ShardResults, higher_is_better: Sequence[bool], k: int) -> Merged:
    """Rank by raw scores; `higher_is_better` is the order of each shard's space. The score is the raw score."""
    if len(found) == 1:
        raw_QK, keys_QK = found[0]
        return _alone(raw_QK.astype(np.float64), raw_QK, keys_QK, k)
    goodness = [raw_Qk if higher else -raw_Qk for (raw_Qk, _), higher in zip(found, higher_is_better, strict=True)]
    merged = _merge(found, goodness, k)
    return Merged(merged.raw_QK.astype(np.float64), merged.raw_QK, merged.keys_QK, merged.shards_QK)


def merge_calibrated(found: ShardResults, maps: Sequence[Calibration], k: int) -> Merged:
    """Rank by the log-odds that each shard's map gives. The score is the probability that the match is right."""
    odds = [calibrate.log_odds(scores) for calibrate, (scores, _) in zip(maps, found, strict=True)]
    # Rounding at a knot must not swap two results of one shard.
    merged = _merge(found, [np.minimum.accumulate(odds_QK, axis=1) for odds_QK in odds], k)
    return merged._replace(scores_QK=probability(merged.scores_QK))


def merge_rank(found: ShardResults, sizes: Sequence[int], k: int) -> Merged:
    """Rank by 1 / (60 + weighed place), which is the score.

    A place in the own shard, from 1, weighs as the share of the shard it stands for: times the items of all shards,
    through those of its own. Else the few items of a small shard would take as many places as all others.
    """
    whole, goodness = sum(sizes), []
    for (scores_Qk, _), size in zip(found, sizes, strict=True):
        place_k = (1 + np.arange(scores_Qk.shape[1])) * whole / max(size, 1)
        goodness.append(np.broadcast_to(1.0 / (K0 + place_k), scores_Qk.shape))
    return _merge(found, goodness, k)


def _merge(found: ShardResults, goodness: Sequence[Floats | Vectors], k: int) -> Merged:
    """The k best of all shards by `goodness`, per shard (Q, k), larger first."""
    if len(found) == 1:  # in order already
        raw_QK, keys_QK = found[0]
        return _alone(np.where(keys_QK == MISSING, 0.0, goodness[0]), raw_QK, keys_QK, k)
    # Of one query and few results each call costs more than what it computes: these are the fewest and cheapest.
    keys_QS = np.concatenate([keys for _, keys in found], axis=1)
    good_QS = np.concatenate(goodness, axis=1, dtype=np.float64)
    good_QS[keys_QS == MISSING] = -np.inf
    order_QK = (-good_QS).argsort(axis=1, kind="stable")[:, :k]
    ends = list(accumulate(keys.shape[1] for _, keys in found))
    shards_QK = np.searchsorted(ends, order_QK, side="right")
    at_QK = order_QK if len(order_QK) == 1 else order_QK + ends[-1] * np.arange(len(order_QK))[:, None]
    keys_QK, scores_QK = keys_QS.take(at_QK), good_QS.take(at_QK)
    raw_QK = np.concatenate([scores for scores, _ in found], axis=1).take(at_QK)
    if has_missing(keys_QK):
        none_QK = keys_QK == MISSING
        scores_QK[none_QK], shards_QK[none_QK] = 0.0, -1
    return Merged(scores_QK, raw_QK, keys_QK, shards_QK)


def _alone(scores_QK: Floats, raw_QK: Vectors, keys_QK: Keys, k: int) -> Merged:
    """What a single shard found."""
    if keys_QK.shape[1] > k:
        scores_QK, raw_QK, keys_QK = scores_QK[:, :k], raw_QK[:, :k], keys_QK[:, :k]
    shards_QK = np.zeros(keys_QK.shape, np.int64)
    if has_missing(keys_QK):
        shards_QK[keys_QK == MISSING] = -1
    return Merged(scores_QK, raw_QK, keys_QK, shards_QK)
