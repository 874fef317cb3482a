"""Fit an edge on pairs of embeddings: split the pairs, fit, and measure on held-out queries.

Used by `training.adapters.fit_edge`, which writes into a version folder, and by the service, for stored items.
Shape suffixes: S pairs, M new dimension, N old dimension, Q queries, I items.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from index.errors import InvalidArgument, shortened
from index.evaluation.adapters import Affine, SlerpAdapter, fit_slerp, low_rank, procrustes, ridge
from index.evaluation.metrics import Compared, Retrieval, mixed_retrieval
from index.evaluation.modes import choose_merge_mode
from index.evaluation.relevance import LabelRelevance
from index.evaluation.score_maps import fit_maps
from index.query.edge_maps import EDGE, MODE, OWN, default_mode
from index.space import Cosine, Vectors, check_vectors, space_from_json
from index.version import Card, EdgeKind

Ints = NDArray[np.int64]

HELD_OUT, MAX_HELD_OUT = 5, 10_000
"""One in HELD_OUT pairs, at most MAX_HELD_OUT, measures the edge and is not used for the fit."""
MAX_COMPARED_PAIRS = 10_000
"""Largest number of pairs for slerp, which compares all pairs with each other once for each weight."""


class PairArrays(NamedTuple):
    """Pairs as given: `new` (S, M) and `old` (S, N), rows of the same inputs, and their classes (S,) if known."""

    new: NDArray[Any]
    old: NDArray[Any]
    labels: NDArray[Any] | None


@dataclass(frozen=True)
class Pairs:
    """Embeddings of the same inputs by both versions, valid in their spaces.

    Attributes:
        new_SM, old_SN: pairs to fit on.
        labels_S: their classes, if known.
        new_QM, old_QN: queries to measure with.
        new_items_IM, old_items_IN: items to measure on.
        relevance: the relevant items; without labels only the query's own input.
        labelled: whether there are labels.
    """

    new_SM: Vectors
    old_SN: Vectors
    labels_S: NDArray[np.int64] | None
    new_QM: Vectors
    old_QN: Vectors
    new_items_IM: Vectors
    old_items_IN: Vectors
    relevance: LabelRelevance
    labelled: bool


def check_pair_arrays(given: PairArrays, new: Card, old: Card, least: int, what: str = "pairs") -> PairArrays:
    """Check pairs; returns them as valid vectors of the versions' spaces.

    Args:
        given: arrays of any shape.
        new: card of the newer version.
        old: card of the older version.
        least: smallest legal number of pairs.
        what: name of the pairs in errors.

    Raises:
        InvalidArgument: other shapes, too few pairs, or labels that tell nothing apart.
        InvalidVector: a vector is not valid in its version's space; names the row.
    """
    count = len(given.new) if given.new.ndim else 0
    if given.new.shape != (count, new.dim) or given.old.shape != (count, old.dim) or count < least:
        raise InvalidArgument(
            f"{what} hold new {given.new.shape} and old {given.old.shape}; versions {new.name!r} and {old.name!r} need "
            f"(S, {new.dim}) and (S, {old.dim}) with one S of at least {least}",
            pointer="/pairs",
        )
    if given.labels is not None and given.labels.shape != (count,):
        raise InvalidArgument(f"{what} hold labels {given.labels.shape}, not ({count},)", pointer="/pairs/labels")
    if given.labels is not None:
        check_labels(given.labels, what, "/pairs/labels")
    new_SM = check_vectors(given.new, new.dim, space_from_json(new.space), pointer="/pairs/new")
    old_SN = check_vectors(given.old, old.dim, space_from_json(old.space), pointer="/pairs/old")
    return PairArrays(new_SM, old_SN, given.labels)


def check_labels(labels: NDArray[Any] | Sequence[str], what: str, pointer: str) -> None:
    """Refuse labels by which wrong answers would count as right; `what` holds them. Raises InvalidArgument."""
    if isinstance(labels, np.ndarray) and labels.dtype.kind == "f" and np.isnan(labels).any():
        raise InvalidArgument(
            f"{what} hold labels that are NaN, which would be one class; leave those pairs out", pointer=pointer
        )
    if len(set(labels)) == 1:
        shared = shortened(str(labels[0]))
        raise InvalidArgument(
            f"{what} hold labels of only one class, {shared}, so that every answer is right", pointer=pointer
        )


def split_pairs(new_SM: Vectors, old_SN: Vectors, labels_S: ArrayLike | None, seed: int = 0) -> Pairs:
    """Split pairs: a random fifth are the queries that measure the edge, the rest is fitted on; all pairs are items.

    Args:
        new_SM: (S, M), S at least HELD_OUT.
        old_SN: (S, N), of the same inputs.
        labels_S: (S,) classes; None: only a query's own input is relevant.
        seed: seed of the split.
    """
    count = len(new_SM)
    order = np.random.default_rng(seed).permutation(count)
    query, support = np.split(order, [min(count // HELD_OUT, MAX_HELD_OUT)])
    codes = np.arange(count) if labels_S is None else np.unique(np.asarray(labels_S), return_inverse=True)[1]
    return Pairs(
        new_SM=new_SM[support],
        old_SN=old_SN[support],
        labels_S=None if labels_S is None else codes[support],
        new_QM=new_SM[query],
        old_QN=old_SN[query],
        new_items_IM=new_SM,
        old_items_IN=old_SN,
        relevance=LabelRelevance(codes[query], codes, np.full(len(query), -1) if labels_S is None else query),
        labelled=labels_S is not None,
    )


def check_shared(pairs: Pairs, shared: str, pointer: str) -> None:
    """Raise InvalidArgument if no query has another pair of its label; `shared`: such as `pairs share a label`."""
    if not pairs.relevance.valid.any():
        raise InvalidArgument(f"no two of the {len(pairs.new_items_IM)} {shared}", pointer=pointer)


def fit_adapter(kind: str, pairs: Pairs, new: Card, old: Card, options: Mapping[str, float]) -> Affine | SlerpAdapter:
    """Fit one of `FITS`; if the smaller dimension is below the default rank of `low_rank`, its half is the default.

    Raises:
        InvalidArgument: an unknown kind, an option out of range, or slerp without labels or cosine spaces.
    """
    if kind not in FITS:
        raise InvalidArgument(f"kind must be one of {', '.join(FITS)}, not {kind!r}", pointer="/kind")
    smaller = min(new.dim, old.dim)
    if kind == "low_rank" and smaller < legal_options(low_rank)["rank"]:
        options = {"rank": max(1, smaller // 2), **options}
    if kind != "slerp":
        return FITS[kind](pairs.new_SM, pairs.old_SN, **options)
    cosine = all(space_from_json(card.space) == Cosine() for card in (new, old))
    if pairs.labels_S is None or not cosine:
        raise InvalidArgument("kind slerp needs labels, to choose its weight, and cosine spaces", pointer="/kind")
    return fit_slerp(pairs.new_SM, pairs.old_SN, pairs.labels_S)


FITS: dict[str, Callable[..., Affine | SlerpAdapter]] = {
    "procrustes": procrustes,
    "ridge": ridge,
    "low_rank": low_rank,
    "slerp": fit_slerp,
}
"""kind -> (new (S, M), old (S, N), **options) -> fitted adapter; slerp also takes the labels (S,)."""


def legal_options(fit: Callable[..., Any] | None) -> dict[str, int | float]:
    """The options of an adapter with their defaults."""
    parameters = inspect.signature(fit).parameters.values() if fit else ()
    return {p.name: p.default for p in parameters if type(p.default) in (int, float)}


def measure(queries_QN: Vectors, pairs: Pairs, old: Card) -> Retrieval:
    """The retrieval of old items by queries in the old version's space, mapped by the edge or of the old version."""
    compared = Compared(queries_QN, pairs.old_items_IN, space_from_json(old.space))
    relevance = pairs.relevance
    return mixed_retrieval([compared], relevance.query_codes, relevance.item_codes, remove_self=relevance.self_Q)


