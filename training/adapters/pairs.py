"""Pairs of embeddings of the same images by two versions: some to fit an adapter on, others to measure it with.

Shape suffixes: S pairs, M new dimension, N old dimension, Q queries, I items.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from index.errors import InvalidVector
from index.evaluation.fitting import HELD_OUT, PairArrays, Pairs, check_pair_arrays, check_shared, split_pairs
from index.version import Version
from training.data.images import Data
from training.data.npz import open_npz
from training.evaluation.embeddings import open_encoder
from training.evaluation.matrix import relevance_of

MOST_FITTED = 10_000
"""So many training images of a data set are embedded at most: choosing slerp's weight compares each with each."""


def read_pairs(path: Path, old: Version, new: Version, seed: int = 0) -> Pairs:
    """Read an .npz of `new` (S, M) and `old` (S, N), row by row of the same images, and `labels` (S,) if known.

    A fifth of the pairs, drawn by `seed`, are the queries that measure the edge; all pairs are items.

    Raises:
        InvalidArgument: not such a file, embeddings of other dimensions than the versions', or no label twice.
        InvalidVector: embeddings that are not valid in a version's space.
    """
    with open_npz(path, "pairs", "/pairs") as held:
        given = PairArrays(held["new"], held["old"], held.get("labels"))
    try:
        pairs = check_pair_arrays(given, new.card, old.card, 2 * HELD_OUT, f"pairs {path}")
    except InvalidVector as error:
        raise InvalidVector(f"pairs {path}, {error.pointer}: {error}", pointer=error.pointer) from error
    parted = split_pairs(*pairs, seed)
    check_shared(parted, f"pairs {path} share a label", "/pairs/labels")
    return parted


def embed_pairs(data: Data, old: Version, new: Version) -> Pairs:
    """Embed a data set by both versions: training images to fit on, query and gallery images to measure with.

    Raises:
        NoEncoder: a version cannot embed images here.
        InvalidArgument: the data set has no usable query.
    """
    relevance = relevance_of(data)
    rows = np.random.default_rng(0).permutation(len(data.train))[:MOST_FITTED]
    support = data.train.take(rows)
    (new_SM, new_QM, new_items_IM), (old_SN, old_QN, old_items_IN) = (
        [encode(images)[0] for images in (support, data.query, data.gallery)]
        for encode in (open_encoder(new), open_encoder(old))
    )
    return Pairs(new_SM, old_SN, support.labels, new_QM, old_QN, new_items_IM, old_items_IN, relevance, labelled=True)
