"""Placement: the rule for which version serves each live item. Its result is stored nowhere.

Of the versions that the item holds embeddings of, it is the one that queries of the current version reach best: the
current version itself, else by the route that measured best, `dual` last. So an item's place follows from the current
version, the edges and its embeddings: a deployment rewrites no item, and a rollback restores exactly the state before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from sqlalchemy import Connection

from index.errors import NoRoute, RegraftError
from index.graph import Graph, Route
from service.registry.registry import LoadedVersion, Registry
from service.store.repository import versions_emptied, versions_with_embeddings
from service.store.rows import GalleryRow

NO_VERSIONS: frozenset[str] = frozenset()


class ReachLost(RegraftError):
    """Queries of the version to go back to could not reach some items that are reached now."""

    status = 409
    code = "reach_lost"


@dataclass(frozen=True)
class Places:
    """The placement rule while one version is current: version ids, the one reached best first.

    Attributes:
        order: every version; `service.store.embeddings.first_held` is the rule in SQL.
        reached: versions that queries of the current version reach.
    """

    order: tuple[int, ...]
    reached: frozenset[int]

    @cached_property
    def _rank(self) -> Mapping[int, int]:
        return {version_id: rank for rank, version_id in enumerate(self.order)}

    def best(self, held: Collection[int]) -> int:
        """The version that serves an item with embeddings by these versions."""
        return min(held, key=self._rank.__getitem__)


def places_of(registry: Registry, current: LoadedVersion | None) -> Places:
    """The rule with the edges of now; `current` None: no version is current."""
    order = preference(registry, current)
    reached = (version.id for version in order if current and route_to(registry, current, version) is not None)
    return Places(tuple(version.id for version in order), frozenset(reached))


def places_in(registry: Registry, gallery: GalleryRow) -> Places:
    """The rule of a gallery as it is now."""
    return places_of(registry, None if gallery.current_id is None else registry.by_id(gallery.current_id))


def order_to(registry: Registry, version_id: int) -> tuple[int, ...]:
    """The order of places while this version is current, as the target of a backfill is."""
    registry.sync_edges()
    return places_of(registry, registry.by_id(version_id)).order


def preference(registry: Registry, current: LoadedVersion | None, graph: Graph | None = None) -> list[LoadedVersion]:
    """Every version, the one whose items image queries of `current` reach best first, those out of reach last.

    An encoder that cannot be opened for the moment counts too: items do not move because of it.
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
    """Counts a gallery's live items in memory, after everything committed."""

    def moving(self, gallery_id: int, current: LoadedVersion) -> int:
        """Items that another embedding would serve if this version were current."""

    def items_by_version(self, gallery_id: int, order: Sequence[str]) -> Mapping[str, int]:
        """Items per version that would serve them in this order of versions, versions without any left out."""


def check_reachable(
    connection: Connection, registry: Registry, gallery_id: int, current: LoadedVersion, item_counts: ItemCounts
) -> None:
    """Raise NoRoute, naming their versions, when queries of `current` could not reach some live items.

    An item that holds an embedding in reach is served by it once `current` is current, whatever serves it now.
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
    """The items that get out of reach when a gallery goes back to a version, as evidence of that step.

    Raises:
        ReachLost: there are some, and it is not forced.
    """
    lost = _out_of_reach(connection, registry, item_counts, gallery.id, after, registry.current_of(gallery))
    if lost and not force:
        raise ReachLost(
            f"queries of {after.name!r} would not reach items of {_in_words(lost)}: first send embeddings of them by "
            f"{after.name!r}, or add an edge that leads from it to theirs; force=true goes back all the same",
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
    """Version -> live items it serves that hold no embedding that queries of `current` reach.

    `before`: only items that queries of this version reach, as it places them.
    """
    emptied = versions_emptied(connection, gallery_id)
    reached, places = places_of(registry, current).reached - emptied, places_of(registry, before or current)
    stored = versions_with_embeddings(connection, gallery_id)
    stored = stored if before is None else stored & places.reached
    if stored <= reached:  # as a rule, and it saves counting every item
        return {}
    # Reached versions first, so that others serve only items without any of these; last those memory may be wrong of.
    order = sorted(places.order, key=lambda version_id: (version_id in emptied, version_id not in reached))
    counted = item_counts.items_by_version(gallery_id, [registry.by_id(version_id).name for version_id in order])
    lost = {registry.by_id(version_id).name for version_id in stored - reached}
    return {name: items for name, items in counted.items() if name in lost}


def _in_words(lost: Mapping[str, int]) -> str:
    """Version -> items, in words."""
    return ", ".join(f"{name!r} ({items} items)" for name, items in sorted(lost.items()))


def route_to(
    registry: Registry, current: LoadedVersion, target: LoadedVersion, graph: Graph | None = None
) -> Route | None:
    """The route of image queries to items of `target`, or else of text queries; `dual` only with a suitable encoder.

    `graph`: the edges to use, by default all declared ones.
    """
    images = registry.encoders() if current.card.encoder else frozenset[str]()
    texts = registry.text_encoders() if current.card.text else frozenset[str]()
    edges = graph or registry.graph()
    return edges.route(current.name, target.name, images) or edges.route(current.name, target.name, texts)
