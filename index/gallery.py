"""QUERY PATH: plan, transform, scan, merge - over every live shard of one gallery.

A gallery knows versions, edges and shards; it knows no names, images or SQL. `search` answers from one consistent view:
an item that moves between shards (a backfill, a rollback) is found exactly once.

Shape suffixes: Q queries, K results wanted, D dimension.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from index.errors import InvalidArgument, NoRoute
from index.graph import Graph, Route
from index.merge import merge_raw
from index.shard import FaissShard, Keys, Shard
from index.space import Vectors, space_from_json
from index.transform import Transform, load_transform
from index.version import EdgeKind, Version

Encode = Callable[[str], Vectors]
"""Version name -> this request's queries embedded by that version, (Q, D)."""


@dataclass(frozen=True)
class Degraded:
    """A shard that could not be asked: its version, how many items it holds, and why."""

    version: str
    items: int
    reason: str


@dataclass(frozen=True)
class Found:
    """The answer to Q queries.

    `scores_QK` and `keys_QK` are best first, padded with key -1; `shards_QK` indexes `routes`. `mix` counts the items
    per version at the moment of the answer.
    """

    scores_QK: Vectors
    keys_QK: Keys
    shards_QK: NDArray[np.int64]
    routes: tuple[Route, ...]
    mix: Mapping[str, int]
    degraded: tuple[Degraded, ...]


class Gallery:
    """The shards of one gallery and the edges between their versions."""

    def __init__(self) -> None:
        self._versions: dict[str, Version] = {}
        self._graph = Graph()
        self._transforms: dict[tuple[str, str], Transform] = {}
        self._shards: dict[str, Shard] = {}
        self._lock = ReadWriteLock()

    def search(
        self,
        query_version: str,
        encode: Encode,
        k: int,
        *,
        encoders: frozenset[str] = frozenset(),
        strict: bool = False,
    ) -> Found:
        """Rank every item the queries can reach.

        Args:
            query_version: the version that embeds the queries.
            encode: embeds this request's queries by a version; called for `query_version` or one of `encoders`.
            k: results per query, 1 to the number of items.
            encoders: versions that can encode these queries besides the query version (for `dual` routes).
            strict: raise instead of skipping shards that no route reaches.

        Raises:
            InvalidArgument: k is below 1 or above the number of items.
            NoRoute: strict, and a shard cannot be reached.
        """
        while True:
            # Encoding is slow and must not hold up writers: encode for the routes of now, then see if they still hold.
            embedded = {name: encode(name) for name in self._encoders_needed(query_version, encoders)}
            with self._lock.read():
                mix = self._mix()
                check_k(k, sum(mix.values()))
                routes, degraded = self._plan(query_version, mix, encoders)
                if degraded and (strict or not routes):
                    raise NoRoute("; ".join(d.reason for d in degraded), pointer="/version")
                if any(route.encoder not in embedded for route in routes):
                    continue
                queries = [self._transform(route, embedded[route.encoder]) for route in routes]
                found = [
                    self._shards[route.item_version].search(q, k) for route, q in zip(routes, queries, strict=True)
                ]
            better = [self._higher_is_better(route.item_version) for route in routes]
            return Found(*merge_raw(found, better, k), routes, mix, degraded)

    def declare(self, version: Version) -> None:
        """Make a version and its edges known. The versions its edges point to must be known already.

        Raises:
            InvalidVersionFolder: an edge does not fit the two cards.
        """
        transforms = {
            (edge.new, edge.old): load_transform(edge, version.card, self._versions[edge.old].card)
            for edge in version.edges
        }
        with self._lock.write():
            self._versions[version.name] = version
            self._transforms.update(transforms)
            self._graph = Graph((*(e for e in self._graph.edges if e.new != version.name), *version.edges))

    def apply(self, placed: Mapping[str, tuple[Sequence[int], Vectors]], removed: Sequence[int] = ()) -> None:
        """Put items where they belong now, in one step that no query sees half done; applying it twice is harmless.

        Args:
            placed: version -> (keys, vectors (N, D)); each key leaves any other shard it was in.
            removed: keys that leave every shard.
        """
        with self._lock.write():
            for version in placed:
                if version not in self._shards:
                    card = self._versions[version].card
                    self._shards[version] = FaissShard(card.dim, space_from_json(card.space))
            for version, shard in self._shards.items():
                leaving = [key for other, (keys, _) in placed.items() if other != version for key in keys]
                shard.delete([*leaving, *removed])
            for version, (keys, vectors_ND) in placed.items():
                self._shards[version].upsert(keys, vectors_ND)

    def mix(self) -> dict[str, int]:
        """Items per version, empty shards left out."""
        with self._lock.read():
            return self._mix()

    def unreachable(self, query_version: str, encoders: frozenset[str]) -> tuple[Degraded, ...]:
        """The shards that queries of `query_version` could not reach now."""
        with self._lock.read():
            return self._plan(query_version, self._mix(), encoders)[1]

    def _mix(self) -> dict[str, int]:
        return {name: shard.count() for name, shard in self._shards.items() if shard.count()}

    def _encoders_needed(self, query_version: str, encoders: frozenset[str]) -> set[str]:
        with self._lock.read():
            return {route.encoder for route in self._plan(query_version, self._mix(), encoders)[0]}

    def _plan(
        self, query_version: str, mix: Mapping[str, int], encoders: frozenset[str]
    ) -> tuple[tuple[Route, ...], tuple[Degraded, ...]]:
        planned = {version: self._graph.route(query_version, version, encoders) for version in mix}
        degraded = tuple(
            Degraded(version, mix[version], f"no edge leads from version {query_version!r} to {version!r}")
            for version, route in planned.items()
            if route is None
        )
        return tuple(route for route in planned.values() if route is not None), degraded

    def _transform(self, route: Route, queries_QD: Vectors) -> Vectors:
        for edge in route.edges:
            if edge.kind is not EdgeKind.DUAL:
                queries_QD = self._transforms[edge.new, edge.old](queries_QD)
        return queries_QD

    def _higher_is_better(self, version: str) -> bool:
        return space_from_json(self._versions[version].card.space).higher_is_better


def check_k(k: int, items: int) -> None:
    """Raise InvalidArgument unless 1 <= k <= items."""
    if not 1 <= k <= items:
        legal = f"must be 1 to {items}, the number of items" if items else "cannot be answered: the gallery is empty"
        raise InvalidArgument(f"k is {k}, it {legal}", pointer="/k")


class ReadWriteLock:
    """Many readers or one writer; a waiting writer goes before new readers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writers_waiting = 0

    @contextmanager
    def read(self) -> Iterator[None]:
        """Share the lock with other readers. Not reentrant: a waiting writer would block the inner entry."""
        with self._changed:
            self._changed.wait_for(lambda: self._writers_waiting == 0)
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextmanager
    def write(self) -> Iterator[None]:
        """Hold the lock alone."""
        with self._changed:
            self._writers_waiting += 1
            # Readers stay out until the count falls, other writers because the condition stays held.
            try:
                self._changed.wait_for(lambda: self._readers == 0)
                yield
            finally:
                self._writers_waiting -= 1
                self._changed.notify_all()
