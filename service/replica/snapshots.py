"""Snapshots of galleries on disk, next to their segments, so that a start reads only later changes from SQL.

Files are written before the row that names them: a process killed in between leaves a folder that is never read.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from sqlalchemy import Connection

from index import contents
from index.contents import Contents
from index.events import Event
from index.paths import paths_in
from service.replica.loaded import LoadedGallery
from service.store.database.connections import Database
from service.store.galleries.snapshots import record_snapshot, snapshots_of

logger = logging.getLogger(__name__)

FOLDER = ".snapshots"
"""Within a gallery's folder; no version can have this name."""
KEPT_FOLDERS = 2
"""Folders kept: the one before the newest may still be read."""
GROWING, SETTLED = 1 / 8, 1 / 64
"""The share of items that may change before a new snapshot is due, during changes and after they have stopped.

An item that was sealed since the snapshot counts as changed, as a start would read its vector from SQL.
"""


def write_if_due(database: Database, loaded: LoadedGallery, *, settled: bool) -> None:
    """Write a snapshot if enough has changed since the last one; at most one caller per gallery at a time.

    Raises:
        OSError: a file cannot be written, for example because the disk is full.
    """
    if not (
        _is_due(loaded, settled=settled) and has_segments(loaded.folder)
    ):  # else every vector is read from SQL anyway
        return
    with database.lookup() as connection:  # another process may have written it
        loaded.snapshot_seq = max((_seq(place) for place in _listed_folders(connection, loaded)), default=0)
    if _is_due(loaded, settled=settled):
        _write(database, loaded)


def _is_due(loaded: LoadedGallery, *, settled: bool) -> bool:
    max_changes = (SETTLED if settled else GROWING) * sum(loaded.gallery.items_by_version().values())
    sealed = loaded.unsealed_at_snapshot - loaded.gallery.unsealed_count()
    return loaded.seq - loaded.snapshot_seq + max(0, sealed) > max_changes


def _write(database: Database, loaded: LoadedGallery) -> None:
    """Write a snapshot of a gallery, and remove older ones."""
    unsealed, taken_contents = loaded.gallery.unsealed_count(), loaded.gallery.contents()
    if taken_contents is None:
        return  # items are left out: a start has to check them again
    folder = loaded.folder / FOLDER
    name = contents.write(*taken_contents, folder)
    if loaded.is_of_other(database.timeline()):
        return  # it may hold lost changes: the replica is about to forget it
    with database.write() as connection:
        record_snapshot(connection, loaded.id, name, taken_contents[1])
    loaded.snapshot_seq, loaded.unsealed_at_snapshot = taken_contents[1], unsealed
    for old in sorted(folder.iterdir(), key=_age)[:-KEPT_FOLDERS]:
        shutil.rmtree(old, ignore_errors=True)
    logger.info(Event("snapshot_kept", gallery=loaded.name, items=len(taken_contents[0].keys_N), seq=taken_contents[1]))


def newest(connection: Connection, loaded: LoadedGallery, versions: set[str]) -> tuple[Contents, int] | None:
    """The newest undamaged snapshot that the database names, and its feed number; None: there is none.

    `versions`: names of all existing versions; a snapshot with embeddings of another version is not used.
    """
    for folder in _listed_folders(connection, loaded):
        try:
            loaded_contents, seq = contents.read(folder)
        except (OSError, ValueError) as error:
            logger.warning(Event("snapshot_dropped", folder=folder, reason=error))
            shutil.rmtree(folder, ignore_errors=True)
            continue
        if {version for version, _ in loaded_contents.embeddings} <= versions:
            return loaded_contents, seq
    return None


def has_segments(folder: Path) -> bool:
    """Whether any rows of a gallery are sealed on disk."""
    return bool(paths_in(folder, "*/*/*"))


def _listed_folders(connection: Connection, loaded: LoadedGallery) -> list[Path]:
    """The folders of snapshots that the database names and that exist here, newest first."""
    named = (loaded.folder / FOLDER / name for name in snapshots_of(connection, loaded.id))
    return [place for place in named if place.is_dir()]


def _seq(place: Path) -> int:
    try:
        return contents.manifest_of(place).seq
    except (OSError, ValueError):
        return 0


def _age(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # swept by another process
        return 0.0
