"""Placement: the version that serves each live item. A rule, which nothing stores.

It is the one, of those the item holds an embedding of, that queries of the current version reach best: the current
version itself, else by the route that measured best, `dual` last. So an item's place follows from the current version,
the edges and what the item holds: a deployment rewrites no item, and a rollback restores exactly what was before.
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
from service.store.repository import versions_emptied, versions_held
from service.store.rows import GalleryRow

NOBODY: frozenset[str] = frozenset()


class ReachLost(RegraftError):
    """Queries of the version to go back to could not reach some items that are reached now."""

    status = 409
    code = "reach_lost"


@dataclass(frozen=True)
class Places:
    """Which embedding serves an item while one version is current: version ids, the one reached best first.

    Attributes:
        order: every version; `service.store.embeddings.first_held` is the rule in SQL.
        reached: those that queries of the current version reach.
    """

    order: tuple[int, ...]
    reached: frozenset[int]

    @cached_property
    def _rank(self) -> Mapping[int, int]:
        return {version_id: rank for rank, version_id in enumerate(self.order)}

    def best(self, held: Collection[int]) -> int:
        """The version that serves an item which holds embeddings of these."""
        return min(held, key=self._rank.__getitem__)


def places_of(registry: Registry, current: LoadedVersion | None) -> Places:
    """The rule as it is now; `current` None: no version is."""
    order = preference(registry, current)
    reached = (held.id for held in order if current and route_to(registry, current, held) is not None)
    return Places(tuple(held.id for held in order), frozenset(reached))


def places_in(registry: Registry, gallery: GalleryRow) -> Places:
    """The rule of a gallery."""
    return places_of(registry, None if gallery.current_id is None else registry.by_id(gallery.current_id))


def order_to(registry: Registry, version_id: int) -> tuple[int, ...]:
    """The order of places while this version is current, as the target of a backfill is."""
    registry.sync_edges()
    return places_of(registry, registry.by_id(version_id)).order


def preference(registry: Registry, current: LoadedVersion | None, graph: Graph | None = None) -> list[LoadedVersion]:
    """Every version, the one whose items image queries of `current` reach best first, those out of reach last.

    An encoder that cannot be opened for the moment counts too: what it embedded stays where it is.
    """
    edges, everyone = graph or registry.graph(), registry.all()
    if current is None:
        return everyone[::-1]
    images = frozenset(held.name for held in everyone if held.card.encoder) if current.card.encoder else NOBODY
    texts = frozenset(held.name for held in everyone if held.card.text) if current.card.text else NOBODY

    def rank(held: LoadedVersion) -> tuple[int, float, int, int]:
        route = edges.route(current.name, held.name, images) or edges.route(current.name, held.name, texts)
        if route is None:
            return 2, 0.0, 0, -held.id
        if route.dual:
            return 1, 0.0, 0, -held.id
        return 0, -route.measured, len(route.edges), -held.id

    return sorted(everyone, key=rank)


class PlacedItems(Protocol):
    """What memory counts of a gallery's live items, by everything committed."""

    def moving(self, gallery_id: int, current: LoadedVersion) -> int:
        """Items that another embedding would serve if this version were current."""

    def items_by_version(self, gallery_id: int, order: Sequence[str]) -> Mapping[str, int]:
        """Items per version that would serve them in this order of versions, versions without any left out."""


def check_reachable(
    connection: Connection, registry: Registry, gallery_id: int, current: LoadedVersion, placed: PlacedItems
) -> None:
    """Raise NoRoute, naming where they lie, when queries of `current` could not reach some live items.

    An item that holds an embedding in reach is served by it once `current` is current, whatever serves it now.
    """
    if lost := _out_of_reach(connection, registry, placed, gallery_id, current):
        raise NoRoute(
            f"no route leads from queries of {current.name!r} to items of {_in_words(lost)}", pointer="/version"
        )


def check_kept(
    connection: Connection,
    registry: Registry,
    gallery: GalleryRow,
    after: LoadedVersion,
    placed: PlacedItems,
    force: bool,
) -> dict[str, dict[str, int]]:
    """What of a gallery gets out of reach when it goes back to a version, as the evidence of that step.

    Raises:
        ReachLost: something does, and it is not forced.
    """
    lost = _out_of_reach(connection, registry, placed, gallery.id, after, registry.current_of(gallery))
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
    placed: PlacedItems,
    gallery_id: int,
    current: LoadedVersion,
    before: LoadedVersion | None = None,
) -> dict[str, int]:
    """Version -> live items it serves that hold no embedding that queries of `current` reach.

    `before`: only those that queries of this version reach, by what serves them while it is current.
    """
    gone = versions_emptied(connection, gallery_id)
    reached, places = places_of(registry, current).reached - gone, places_of(registry, before or current)
    asked = versions_held(connection, gallery_id)
    asked = asked if before is None else asked & places.reached
    if asked <= reached:  # as a rule, and it saves a look at every item
        return {}
    # What is reached first: then the others serve only items that hold none of those. Last what memory may be wrong of.
    order = sorted(places.order, key=lambda version_id: (version_id in gone, version_id not in reached))
    counted = placed.items_by_version(gallery_id, [registry.by_id(version_id).name for version_id in order])
    lost = {registry.by_id(version_id).name for version_id in asked - reached}
    return {name: items for name, items in counted.items() if name in lost}


def _in_words(lost: Mapping[str, int]) -> str:
    """Version -> items, in words."""
    return ", ".join(f"{name!r} ({items} items)" for name, items in sorted(lost.items()))


def route_to(
    registry: Registry, current: LoadedVersion, held: LoadedVersion, graph: Graph | None = None
) -> Route | None:
    """How image queries reach items of `held`, or else text queries; `dual` helps what the version can embed at all.

    `graph`: the edges to go by, by default those there are.
    """
    images = registry.encoders() if current.card.encoder else frozenset[str]()
    texts = registry.text_encoders() if current.card.text else frozenset[str]()
    edges = graph or registry.graph()
    return edges.route(current.name, held.name, images) or edges.route(current.name, held.name, texts)
