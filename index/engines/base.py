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
"""The slot and the key that fill a result row when there are fewer than k items."""


@dataclass(frozen=True)
class Scanned:
    """How many items a search covered, and how.

    Attributes:
        exact: items that were compared one by one.
        approximate: items that were searched by an approximate index.
        effort: the largest `efSearch` or `nprobe` used, 0 where none was.
    """

    exact: int = 0
    approximate: int = 0
    effort: int = 0

    def __add__(self, other: Scanned) -> Scanned:
        """The sum of two parts of one shard."""
        return Scanned(self.exact + other.exact, self.approximate + other.approximate, max(self.effort, other.effort))


def is_full(at_QK: Keys) -> bool:
    """Whether every row (Q, K) has K results; the last one of a shorter row is MISSING."""
    return [MISSING] not in at_QK[:, -1:].tolist()  # NumPy's own ways cost several times as much for a few queries


class Hits(NamedTuple):
    """The results of Q queries in one shard, best first.

    Attributes:
        scores_QK: in the space's own score.
        slots_QK: of the items; MISSING where there are no more.
        full: `is_full(slots_QK)`.
        scanned: how they were found.
        reliable: for how many results of each query the recall aim holds, 1 to K.

    There are K columns, or fewer, but no fewer than `reliable`.
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
    """The embeddings of one version and origin, as any engine stores and searches them.

    Searches find only those that are served; the items of the others are served by another version's embedding.
    """

    is_remote: bool
    """Whether a search may wait for a remote engine."""

    def upsert(
        self,
        keys: Sequence[int] | Keys,
        vectors_ND: Vectors,
        slots_N: Keys | None = None,
        served_N: Mask | None = None,
    ) -> None:
        """Store or replace the vectors of `keys` (all different).

        `slots_N`: the items' numbers in results and in `allowed_S`; by default their keys.
        `served_N`: which of them are served; None: all.
        """

    def reserve(self, more: int) -> None:
        """Allocate room for so many more rows, while others search and nobody else writes."""

    def serve(self, served_S: Mask) -> None:
        """Set which embeddings are served, by slot."""

    def slots(self) -> Sequence[Keys]:
        """The slots of all embeddings, in parts: joining a million takes longer than the use of them."""

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

        Only items with `allowed_S[slot]` are found; None: all. Rows are padded with MISSING when there are fewer
        than k of them. `exact`: every item is compared. `recall`: the aim, by default the gallery's. `share`: the
        expected share of this shard in a merged list of k over several; the recall aim then holds only for that many
        results, and there may be fewer than k columns.
        """

    def fetch(self, keys: Sequence[int] | Keys) -> Vectors:
        """The stored vectors of `keys`, (N, W). Raises KeyError for an unknown one."""

    def count(self) -> int:
        """Number of served items."""

    def indexed_count(self) -> int:
        """Number of served items in an approximate index."""
