"""The words of the query path for whatever searches a shard, and the options a gallery chooses its engine by.

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
    """How a shard found what it found.

    Attributes:
        exact: items that were compared one by one.
        approximate: items that an approximate index answered for.
        effort: the largest `efSearch` or `nprobe` used, 0 where none was.
    """

    exact: int = 0
    approximate: int = 0
    effort: int = 0

    def __add__(self, other: Scanned) -> Scanned:
        """Of two parts of one shard."""
        return Scanned(self.exact + other.exact, self.approximate + other.approximate, max(self.effort, other.effort))


def is_full(at_QK: Keys) -> bool:
    """Whether there are K results in each row (Q, K); else its last is MISSING."""
    return [MISSING] not in at_QK[:, -1:].tolist()  # NumPy's own ways cost several times as much for a few queries


class Hits(NamedTuple):
    """What a shard found for Q queries, best first.

    Attributes:
        scores_QK: in the space's own score.
        slots_QK: of the items; MISSING where there are no more.
        full: as `is_full` says of `slots_QK`.
        how: how it was found.
        sure: it was searched for no more than so many of each list, 1 to K.

    There are K columns, or fewer, but no fewer than `sure`.
    """

    scores_QK: Vectors
    slots_QK: Keys
    full: bool
    how: Scanned
    sure: int


def nothing(queries: int, k: int) -> Hits:
    """Of a shard that gave no answer."""
    none_QK = np.full((queries, k), MISSING, np.int64)
    return Hits(np.zeros((queries, k), np.float32), none_QK, is_full(none_QK), Scanned(), k)


class Shard(Protocol):
    """What the gallery asks of any engine.

    A shard holds every embedding of its version and origin. Only those that are served are found: of the others the
    items are served by another version's.
    """

    elsewhere: bool
    """Whether a search may wait for another server."""

    def upsert(
        self,
        keys: Sequence[int] | Keys,
        vectors_ND: Vectors,
        slots_N: Keys | None = None,
        served_N: Mask | None = None,
    ) -> None:
        """Store or replace the vectors of `keys` (all different).

        `slots_N` are the numbers that items are found by, and looked up in `allowed`; by default their keys.
        `served_N`: which of them are served; None: all.
        """

    def reserve(self, more: int) -> None:
        """Make room for so many more, while others search and nobody else writes."""

    def serve(self, served_S: Mask) -> None:
        """Say anew of everything held whether it is served, by slot."""

    def slots(self) -> Sequence[Keys]:
        """The slots of everything held, in parts: joining a million takes longer than what is done with them."""

    def held(self) -> int:
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
        part: float = 1.0,
    ) -> Hits:
        """The k best of the served items per query.

        Only items with `allowed_S[slot]` are found; None: all. Rows are padded with MISSING when there are fewer
        than k of them. `exact`: every item is compared. `recall`: the aim, by default the gallery's. `part`: which
        share of a list of k over several shards is expected of this one; the recall aim need hold only of what it gives
        of it, and there may be fewer than k columns.
        """

    def fetch(self, keys: Sequence[int] | Keys) -> Vectors:
        """The stored vectors of `keys`, (N, W). Raises KeyError for an unknown one."""

    def count(self) -> int:
        """Number of served items."""

    def indexed(self) -> int:
        """Number of served items that an approximate index answers for."""