def fit_calibration_maps(kind: EdgeKind, queries_QN: Vectors, pairs: Pairs, new: Card, old: Card) -> dict[str, Any]:
    """The edge's `calibration` field, see `index.query.edge_maps`. The pairs must have labels."""
    rows = np.flatnonzero(pairs.relevance.valid)
    edge = Compared(queries_QN, pairs.old_items_IN, space_from_json(old.space))
    own = Compared(pairs.new_QM, pairs.new_items_IM, space_from_json(new.space))
    return calibration_field(kind, edge, own, pairs.relevance, rows)


def calibration_field(
    kind: EdgeKind, edge: Compared, own: Compared, relevance: LabelRelevance, rows: Ints
) -> dict[str, Any]:
    """The maps of an edge and of the new version's own items, and the best merge mode for both.

    Args:
        kind: kind of the edge.
        edge: queries of the new version and the items that the edge reaches.
        own: the same queries and items, embedded by the new version.
        relevance: the relevant items.
        rows: numbers of the queries to fit on, at least one.
    """
    through, same = fit_maps([edge, own], relevance, rows)
    chosen = choose_merge_mode(edge, own, relevance, default=default_mode([kind.value]))
    return {EDGE: through.as_json(), OWN: same.as_json(), **({MODE: chosen.mode.value} if chosen else {})}
