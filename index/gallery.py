"""QUERY PATH: plan, transform, scan, calibrate, merge - over every live shard of one gallery.

A gallery knows versions, edges and shards; it knows no names, images or SQL. `search` answers from one consistent view:
an item that moves between shards (a backfill, a rollback) is found exactly once.

There is one shard for each version and origin, because the score of an item that a forward edge moved does not mean
what the score of an encoded one means. Shape suffixes: Q queries, K results wanted, D dimension.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from index.calibration import Calibration
from index.edge_maps import Maps, check_calibration, edge_maps, map_key
from index.errors import InvalidArgument, NoRoute
from index.filter import Filter
from index.found import Asked, Degraded, Found
from index.graph import Graph, Route
from index.lock import ReadWriteLock
from index.merge import Mode, choose_mode, merge_calibrated, merge_rank, merge_raw
from index.metadata import Metadata
from index.shard import FaissShard, Shard
from index.space import Space, Vectors, space_from_json
from index.transform import Transform, load_transform
from index.version import Edge, EdgeKey, Version

Encode = Callable[[str], Vectors]
"""Version name -> this request's queries embedded by that version, (Q, D)."""

ShardKey = tuple[str, str]
"""(version, origin)."""

NO_METADATA: Mapping[int, str] = MappingProxyType({})

P = ParamSpec("P")
T = TypeVar("T")


