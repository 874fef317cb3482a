"""The `Shard` protocol, which every engine implements, and the types of its results.

Shape suffixes: Q queries, K results wanted, N items, D dimension, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from index.scan import Mask
from index.space import Vectors

Keys = NDArray[np.int64]

MISSING = -1
"""The slot and the key that pad a result row with fewer than k items."""


@dataclass(frozen=True)
class Scanned:
    """How many items a search covered, and how.

    Attributes:
        exact: number of items that were compared exhaustively.
        approximate: number of items that were searched by an approximate index.
        effort: the largest `efSearch` or `nprobe` used; 0 without an approximate index.
    """

    exact: int = 0
    approximate: int = 0
    effort: int = 0

    def __add__(self, other: Scanned) -> Scanned:
        """The total of two parts of one shard."""
        return Scanned(self.exact + other.exact, self.approximate + other.approximate, max(self.effort, other.effort))


def is_full(at_QK: Keys) -> bool:
    """Whether every row (Q, K) has K results, so that its last one is not MISSING."""
    return [MISSING] not in at_QK[:, -1:].tolist()  # several times as fast as NumPy for a few queries


class Hits(NamedTuple):
    """The results of Q queries in one shard, best first.

    Attributes:
        scores_QK: scores of the space.
        slots_QK: slots of the items, then MISSING.
        full: `is_full(slots_QK)`.
        scanned: how they were found.
        reliable: number of results per query for which the recall aim holds, 1 to K.

    There are at most K columns, and at least `reliable`.
    """

    scores_QK: Vectors
    slots_QK: Keys
    full: bool
    scanned: Scanned
    reliable: int


def no_hits(queries: int, k: int) -> Hits:
    """The result of a shard that could not be searched."""
    none_QK = np.full((queries, k), MISSING, np.int64)
    return Hits(np.zeros((queries, k), np.float32), none_QK, is_full(none_QK), Scanned(), k)


class Shard(Protocol):
    """The embeddings of one version and origin, stored and searched by some engine.

    Searches find only the embeddings that are served; other items are served by another version's embedding.
    """

    is_remote: bool
    """Whether searches may wait for a remote engine."""

    def upsert(
        self,
        keys: Sequence[int] | Keys,
        vectors_ND: Vectors,
        slots_N: Keys | None = None,
        served_N: Mask | None = None,
    ) -> None:
        """Store or replace the vectors of `keys` (distinct).

        `slots_N`: the numbers of the items in results and in `allowed_S`; None: their keys.
        `served_N`: which of them are served; None: all.
        """

    def reserve(self, more: int) -> None:
        """Allocate memory for this many more rows. Searches may run concurrently, writes not."""

    def serve(self, served_S: Mask) -> None:
        """Set which embeddings are served, by slot."""

    def slots(self) -> Sequence[Keys]:
        """The slots of all embeddings, in parts, because concatenating millions takes longer than using them."""

    def row_count(self) -> int:
        """Number of embeddings, served or not."""

    def delete(self, keys: Sequence[int] | Keys) -> None:
        """Remove `keys`; unknown ones are ignored."""

    def search(
        self,
        queries_QD: Vectors,
        k: int,
        allowed_S: Mask | None = None,
        *,
        exact: bool = False,
        recall: float | None = None,
        share: float = 1.0,
    ) -> Hits:
        """The k best of the served items per query.

        `allowed_S`: only items with `allowed_S[slot]` are found; None: all. `exact`: compare every item. `recall`: the
        recall aim, by default the gallery's. `share`: the expected share of this shard in a merged list of k over
        several shards; the recall aim then holds only for that many results, and there may be fewer than k columns.
        Rows with fewer results are padded with MISSING.
        """

    def fetch(self, keys: Sequence[int] | Keys) -> Vectors:
        """The stored rows of `keys` (N, W). Raises KeyError for an unknown key."""

    def count(self) -> int:
        """Number of served items."""

    def indexed_count(self) -> int:
        """Number of served items in an approximate index."""
