"""Remote engines: the interface of a server that can store a gallery's vectors.

A collection is treated as a sealed segment elsewhere: `RemoteShard` knows in memory which of its rows are valid, and
SQL is the truth of that. So an engine may be behind, or hold rows that are stale or duplicates; it must only not lose
rows it has shown.

**Feed numbers.** Each row comes with `seq`, the change feed number of its item's last write. Of two rows of a key the
one with the higher number is newer, and an engine never lets an older one win, in whichever order they arrive: pgvector
replaces a row if its number is not above the new one's; an engine without conditional writes stores a row for each
(key, number), and removes those below. So a writer that goes on after it should have stopped does no harm.

Shape suffixes: N rows, W their width, Q queries, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from index.engines.base import Keys
from index.engines.config import IndexKind
from index.errors import RegraftError
from index.scan import Mask
from index.space import Space, Vectors
from index.version import ShardKey

SEARCH_SECONDS = 2.0
"""How long a query waits for an engine by default."""
READ_TIMES = 5.0
"""The same for loads, as a factor: they ask for the entries of some thousand keys."""


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
    """Rows without their vectors: keys, feed numbers and digests (N,), see `index.engines.digest`."""

    keys_N: Keys
    seqs_N: Keys
    digests_N: Keys


def is_up_to_date(found: Entries, keys_N: Keys, digests_N: Keys, seqs_N: Keys) -> Mask:
    """Which of these keys were found with their digest, and with a feed number that is not lower (N,)."""
    if not len(found.keys_N):
        return np.zeros(len(keys_N), np.bool_)
    order_F = np.argsort(found.keys_N)
    at_N = order_F[np.searchsorted(found.keys_N[order_F], keys_N).clip(max=len(order_F) - 1)]
    same_N: Mask = (found.keys_N[at_N] == keys_N) & (found.digests_N[at_N] == digests_N)
    same_N &= found.seqs_N[at_N] >= seqs_N
    return same_N


class Candidates(NamedTuple):
    """The candidates of an engine for Q queries, in its own order, best first.

    Attributes:
        keys_QC: of the rows; MISSING behind the last of a query.
        seqs_QC: their feed numbers.
        rows_QCW: their vectors, bit for bit as they were stored; undefined where the key is MISSING.
    """

    keys_QC: Keys
    seqs_QC: Keys
    rows_QCW: Vectors


@dataclass(frozen=True)
class Capabilities:
    """The limits of an engine.

    Attributes:
        max_k: candidates of one search.
        max_keys: keys that a search may be restricted to.
        max_rows: rows of one request, to write, to read or to list.
        max_width: numbers of a row.
    """

    max_k: int
    max_keys: int
    max_rows: int
    max_width: int


class Collection(Protocol):
    """The rows of one shard of one gallery, created by the first write. Thread-safe.

    If nothing was ever written, nothing is found, and `covered_seq` is 0. No argument exceeds `Capabilities`; rows are
    finite. Every method ends after a time limit of the engine's own, and raises EngineUnavailable if the engine is
    away, slow or refuses.
    """

    capabilities: Capabilities

    def upsert(self, entries: Entries, rows_NW: Vectors) -> None:
        """Store rows of different keys, each unless there is one of its key with a higher feed number.

        Afterwards they are found by `search` and `entries`, and survive a crash of the engine.
        """

    def delete(self, keys_N: Keys, seqs_N: Keys) -> None:
        """Remove the rows of each key whose feed number is not above the one given."""

    def search(self, queries_QW: Vectors, c: int, *, keys_N: Keys | None = None, exact: bool = False) -> Candidates:
        """The c best for each query, or fewer if an index finds no more.

        Args:
            queries_QW: in the layout the metric compares with rows.
            c: at least 1.
            keys_N: only rows of these keys; every one of them is compared.
            exact: compare every row.
        """

    def entries(self, keys_N: Keys) -> Entries:
        """The entries of these keys, in any order: for each the row with the highest feed number."""

    def listed(self, after: int, limit: int) -> Entries:
        """Up to `limit` entries with keys above `after`, by key, as `entries` returns them."""

    def fetch(self, keys_N: Keys) -> tuple[Entries, Vectors]:
        """As `entries`, with the rows (N, W)."""

    def covered_seq(self) -> int:
        """The feed number last set: all writes up to it were stored."""

    def set_covered_seq(self, seq: int, *, more: bool = False) -> None:
        """Record that all writes up to a feed number were stored; survives a crash, after those writes.

        `more`: further writes follow at once. So work that makes searches fast may be left for the last call, and a
        lower number be recorded until then.
        """

    def count(self) -> int:
        """Number of rows, stale ones included."""

    def drop(self) -> None:
        """Remove everything, the covered number too; harmless if there is nothing."""


def find_up_to_date(collection: Collection, keys_N: Keys, digests_N: Keys, seqs_N: Keys) -> Mask:
    """Which of these rows a collection holds, as `is_up_to_date`; asks for `max_rows` at a time (N,)."""
    most = collection.capabilities.max_rows
    held_N = np.zeros(len(keys_N), np.bool_)
    for start in range(0, len(keys_N), most):
        part = slice(start, start + most)
        held_N[part] = is_up_to_date(collection.entries(keys_N[part]), keys_N[part], digests_N[part], seqs_N[part])
    return held_N


def keep_only(collection: Collection, keys_N: Keys, upto: int) -> None:
    """Remove all rows but those of some keys (N,), and those above feed number `upto`: others wrote them meanwhile."""
    after, most = -1, collection.capabilities.max_rows
    while len((found := collection.listed(after, most)).keys_N):
        after = int(found.keys_N[-1])
        gone_N = ~np.isin(found.keys_N, keys_N) & (found.seqs_N <= upto)
        if gone_N.any():
            collection.delete(found.keys_N[gone_N], found.seqs_N[gone_N])


class Engine(Protocol):
    """A server that holds collections. Thread-safe."""

    def collection(self, gallery: str, place: ShardKey, width: int, metric: Metric) -> Collection:
        """The collection of a shard; does not contact the server yet.

        `gallery`: a name that is unique among all services on the server.

        Raises:
            InvalidArgument: the engine takes no rows of this width.
        """

    def places(self, gallery: str) -> list[ShardKey]:
        """The shards that a gallery has collections for."""

    def drop(self, gallery: str, place: ShardKey) -> None:
        """Remove a collection; harmless if there is none."""

    def check(self) -> None:
        """Raise EngineUnavailable unless the server answers and has all it needs."""

    def close(self) -> None:
        """Close its connections."""


OpenCollection = Callable[[IndexKind, ShardKey, int, Metric], Collection]
"""Opens the collection of a gallery's shard: (engine kind, shard, row width, metric). It never fails: without such an
engine, or if it takes no such rows, every method of the collection raises EngineUnavailable.
"""


def no_engine(kind: IndexKind, place: ShardKey, _width: int, _metric: Metric) -> Collection:
    """`OpenCollection` of a process without remote engines."""
    return Unreachable(f"{kind.value} is no engine of this process, which {place[0]} lies in")


class Unreachable:
    """A collection that cannot be opened: its rows stay in memory."""

    capabilities = Capabilities(1, 1, 1, 1)

    def __init__(self, why: str) -> None:
        self._why = why

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise EngineUnavailable(self._why)

    upsert = delete = search = entries = listed = fetch = covered_seq = set_covered_seq = count = drop = _fail
