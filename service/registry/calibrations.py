"""Store and read the calibrations that gates have fitted for a gallery (`service.upgrades.gates.maps`).

They apply while the deployment that rests on their gate is in a trial or current, so that a rollback restores the
earlier answers. Every function runs in its caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from index.edges.calibration import Calibration, calibration_from_json
from index.query.edge_maps import MODE, MapKey
from index.query.merge import Mode
from index.version import EdgeKey
from service.registry.edge_records import EdgeRecord
from service.registry.registry import Registry
from service.store.tables import calibration


def store_calibrations(
    connection: Connection,
    registry: Registry,
    gallery_id: int,
    gate_id: int,
    maps: Mapping[MapKey, Calibration],
    evidence: Mapping[str, Any],
    modes: Mapping[MapKey, str],
    fitted_with: Sequence[EdgeRecord],
) -> None:
    """Store the maps that a gate fitted; the best merge mode is stored with the map of the route it was measured on.

    The caller holds the gallery's lock. `fitted_with`: all edges when the gate began, perhaps minutes ago; a map along
    one that was removed or replaced since is left out, as `forget_edge` deletes those that are stored.
    """
    registry.sync_edges()  # no edge is removed until the commit: that takes the lock of every gallery
    before, now = ({declared.edge.key: declared.id for declared in edges} for edges in (fitted_with, registry.edges()))
    rows = [
        {
            "gallery_id": gallery_id,
            "gate_id": gate_id,
            "query_id": registry.named(query).id,
            "item_id": registry.named(item_version).id,
            "origin": origin,
            "route": [list(edge) for edge in route],
            "map": fitted.as_json(),
            "evidence": {**evidence, MODE: modes.get((query, item_version, origin, route))},
        }
        for (query, item_version, origin, route), fitted in maps.items()
        if all(before.get(edge) == now.get(edge) for edge in route)
    ]
    if rows:
        connection.execute(insert(calibration), rows)


def maps_of(
    connection: Connection, registry: Registry, gates: Sequence[int]
) -> tuple[dict[MapKey, Calibration], dict[str, Mode]]:
    """The maps that some gates fitted, and the merge mode that each found best for queries of its version."""
    statement = select(calibration).where(calibration.c.gate_id.in_(gates))
    rows = connection.execute(statement.order_by(calibration.c.id)).all()
    maps, modes = {}, {}
    for row in rows:
        query = registry.by_id(row.query_id).name
        maps[query, registry.by_id(row.item_id).name, row.origin, _route(row.route)] = calibration_from_json(row.map)
        if row.evidence.get(MODE):
            modes[query] = Mode(row.evidence[MODE])
    return maps, modes


def forget_edge(connection: Connection, key: EdgeKey) -> int:
    """Delete every map fitted for a route along this edge; returns how many."""
    rows = connection.execute(select(calibration.c.id, calibration.c.route)).all()
    stale = [row.id for row in rows if list(key) in row.route]
    connection.execute(delete(calibration).where(calibration.c.id.in_(stale)))
    return len(stale)


def _route(stored: Sequence[Sequence[str]]) -> tuple[EdgeKey, ...]:
    return tuple((new, old, kind) for new, old, kind in stored)
