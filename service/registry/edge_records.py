"""The rows of edges, which the registry follows. A row never changes; an edge that is replaced gets a new row."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from index.version import Edge, Version
from index.version_folder.card import parse_edge
from index.version_folder.folder import edge_files, sha256
from service.errors import EdgeBroken
from service.settings import Settings
from service.store.rows import EdgeRow, all_of
from service.store.tables import edge


class EdgeOrigin(StrEnum):
    """The source of an edge: registered with its version, added as a folder, fitted on items, or a verified claim."""

    REGISTERED = "registered"
    ADDED = "added"
    FITTED = "fitted"
    CLAIMED = "claimed"


@dataclass(frozen=True)
class EdgeRecord:
    """An edge and the evidence of how it was made; `id` and `created` are set when its row is inserted."""

    edge: Edge
    origin: EdgeOrigin
    made: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    created: float = 0.0
    id: int = 0
    problem: str = ""
    """Why it cannot be used: no route contains it, but it stays listed, so that it can be removed."""

    def check(self) -> None:
        """Raise EdgeBroken if it cannot be used."""
        if self.problem:
            new, old, kind = self.edge.key
            raise EdgeBroken(f"the {kind} edge {new} -> {old} is not used: {self.problem}")


def edge_ids(connection: Connection) -> list[int]:
    """Every edge's number."""
    return list(connection.execute(select(edge.c.id).order_by(edge.c.id)).scalars())


def edge_rows(connection: Connection, ids: Collection[int]) -> list[EdgeRow]:
    """The rows of these edges that still exist."""
    return all_of(EdgeRow, connection.execute(select(edge).where(edge.c.id.in_(ids)).order_by(edge.c.id)))


def open_edge(row: EdgeRow, new: Version, old: str, settings: Settings) -> EdgeRecord:
    """Open an edge from its row and check its files; scores and calibration come from the row, not the disk."""
    folder = None if row.folder is None else settings.edges / row.folder
    files = row.files
    if row.origin == EdgeOrigin.REGISTERED:
        folder, files = new.folder / "edges" / old, edge_files(new.card, old)
    damaged = [name for name, expected in files.items() if folder is None or not _has_hash(folder / name, expected)]
    problem = f"{damaged[0]} changed after it was accepted" if damaged else ""
    opened = parse_edge(row.evidence, new.name, old, folder, files)
    return EdgeRecord(opened, EdgeOrigin(row.origin), row.made, row.files, row.created, row.id, problem)


def insert_edge(
    connection: Connection, new_id: int, old_id: int, declared: EdgeRecord, folder: str | None = None
) -> EdgeRecord:
    """Add an edge's row; returns the record with its id. `folder`: of its files, below `Settings.edges`."""
    added = replace(declared, created=time.time())
    values = {
        "new_id": new_id,
        "old_id": old_id,
        "kind": declared.edge.kind.value,
        "origin": declared.origin.value,
        "evidence": declared.edge.as_json(),
        "made": dict(declared.made),
        "folder": folder,
        "files": dict(declared.files),
        "created": added.created,
    }
    return replace(added, id=connection.execute(insert(edge).values(values).returning(edge.c.id)).scalar_one())


def delete_edge(connection: Connection, edge_id: int) -> None:
    """Remove an edge's row."""
    connection.execute(delete(edge).where(edge.c.id == edge_id))


def _has_hash(path: Path, expected: str) -> bool:
    try:
        return sha256(path) == expected
    except OSError:
        return False
