"""Placement: the rule which version serves each live item, see `preference`. Its result is not stored.

Of the versions of which an item holds embeddings, the one serves that queries of the current version reach best: the
current version itself, else by the route with the best measured score, `dual` last. So placement follows from the
current version, the edges and the item's embeddings: a deployment writes no item, and a rollback restores exactly the
state before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from sqlalchemy import Connection

from index.edges.graph import Graph, Route
from index.errors import NoRoute, RegraftError
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.store.galleries.held_versions import versions_emptied, versions_with_embeddings
from service.store.rows import GalleryRow

NO_VERSIONS: frozenset[str] = frozenset()


class ReachLost(RegraftError):
    """After the rollback, queries could not reach some items that they reach now."""

    status = 409
    code = "reach_lost"


@dataclass(frozen=True)
class Placement:
    """The placement rule while a given version is current.

    Attributes:
        version_order: ids of all versions, the one reached best first, as `first_held` of service.store.galleries takes
            them.
        reached: ids of the versions that queries of the current version reach.
    """

    version_order: tuple[int, ...]
    reached: frozenset[int]

    @cached_property
    def _rank(self) -> Mapping[int, int]:
        return {version_id: rank for rank, version_id in enumerate(self.version_order)}

    def best(self, held: Collection[int]) -> int:
        """The id of the version that serves an item with embeddings by these versions."""
        return min(held, key=self._rank.__getitem__)


def placement_of(registry: Registry, current: LoadedVersion | None, held: Iterable[int] = ()) -> Placement:
    """The rule with the registry's edges; `current` None: no version is current.

    `held`: ids of versions that items hold; one that another process has registered meanwhile is loaded first.
    """
    for version_id in held:
        registry.by_id(version_id)
    order = preference(registry, current)
    reached = (version.id for version in order if current and route_to(registry, current, version) is not None)
    return Placement(tuple(version.id for version in order), frozenset(reached))


def placement_in(registry: Registry, gallery: GalleryRow, held: Iterable[int] = ()) -> Placement:
    """The rule of a gallery, with its current version; `held` as in `placement_of`."""
    return placement_of(registry, None if gallery.current_id is None else registry.by_id(gallery.current_id), held)


def version_order_to(registry: Registry, version_id: int) -> tuple[int, ...]:
    """The order while this version, such as a backfill's target, is current; syncs the edges first."""
    registry.sync_edges()
    return placement_of(registry, registry.by_id(version_id)).version_order


def preference(registry: Registry, current: LoadedVersion | None, graph: Graph | None = None) -> list[LoadedVersion]:
    """Every version, the one that queries of `current` (images, else texts) reach best first, unreached ones last.

    Encoders that cannot be opened at the moment count, too, so that items do not move because of them. `current` None:
    the newest version first.
    """
    edges, versions = graph or registry.graph(), registry.all()
    if current is None:
        return versions[::-1]
    images = (
        frozenset(version.name for version in versions if version.card.encoder) if current.card.encoder else NO_VERSIONS
    )
    texts = frozenset(version.name for version in versions if version.card.text) if current.card.text else NO_VERSIONS

    def rank(version: LoadedVersion) -> tuple[int, float, int, int]:
        route = edges.route(current.name, version.name, images) or edges.route(current.name, version.name, texts)
        if route is None:
            return 2, 0.0, 0, -version.id
        if route.dual:
            return 1, 0.0, 0, -version.id
        return 0, -route.measured, len(route.edges), -version.id

    return sorted(versions, key=rank)


class ItemCounts(Protocol):
    """Counts a gallery's live items in memory, including everything committed."""

    def moving(self, gallery_id: int, current: LoadedVersion) -> int:
        """How many items another embedding would serve if this version were current."""

    def items_by_version(self, gallery_id: int, order: Sequence[str]) -> Mapping[str, int]:
        """How many items each version would serve with this order of preference, without versions that serve none."""


def check_reachable(
    connection: Connection, registry: Registry, gallery_id: int, current: LoadedVersion, item_counts: ItemCounts
) -> None:
    """Raise NoRoute, with versions and counts, if queries of `current` could not reach some live items.

    An item with any embedding in reach is served by that once `current` is current, whatever serves it now.
    """
    if lost := _out_of_reach(connection, registry, item_counts, gallery_id, current):
        raise NoRoute(
            f"no route leads from queries of {current.name!r} to items of {_in_words(lost)}", pointer="/version"
        )


def check_rollback_reach(
    connection: Connection,
    registry: Registry,
    gallery: GalleryRow,
    after: LoadedVersion,
    item_counts: ItemCounts,
    force: bool,
) -> dict[str, dict[str, int]]:
    """The items that become unreachable by a rollback to the version `after`, as evidence of that step.

    Raises:
        ReachLost: there are some, and `force` is false.
    """
    lost = _out_of_reach(connection, registry, item_counts, gallery.id, after, registry.current_of(gallery))
    if lost and not force:
        raise ReachLost(
            f"queries of {after.name!r} could not reach items of {_in_words(lost)}: first send their embeddings by "
            f"{after.name!r}, or add an edge from it to those versions; force=true rolls back anyway",
            pointer="/force",
        )
    return {"out_of_reach": lost}


def _out_of_reach(
    connection: Connection,
    registry: Registry,
    item_counts: ItemCounts,
    gallery_id: int,
    current: LoadedVersion,
    before: LoadedVersion | None = None,
) -> dict[str, int]:
    """Version -> how many live items it serves that hold no embedding in reach of queries of `current`.

    `before`: count only items that queries of this version reach, while it is current.
    """
    emptied = versions_emptied(connection, gallery_id)
    reached, placement = placement_of(registry, current).reached - emptied, placement_of(registry, before or current)
    stored = versions_with_embeddings(connection, gallery_id)
    stored = stored if before is None else stored & placement.reached
    if stored <= reached:  # the usual case, in which no item has to be counted
        return {}
    # Reached versions first, so that others serve only items without them; emptied ones, which memory may hold, last.
    order = sorted(placement.version_order, key=lambda version_id: (version_id in emptied, version_id not in reached))
    counted = item_counts.items_by_version(gallery_id, [registry.by_id(version_id).name for version_id in order])
    lost = {registry.by_id(version_id).name for version_id in stored - reached}
    return {name: items for name, items in counted.items() if name in lost}


def _in_words(lost: Mapping[str, int]) -> str:
    """Version -> items, in words."""
    return ", ".join(f"{name!r} ({items} items)" for name, items in sorted(lost.items()))


def route_to(
    registry: Registry, current: LoadedVersion, target: LoadedVersion, graph: Graph | None = None
) -> Route | None:
    """The route of image queries, else of text queries, to items of `target`; `dual` only with a usable encoder.

    `graph`: the edges to use, by default all usable ones.
    """
    images = registry.encoders() if current.card.encoder else frozenset[str]()
    texts = registry.text_encoders() if current.card.text else frozenset[str]()
    edges = graph or registry.graph()
    return edges.route(current.name, target.name, images) or edges.route(current.name, target.name, texts)
