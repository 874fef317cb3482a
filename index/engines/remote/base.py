"""Remote engines: the interface (`Engine`, `Collection`) of a server that stores a gallery's vectors.

`RemoteShard` keeps in memory which rows of a collection are valid; SQL is the source of truth. So an engine may be
behind or hold stale and duplicate rows, but must not lose rows that it has once returned.

**Feed numbers.** Each row has `seq`, the change feed number of its item's last write. Of two rows of a key the one with
the higher number wins, in whichever order they arrive: pgvector replaces a row unless its number is higher than the new
one's; an engine without conditional writes stores a row for each (key, number) and removes the lower ones. So a writer
that continues after it lost its lease does no harm.

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
"""Default time limit of a query to an engine."""
READ_TIMES = 5.0
"""Time limit of reading entries of some thousand keys, as a factor of that of queries."""


class EngineUnavailable(RegraftError):
    """The engine of the vectors does not answer; nothing is lost."""

    status = 503
    code = "engine_unavailable"


class Metric(StrEnum):
    """How rows are compared; every space uses one of them, see `index.space`."""

    INNER_PRODUCT = "inner_product"
    """larger is nearer"""
    L2 = "l2"
    """smaller is nearer"""


def metric_of(space: Space) -> Metric:
    """The metric of a space."""
    return Metric.INNER_PRODUCT if space.inner_product else Metric.L2


class Entries(NamedTuple):
    """Rows without their vectors: keys, feed numbers and digests (N,), see `index.engines.digest`."""

    keys_N: Keys
    seqs_N: Keys
    digests_N: Keys


def is_up_to_date(found: Entries, keys_N: Keys, digests_N: Keys, seqs_N: Keys) -> Mask:
    """Whether each key (N,) was found with its digest and at least its feed number."""
    if not len(found.keys_N):
        return np.zeros(len(keys_N), np.bool_)
    order_F = np.argsort(found.keys_N)
    at_N = order_F[np.searchsorted(found.keys_N[order_F], keys_N).clip(max=len(order_F) - 1)]
    same_N: Mask = (found.keys_N[at_N] == keys_N) & (found.digests_N[at_N] == digests_N)
    same_N &= found.seqs_N[at_N] >= seqs_N
    return same_N


class Candidates(NamedTuple):
    """The candidates of an engine for Q queries, in the engine's order, best first.

    Attributes:
        keys_QC: keys of the rows, then MISSING.
        seqs_QC: their feed numbers.
        rows_QCW: their vectors, bit for bit as stored; undefined where the key is MISSING.
    """

    keys_QC: Keys
    seqs_QC: Keys
    rows_QCW: Vectors


@dataclass(frozen=True)
class Capabilities:
    """The limits of an engine.

    Attributes:
        max_k: largest number of candidates of one search.
        max_keys: largest number of keys that a search may be restricted to.
        max_rows: largest number of rows of one request to write, read or list rows.
        max_width: largest width of a row.
    """

    max_k: int
    max_keys: int
    max_rows: int
    max_width: int


class Collection(Protocol):
    """The rows of one shard of one gallery, created by the first write. Thread-safe.

    Before the first write nothing is found and `covered_seq` is 0. No argument exceeds `Capabilities`; rows are finite.
    Every method has a time limit, and raises EngineUnavailable if the engine is unreachable, slow or refuses.
    """

    capabilities: Capabilities

    def upsert(self, entries: Entries, rows_NW: Vectors) -> None:
        """Store rows of distinct keys, except where the key has a row with a higher feed number.

        When it returns, `search` and `entries` find the rows, and they survive a crash of the engine.
        """

    def delete(self, keys_N: Keys, seqs_N: Keys) -> None:
        """Remove the rows of each key whose feed number is at most the given one."""

    def search(self, queries_QW: Vectors, c: int, *, keys_N: Keys | None = None, exact: bool = False) -> Candidates:
        """The c best for each query, or fewer if an index finds no more.

        If all rows are compared, equally near ones are in the order of their keys, so that a longer list begins as a
        shorter one does.

        Args:
            queries_QW: in the layout of `Space.queries`.
            c: at least 1.
            keys_N: only rows of these keys, all of which are compared.
            exact: compare all rows.
        """

    def entries(self, keys_N: Keys) -> Entries:
        """The entries of these keys, unordered: for each key the row with the highest feed number."""

    def listed(self, after: int, limit: int) -> Entries:
        """Up to `limit` entries with keys above `after`, by key, as `entries` returns them."""

    def fetch(self, keys_N: Keys) -> tuple[Entries, Vectors]:
        """`entries` with their rows (N, W)."""

    def covered_seq(self) -> int:
        """The last feed number set: all writes up to it are stored."""

    def set_covered_seq(self, seq: int, *, more: bool = False) -> None:
        """Record that all writes up to a feed number are stored; as durable as these writes.

        `more`: further writes follow at once. An engine may then defer the building of an index to the last call and
        record a lower number until then.
        """

    def count(self) -> int:
        """Number of rows, stale ones included."""

    def drop(self) -> None:
        """Remove everything, including the covered feed number; idempotent."""


def find_up_to_date(collection: Collection, keys_N: Keys, digests_N: Keys, seqs_N: Keys) -> Mask:
    """Whether a collection has each row (N,), as `is_up_to_date`; reads `max_rows` at a time."""
    most = collection.capabilities.max_rows
    held_N = np.zeros(len(keys_N), np.bool_)
    for start in range(0, len(keys_N), most):
        part = slice(start, start + most)
        held_N[part] = is_up_to_date(collection.entries(keys_N[part]), keys_N[part], digests_N[part], seqs_N[part])
    return held_N


def keep_only(collection: Collection, keys_N: Keys, upto: int) -> None:
    """Remove all rows except those of some keys (N,) and those above the feed number `upto`, which are newer writes."""
    after, most = -1, collection.capabilities.max_rows
    while len((found := collection.listed(after, most)).keys_N):
        after = int(found.keys_N[-1])
        gone_N = ~np.isin(found.keys_N, keys_N) & (found.seqs_N <= upto)
        if gone_N.any():
            collection.delete(found.keys_N[gone_N], found.seqs_N[gone_N])


class Engine(Protocol):
    """A server that holds collections. Thread-safe."""

    def collection(self, gallery: str, place: ShardKey, width: int, metric: Metric) -> Collection:
        """The collection of a shard; does not connect yet.

        `gallery`: a name that is unique among all services that use the server.

        Raises:
            InvalidArgument: the engine does not support this width.
        """

    def places(self, gallery: str) -> list[ShardKey]:
        """The shards that a gallery has collections for."""

    def drop(self, gallery: str, place: ShardKey) -> None:
        """Remove a collection; idempotent."""

    def check(self) -> None:
        """Raise EngineUnavailable unless the server answers and meets all requirements."""

    def close(self) -> None:
        """Close its connections."""


OpenCollection = Callable[[IndexKind, ShardKey, int, Metric], Collection]
"""(engine kind, shard, row width, metric) -> the collection of a gallery's shard. Never fails: without such an engine,
or if it does not support these rows, every method of the collection raises EngineUnavailable.
"""


def no_engine(kind: IndexKind, place: ShardKey, _width: int, _metric: Metric) -> Collection:
    """`OpenCollection` of a process without remote engines."""
    return Unreachable(f"{place[0]} is in {kind.value}, which this process has not configured")


class Unreachable:
    """A collection that cannot be opened: its rows stay in memory."""

    capabilities = Capabilities(1, 1, 1, 1)

    def __init__(self, why: str) -> None:
        self._why = why

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise EngineUnavailable(self._why)

    upsert = delete = search = entries = listed = fetch = covered_seq = set_covered_seq = count = drop = _fail
