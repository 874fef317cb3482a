"""Engines that are servers of their own: what one has to offer, so that a gallery's vectors may lie in it.

A collection is treated as a sealed segment that lies elsewhere: `RemoteShard` knows in memory which rows count, and
SQL is the truth of that. So an engine may be behind, hold rows that nobody knows any more, or some of them twice; it is
only not to lose what it has shown.

**Numbers.** Each row comes with a number, that of its item's last write in the gallery's change feed. Of two rows of a
key the one with the higher number is the newer one, and an engine never lets an older one win, in whichever order they
come: pgvector replaces a row where its number is not above the new one's; an engine that knows no condition keeps a row
for each (key, number), and removes those below. Whoever writes after he should have stopped then harms nobody.

Shape suffixes: N rows, W their width, Q queries, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from index.contents import Place
from index.engines.base import Keys
from index.engines.config import IndexKind
from index.errors import RegraftError
from index.scan import Mask
from index.space import Space, Vectors

SEARCH_SECONDS = 2.0
"""So long a query waits for an engine where nothing else is said."""
READ_TIMES = 5.0
"""So many times as long a load waits for what is there of some thousand keys."""


class EngineUnavailable(RegraftError):
    """The engine that holds the vectors does not answer now; nothing is lost."""

    status = 503
    code = "engine_unavailable"


class Metric(StrEnum):
    """How rows are compared; every space is one of both, see `index.space`."""

    INNER_PRODUCT = "inner_product"
    """larger is nearer"""
    L2 = "l2"
    """smaller is nearer"""


def metric_of(space: Space) -> Metric:
    """How rows of a space are compared."""
    return Metric.INNER_PRODUCT if space.inner_product else Metric.L2


class Entries(NamedTuple):
    """Rows without their vectors: keys, numbers and digests (N,), see `index.engines.digest`."""

    keys_N: Keys
    numbers_N: Keys
    digests_N: Keys


def same_entries(found: Entries, keys_N: Keys, digests_N: Keys, numbers_N: Keys) -> Mask:
    """Which of these keys were found with their digest, by a write that is no older than the number (N,)."""
    if not len(found.keys_N):
        return np.zeros(len(keys_N), np.bool_)
    order_F = np.argsort(found.keys_N)
    at_N = order_F[np.searchsorted(found.keys_N[order_F], keys_N).clip(max=len(order_F) - 1)]
    same_N: Mask = (found.keys_N[at_N] == keys_N) & (found.digests_N[at_N] == digests_N)
    same_N &= found.numbers_N[at_N] >= numbers_N
    return same_N


class Candidates(NamedTuple):
    """What an engine found for Q queries, in its own order, best first.

    Attributes:
        keys_QC: of the rows; MISSING behind the last of a query.
        numbers_QC: their numbers.
        rows_QCW: themselves, bit for bit as they were stored; anything where the key is MISSING.
    """

    keys_QC: Keys
    numbers_QC: Keys
    rows_QCW: Vectors


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do.

    Attributes:
        max_k: candidates of one search.
        max_keys: keys that a search may be restricted to.
        max_rows: rows of one request, to write, to ask for or to list.
        max_width: numbers of a row.
    """

    max_k: int
    max_keys: int
    max_rows: int
    max_width: int


class Collection(Protocol):
    """The rows of one version and origin of one gallery; made by the first write. Thread-safe.

    Of what was never written nothing is found, and `covers` is 0. No argument has more than `Capabilities` says; rows
    are finite. Every method ends after a time limit of the engine's own, and every method raises EngineUnavailable
    where the engine is away, slow or refuses.
    """

    capabilities: Capabilities

    def upsert(self, entries: Entries, rows_NW: Vectors) -> None:
        """Store rows of keys that are all different, each where there is none of its key with a higher number.

        When it returns they are found by `search` and `entries`, and outlive a crash of the engine.
        """

    def delete(self, keys_N: Keys, numbers_N: Keys) -> None:
        """Remove of each key the rows whose number is not above the one given."""

    def search(self, queries_QW: Vectors, c: int, *, keys_N: Keys | None = None, exact: bool = False) -> Candidates:
        """The c best for each query, or fewer where an index finds no more.

        Args:
            queries_QW: as the metric compares them with rows.
            c: at least 1.
            keys_N: only rows of these may be found; every one of them is compared.
            exact: every row is compared.
        """

    def entries(self, keys_N: Keys) -> Entries:
        """What there is of these keys, in any order: of each the row with the highest number."""

    def listed(self, after: int, limit: int) -> Entries:
        """Up to `limit` keys above `after`, by key, as `entries` tells them."""

    def fetch(self, keys_N: Keys) -> tuple[Entries, Vectors]:
        """As `entries`, with the rows (N, W)."""

    def covers(self) -> int:
        """The number last recorded: all writes up to it came here."""

    def record(self, number: int, *, more: bool = False) -> None:
        """Note that all writes up to a number of the feed came here; it outlives a crash, after what it tells of.

        `more`: others follow at once. So what makes searches fast may be left for the last time, and what is noted
        until then be less.
        """

    def count(self) -> int:
        """Rows, those that nobody knows any more among them."""

    def drop(self) -> None:
        """Remove everything, also what was recorded; harmless where there is nothing."""


def held_there(collection: Collection, keys_N: Keys, digests_N: Keys, numbers_N: Keys) -> Mask:
    """Which of these rows a collection holds, as `same_entries` says, asked for as many at a time as it takes (N,)."""
    most = collection.capabilities.max_rows
    held_N = np.zeros(len(keys_N), np.bool_)
    for start in range(0, len(keys_N), most):
        part = slice(start, start + most)
        held_N[part] = same_entries(collection.entries(keys_N[part]), keys_N[part], digests_N[part], numbers_N[part])
    return held_N


class Engine(Protocol):
    """A server that holds collections. Thread-safe."""

    def collection(self, gallery: str, place: Place, width: int, metric: Metric) -> Collection:
        """The collection of a version and origin; nothing is asked of the server yet.

        `gallery`: what tells it from those of all other services on the server.

        Raises:
            InvalidArgument: the engine takes no rows of this width.
        """

    def places(self, gallery: str) -> list[Place]:
        """Of which versions and origins a gallery has collections here."""

    def drop(self, gallery: str, place: Place) -> None:
        """Remove one of them; harmless where there is none."""

    def check(self) -> None:
        """Raise EngineUnavailable unless the server answers and has all it needs."""

    def close(self) -> None:
        """Close its connections."""


Elsewhere = Callable[[IndexKind, Place, int, Metric], Collection]
"""Opens a gallery's collection for a version and origin, of rows of a width, in the engine of a kind. It never fails:
where there is no such engine, or it takes no such rows, every method of what it gives raises EngineUnavailable."""


def nowhere(kind: IndexKind, place: Place, _width: int, _metric: Metric) -> Collection:
    """Of whoever has no engine elsewhere."""
    return Unreachable(f"{kind.value} is no engine of this process, which {place[0]} lies in")


class Unreachable:
    """A collection that cannot be had: its rows stay in memory."""

    capabilities = Capabilities(1, 1, 1, 1)

    def __init__(self, why: str) -> None:
        self._why = why

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise EngineUnavailable(self._why)

    upsert = delete = search = entries = listed = fetch = covers = record = count = drop = _fail
