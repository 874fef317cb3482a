"""Placement: the version each live item is active in.

It is the one, of those the item holds an embedding of, that queries of the current version reach best: the current
version itself, else by the route that measured best, `dual` last. So an item's place follows from the current version
and what the item holds, and a rollback restores exactly what was before without computing an embedding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from sqlalchemy import Connection, case, exists, false, func, select, update

from index.errors import NoRoute, RegraftError
from index.graph import Graph, Route
from service.registry.registry import LoadedVersion, Registry
from service.store.repository import live_items_by_version, take_seq
from service.store.rows import GalleryRow
from service.store.tables import embedding, item


class ReachLost(RegraftError):
    """Queries of the version to go back to could not reach some items that are reached now."""

    status = 409
    code = "reach_lost"


@dataclass(frozen=True)
class Places:
    """Where items belong while one version is current: version ids, the one reached best first.

    Attributes:
        order: every version.
        reached: those that queries of the current version reach.
    """

    order: tuple[int, ...]
    reached: frozenset[int]

    @cached_property
    def _rank(self) -> Mapping[int, int]:
        return {version_id: rank for rank, version_id in enumerate(self.order)}

    def best(self, held: Collection[int]) -> int:
        """The version an item is active in that holds embeddings of these."""
        return min(held, key=self._rank.__getitem__)


def places_of(registry: Registry, current: LoadedVersion, graph: Graph | None = None) -> Places:
    """The rule as it is now."""
    order = preference(registry, current, graph)
    reached = (held.id for held in order if route_to(registry, current, held, graph) is not None)
    return Places(tuple(held.id for held in order), frozenset(reached))


def activate(
    connection: Connection, registry: Registry, gallery_id: int, current: LoadedVersion, graph: Graph | None = None
) -> int:
    """Put every live item where it belongs once `current` is the current version; returns how many moved."""
    places = {held.id: place for place, held in enumerate(preference(registry, current, graph))}
    rank = case(places, value=embedding.c.version_id, else_=len(places))
    live = item.alias("live")
    held = (
        select(
            live.c.id,
            live.c.active_id,
            embedding.c.version_id,
            func.row_number().over(partition_by=live.c.id, order_by=rank).label("place"),
        )
        .join(embedding, embedding.c.item_id == live.c.id)
        .where(live.c.gallery_id == gallery_id, live.c.deleted == false())
        .subquery("held")
    )
    moving = (
        select(held.c.id, held.c.version_id, func.row_number().over(order_by=held.c.id).label("number"))
        .where(held.c.place == 1, held.c.version_id != held.c.active_id)
        .subquery("moving")
    )
    first = take_seq(connection, gallery_id, 0)
    values = {"active_id": moving.c.version_id, "seq": first - 1 + moving.c.number}
    moved = connection.execute(update(item).where(item.c.id == moving.c.id).values(values)).rowcount
    take_seq(connection, gallery_id, moved)
    return moved


def preference(registry: Registry, current: LoadedVersion, graph: Graph | None = None) -> list[LoadedVersion]:
    """Every version, the one whose items image queries of `current` reach best first, those out of reach last."""

    def rank(held: LoadedVersion) -> tuple[int, float, int, int]:
        route = route_to(registry, current, held, graph)
        if route is None:
            return 2, 0.0, 0, -held.id
        if route.dual:
            return 1, 0.0, 0, -held.id
        return 0, -route.measured, len(route.edges), -held.id

    return sorted(registry.all(), key=rank)


def check_reachable(connection: Connection, registry: Registry, gallery_id: int, current: LoadedVersion) -> None:
    """Raise NoRoute, naming where they lie, when queries of `current` could not reach some live items.

    An item that holds an embedding in reach moves to it once `current` is current, wherever it is now.
    """
    if lost := _out_of_reach(connection, registry, gallery_id, current):
        raise NoRoute(
            f"no route leads from queries of {current.name!r} to items of {_in_words(lost)}", pointer="/version"
        )


def check_kept(
    connection: Connection, registry: Registry, gallery: GalleryRow, after: LoadedVersion, force: bool
) -> dict[str, dict[str, int]]:
    """What of a gallery gets out of reach when it goes back to a version, as the evidence of that step.

    Raises:
        ReachLost: something does, and it is not forced.
    """
    lost = _out_of_reach(connection, registry, gallery.id, after, registry.current_of(gallery))
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
    gallery_id: int,
    current: LoadedVersion,
    before: LoadedVersion | None = None,
) -> dict[str, int]:
    """Version -> live items active in it that hold no embedding that queries of `current` reach.

    `before`: only those that queries of this version reach.
    """
    reached, items_by_version = places_of(registry, current).reached, live_items_by_version(connection, gallery_id)
    asked = items_by_version.keys() if before is None else items_by_version.keys() & places_of(registry, before).reached
    if asked <= reached:  # as a rule, and it saves a look at every item
        return {}
    in_reach = exists().where(embedding.c.item_id == item.c.id, embedding.c.version_id.in_(reached))
    stuck = live_items_by_version(connection, gallery_id, item.c.active_id.in_(asked - reached), ~in_reach)
    return {registry.by_id(version_id).name: items for version_id, items in stuck.items()}


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