class Gallery:
    """The shards of one gallery, the edges between their versions, and the maps that make their scores comparable."""

    def __init__(self) -> None:
        self._versions: dict[str, Version] = {}
        self._spaces: dict[str, Space] = {}
        self._graph = Graph()
        self._transforms: dict[EdgeKey, Transform] = {}
        self._shards: dict[ShardKey, Shard] = {}
        self._metadata = Metadata()
        self._own_maps: Maps = {}
        self._edge_maps: Maps = {}
        self._lock = ReadWriteLock()

    def search(
        self,
        query_version: str,
        encode: Encode,
        k: int,
        *,
        encoders: frozenset[str] = frozenset(),
        strict: bool = False,
        mode: str | None = None,
        where: Filter | None = None,
    ) -> Found:
        """Rank every item the queries can reach.

        Args:
            query_version: the version that embeds the queries.
            encode: embeds this request's queries by a version; called for `query_version` or one of `encoders`.
            k: results per query, at least 1; there are never more than items.
            encoders: versions that can embed these queries (for `slerp` and `dual` routes).
            strict: raise instead of skipping shards that no route reaches.
            mode: how shards are merged, one of `Mode`; None: the first that is possible.
            where: only items whose metadata pass it are ranked; there may be fewer than k.

        Raises:
            InvalidArgument: k is below 1, the gallery is empty, or there is no such mode.
            NoRoute: strict, and a shard cannot be reached; or none can.
            ModeUnavailable: the shards cannot be merged in this mode.
        """
        embedded: dict[str, Vectors] = {}
        encode_seconds: dict[str, float] = {}
        while True:
            # Encoding is slow and must not hold up writers: encode for the routes of now, then see if they still hold.
            for version in self._encoders_needed(query_version, encoders) - set(embedded):
                embedded[version], encode_seconds[version] = _timed(encode, version)
            with self._lock.read():
                mix = self._mix()
                depth = min(k, sum(mix.values()))
                check_k(depth, sum(mix.values()))
                routes, degraded = self._plan(query_version, mix, encoders)
                if degraded and (strict or not routes):
                    raise NoRoute("; ".join(d.reason for d in degraded), pointer="/version")
                if not _encoders_of(routes) <= set(embedded):
                    continue
                live = {key: shard for key, shard in self._shards.items() if shard.count() and key[0] in routes}
                maps = self._maps_for([map_key(routes[version], origin) for version, origin in live])
                spaces = [self._spaces[version] for version, _ in live]
                chosen = choose_mode(mode, spaces, maps is not None)
                moved = {version: _timed(self._transform, route, embedded) for version, route in routes.items()}
                allowed, filter_seconds = (None, 0.0) if where is None else _timed(self._metadata.select, where)
                scanned = [
                    _timed(shard.search, moved[version][0], depth, allowed) for (version, _), shard in live.items()
                ]
                sizes = [shard.count() for shard in live.values()]
            used = maps if maps is not None and chosen is Mode.CALIBRATED else [None] * len(live)
            found = [result for result, _ in scanned]
            started = time.perf_counter()
            if chosen is Mode.CALIBRATED:
                merged = merge_calibrated(found, maps or (), depth)
            elif chosen is Mode.RAW:
                merged = merge_raw(found, [space.higher_is_better for space in spaces], depth)
            else:
                merged = merge_rank(found, depth)
            merge_seconds = time.perf_counter() - started
            shards = tuple(
                Asked(version, origin, size, routes[version], calibration, moved[version][1], seconds)
                for (version, origin), size, calibration, (_, seconds) in zip(live, sizes, used, scanned, strict=True)
            )
            return Found(
                chosen,
                **vars(merged),
                shards=shards,
                mix=mix,
                degraded=degraded,
                encode_seconds=encode_seconds,
                filter_seconds=filter_seconds,
                merge_seconds=merge_seconds,
            )

    def declare(self, version: Version) -> None:
        """Make a version known, with the edges it came with in the place of those that led from it before.

        The versions its edges point to must be known already.

        Raises:
            InvalidVersionFolder: an edge does not fit the two cards.
        """
        transforms = {edge.key: self._open(edge, version) for edge in version.edges}
        with self._lock.write():
            self._versions[version.name] = version
            self._spaces[version.name] = space_from_json(version.card.space)
            self._transforms.update(transforms)
            self._connect((*(e for e in self._graph.edges if e.new != version.name), *version.edges))

    def add_edge(self, edge: Edge) -> None:
        """Make one more edge between two known versions known; it takes the place of one with its key.

        Raises:
            InvalidVersionFolder: it does not fit the two cards.
        """
        transform = self._open(edge, self._versions[edge.new])
        with self._lock.write():
            self._transforms[edge.key] = transform
            self._connect((*self._graph.edges, edge))

    def remove_edge(self, key: EdgeKey) -> None:
        """Forget the edge (new, old, kind) and the gallery's own maps of routes along it; ignores unknown ones."""
        with self._lock.write():
            self._connect(edge for edge in self._graph.edges if edge.key != key)

    def calibrate(self, maps: Maps) -> None:
        """Set the maps fitted on this gallery's own data, in the place of those it had.

        Calibrated ranking uses one complete set: these where they cover all shards asked, else those of the edges.
        """
        with self._lock.write():
            self._own_maps = dict(maps)

    def apply(
        self,
        placed: Mapping[ShardKey, tuple[Sequence[int], Vectors]],
        removed: Sequence[int] = (),
        metadata: Mapping[int, str] = NO_METADATA,
    ) -> None:
        """Put items where they belong now, in one step that no query sees half done; applying it twice is harmless.

        Args:
            placed: (version, origin) -> (keys, vectors (N, D)); each key leaves any other shard it was in.
            removed: keys that leave every shard.
            metadata: key -> a JSON object as text, of items in `placed`; one left out keeps what it had, at first {}.
        """
        with self._lock.write():
            for version, origin in placed:
                if (version, origin) not in self._shards:
                    self._shards[version, origin] = FaissShard(self._versions[version].card.dim, self._spaces[version])
            for place, shard in self._shards.items():
                leaving = [key for other, (keys, _) in placed.items() if other != place for key in keys]
                shard.delete([*leaving, *removed])
            for place, (keys, vectors_ND) in placed.items():
                self._shards[place].upsert(keys, vectors_ND, self._metadata.put(keys, metadata))
            # A shard that lost its last item gives its memory back.
            self._shards = {place: shard for place, shard in self._shards.items() if shard.count()}
            self._metadata.drop(removed)

    def mix(self) -> dict[str, int]:
        """Items per version, versions without any left out."""
        with self._lock.read():
            return self._mix()

    def unreachable(self, query_version: str, encoders: frozenset[str]) -> tuple[Degraded, ...]:
        """The items that queries of `query_version` could not reach now."""
        with self._lock.read():
            return self._plan(query_version, self._mix(), encoders)[1]

    def _mix(self) -> dict[str, int]:
        mix: dict[str, int] = {}
        for (version, _), shard in self._shards.items():
            if count := shard.count():
                mix[version] = mix.get(version, 0) + count
        return mix

    def _encoders_needed(self, query_version: str, encoders: frozenset[str]) -> set[str]:
        with self._lock.read():
            return _encoders_of(self._plan(query_version, self._mix(), encoders)[0])

    def _plan(
        self, query_version: str, mix: Mapping[str, int], encoders: frozenset[str]
    ) -> tuple[dict[str, Route], tuple[Degraded, ...]]:
        """The route to each version within reach, and what is out of reach."""
        planned = {version: self._graph.route(query_version, version, encoders) for version in mix}
        degraded = tuple(
            Degraded(version, mix[version], self._graph.unreachable(query_version, version, encoders))
            for version, route in planned.items()
            if route is None
        )
        return {version: route for version, route in planned.items() if route is not None}, degraded

    def _maps_for(self, keys: Sequence[tuple[str, str, str, tuple[EdgeKey, ...]]]) -> list[Calibration] | None:
        """One map for each of the keys, all from one source; None where neither has them all."""
        for maps in (self._own_maps, self._edge_maps):
            if all(key in maps for key in keys):
                return [maps[key] for key in keys]
        return None

    def _transform(self, route: Route, embedded: Mapping[str, Vectors]) -> Vectors:
        queries_QD = embedded[route.encoders[0]]
        for edge in () if route.dual else route.edges:
            queries_QD = self._transforms[edge.key](queries_QD, embedded.get(edge.old))
        return queries_QD

    def _open(self, edge: Edge, new: Version) -> Transform:
        old = self._versions[edge.old].card
        check_calibration(edge, new.card, old)
        return load_transform(edge, new.card, old)

    def _connect(self, edges: Iterable[Edge]) -> None:
        """Make these the edges; under the lock. What was made for another edge goes."""
        graph = Graph(edges)
        gone = {edge.key for edge in self._graph.edges if edge not in graph.edges}
        self._graph = graph
        self._transforms = {edge.key: self._transforms[edge.key] for edge in graph.edges}
        self._own_maps = {key: own for key, own in self._own_maps.items() if gone.isdisjoint(key[3])}
        self._edge_maps = edge_maps(graph.edges, self._versions)


def check_k(k: int, items: int) -> None:
    """Raise InvalidArgument unless 1 <= k <= items."""
    if not 1 <= k <= items:
        legal = f"must be 1 to {items}, the number of items" if items else "cannot be answered: the gallery is empty"
        raise InvalidArgument(f"k is {k}, it {legal}", pointer="/k")


def _encoders_of(routes: Mapping[str, Route]) -> set[str]:
    return {version for route in routes.values() for version in route.encoders}


def _timed(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """What it gives, and the seconds it took."""
    started = time.perf_counter()
    return work(*args, **kwargs), time.perf_counter() - started
