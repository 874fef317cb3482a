"""Read and write the rows of versions, which the registry follows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, insert, select

from index.errors import InvalidVersionFolder
from index.version import Version
from index.version_folder.folder import card_sha256
from service.registry.edge_records import EdgeOrigin, EdgeRecord, insert_edge
from service.store.rows import VersionRow, all_of
from service.store.tables import version


def registered_rows(connection: Connection) -> list[VersionRow]:
    """Every registered version's row, in order of registration."""
    return all_of(VersionRow, connection.execute(select(version).order_by(version.c.id)))


def version_ids(connection: Connection) -> set[int]:
    """Every registered version's number."""
    return set(connection.execute(select(version.c.id)).scalars())


def registered_ids(connection: Connection, names: Sequence[str]) -> list[int]:
    """The numbers of versions, in the order of their names.

    Raises:
        InvalidVersionFolder: one of them is not registered; the message calls it the end of an edge.
    """
    rows = connection.execute(select(version.c.name, version.c.id).where(version.c.name.in_(names)))
    found = {row.name: row.id for row in rows}
    for name in names:
        if name not in found:
            raise InvalidVersionFolder(f"an edge leads to version {name!r}, which is not registered", pointer="/edges")
    return [found[name] for name in names]


def registered_sha256(connection: Connection, name: str) -> str | None:
    """The card's sha256 of a registered version; None: no version has this name."""
    return connection.execute(select(version.c.card_sha256).where(version.c.name == name)).scalar()


def insert_version(connection: Connection, loaded: Version, old_ids: Iterable[int]) -> None:
    """Add the rows of a version and its edges; `old_ids` are the database ids of the edges' old versions."""
    values = {
        "name": loaded.name,
        "card": loaded.card.as_json(),
        "card_sha256": card_sha256(loaded.folder),
        "created": time.time(),
    }
    new_id = connection.execute(insert(version).returning(version.c.id), values).scalar_one()
    for declared, old_id in zip(loaded.edges, old_ids, strict=True):
        insert_edge(connection, new_id, old_id, EdgeRecord(declared, EdgeOrigin.REGISTERED))
