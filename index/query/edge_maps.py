"""Which calibration map belongs to which route: the keys of maps (`map_key`), and the maps stored in edges.

A map is used only for the query version, item version, origin and edges that it was fitted for, so a replaced edge
leaves no stale map.

The `calibration` field of an edge holds two maps (see `index.edges.calibration`). `edge` is for the items that the edge
reaches: those of the old version, or those that a `forward` edge transformed. `own` is for items that the new version
encoded. `dual` uses the `own` map of the version that embeds the query, because both sides are then of one version.
`mode` is optional: the merge mode that was best in a simulated backfill along the edge.

Without a `mode`, edges into the old space are merged raw, because their scores are nearly comparable and maps would
only add noise; all others are merged calibrated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from index.edges.calibration import Calibration, calibration_from_json
from index.edges.graph import Route
from index.errors import InvalidArgument, InvalidVersionFolder
from index.query.merge import Mode
from index.space import space_from_json
from index.version import Card, Edge, EdgeKey, EdgeKind, Origin

MapKey = tuple[str, str, str, tuple[EdgeKey, ...]]
"""(query version, item version, origin, the route's signature)."""

Maps = Mapping[MapKey, Calibration]

OWN, EDGE, MODE = "own", "edge", "mode"

INTO_OLD = frozenset({EdgeKind.IDENTITY.value, EdgeKind.TRUNCATE.value, EdgeKind.ZERO_PAD.value})
"""Kinds of edges that compare queries in the old version's space without a fitted or learned map."""


def map_key(route: Route, origin: str) -> MapKey:
    """The key of the map for items of this origin on this route."""
    return route.query_version, route.item_version, origin, route.signature


def edge_maps(edges: Iterable[Edge], versions: Iterable[str]) -> dict[MapKey, Calibration]:
    """The maps stored in edges, for galleries without maps of their own.

    A chain of edges has no map, because its scores are not those of a single edge. If a version has several `own` maps,
    the one of its best measured edge is used.

    Args:
        edges: all edges, with valid calibrations (`check_calibration`).
        versions: all query versions, for `dual`.
    """
    maps: dict[MapKey, Calibration] = {}
    same: dict[tuple[str, str], Calibration] = {}
    for edge in sorted((e for e in edges if e.calibration), key=lambda e: (-e.measured, e.key)):
        through, own = (calibration_from_json((edge.calibration or {})[name]) for name in (EDGE, OWN))
        for origin in (Origin.ENCODED, Origin.SUPPLIED):
            same.setdefault((edge.new, origin.value), own)
            if edge.kind is not EdgeKind.FORWARD:
                maps[edge.new, edge.old, origin.value, (edge.key,)] = through
        if edge.kind is EdgeKind.FORWARD:
            same.setdefault((edge.new, Origin.TRANSFORMED.value), through)
    for (version, origin_value), own in same.items():
        maps[version, version, origin_value, ()] = own
        for asking in set(versions) - {version}:
            maps[asking, version, origin_value, ((asking, version, EdgeKind.DUAL.value),)] = own
    return maps


def preferred_mode(route: Route, origin: str) -> Mode | None:
    """The merge mode that the edges of a route prefer for items of this origin; None: no preference."""
    if not route.edges:
        return Mode.CALIBRATED if origin == Origin.TRANSFORMED else None
    modes = {(edge.calibration or {}).get(MODE) for edge in route.edges}
    if len(route.edges) == 1 and (mode := modes.pop()) is not None:
        return Mode(mode)
    return default_mode(route.kinds)


def default_mode(kinds: Collection[str]) -> Mode:
    """The merge mode along edges of these kinds if none was measured."""
    return Mode.RAW if kinds and INTO_OLD.issuperset(kinds) else Mode.CALIBRATED


def common_mode(modes: Iterable[Mode | None]) -> Mode | None:
    """One mode for several routes: the preferred one if all agree, else calibrated; None: no preference."""
    preferred = {mode for mode in modes if mode is not None}
    return preferred.pop() if len(preferred) == 1 else Mode.CALIBRATED if preferred else None


def check_calibration(edge: Edge, new: Card, old: Card) -> None:
    """Check the `calibration` field of an edge, which may be None.

    Raises:
        InvalidVersionFolder: a map is missing or invalid, or has the opposite order of its space.
    """
    if edge.calibration is None:
        return
    place = f"edges/{edge.old}/calibration"
    if set(edge.calibration) - {MODE} != {EDGE, OWN}:
        why = f"{place} must have the two maps {EDGE!r} and {OWN!r}, and may have {MODE!r}"
        raise InvalidVersionFolder(why, pointer=f"/{place}")
    if edge.calibration.get(MODE, Mode.RAW) not in list(Mode):
        raise InvalidVersionFolder(f"{place}/{MODE} must be one of {', '.join(Mode)}", pointer=f"/{place}/{MODE}")
    reached = new if edge.kind is EdgeKind.FORWARD else old
    for name, card in ((EDGE, reached), (OWN, new)):
        try:
            found = calibration_from_json(edge.calibration[name])
        except InvalidArgument as error:
            raise InvalidVersionFolder(f"{place}/{name}: {error.message}", pointer=f"/{place}/{name}") from error
        space = space_from_json(card.space)
        if (found.slope > 0) != space.higher_is_better:
            better = "higher" if space.higher_is_better else "lower"
            raise InvalidVersionFolder(
                f"{place}/{name} contradicts its space: {better} scores of {card.name!r} are better",
                pointer=f"/{place}/{name}/slope",
            )
