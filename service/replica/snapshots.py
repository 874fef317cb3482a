"""Snapshots of galleries, so that a start reads of SQL only what came since: kept beside the segments, and found again.

Files first, then the row that names them: a process killed in between leaves a folder that nobody believes.
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
from service.store.database import Database
from service.store.snapshots import note_snapshot, snapshots_of

logger = logging.getLogger(__name__)

FOLDER = ".snapshots"
"""Within a gallery's folder; no version is called so."""
LEFT = 2
"""Folders kept: somebody may be reading the one before the newest."""
GROWING, SETTLED = 1 / 8, 1 / 64
"""The share of items that may have changed since, while they go on changing and when they have stopped.

So has one that was sealed since: a start would read its vector from SQL.
"""


def keep_if_due(database: Database, live: LoadedGallery, *, settled: bool) -> None:
    """Write a snapshot if so much has changed since the last one that it is worth it; one caller at a time.

    OSError: the disk is full, or worse.
    """
    if not (_is_due(live, settled=settled) and has_segments(live.folder)):  # else every vector is read from SQL anyway
        return
    with database.lookup() as connection:  # another process may have written it
        live.snapshot_seq = max((_seq(place) for place in _believed(connection, live)), default=0)
    if _is_due(live, settled=settled):
        _keep(database, live)


def _is_due(live: LoadedGallery, *, settled: bool) -> bool:
    most = (SETTLED if settled else GROWING) * sum(live.gallery.items_by_version().values())
    sealed = live.snapshot_unsealed - live.gallery.unsealed_count()
    return live.seq - live.snapshot_seq + max(0, sealed) > most


def _keep(database: Database, live: LoadedGallery) -> None:
    """Write a snapshot of what a gallery holds now, and forget those before."""
    unsealed, taken = live.gallery.unsealed_count(), live.gallery.contents()
    if taken is None:
        return  # a start shall look again at what is left out
    folder = live.folder / FOLDER
    name = contents.write(*taken, folder)
    with database.write() as connection:
        note_snapshot(connection, live.id, name, taken[1])
    live.snapshot_seq, live.snapshot_unsealed = taken[1], unsealed
    for old in sorted(folder.iterdir(), key=_age)[:-LEFT]:
        shutil.rmtree(old, ignore_errors=True)
    logger.info(Event("snapshot_kept", gallery=live.name, items=len(taken[0].keys_N), seq=taken[1]))


def newest(connection: Connection, live: LoadedGallery, versions: set[str]) -> tuple[Contents, int] | None:
    """The last one that the database names and that is whole, and its number of the feed.

    `versions`: those there are; of others a gallery holds nothing any more.
    """
    for place in _believed(connection, live):
        try:
            found, seq = contents.read(place)
        except (OSError, ValueError) as error:
            logger.warning(Event("snapshot_dropped", folder=place, reason=error))
            shutil.rmtree(place, ignore_errors=True)
            continue
        if {version for version, _ in found.embeddings} <= versions:
            return found, seq
    return None


def has_segments(folder: Path) -> bool:
    """Whether any rows of a gallery are sealed on disk."""
    return bool(paths_in(folder, "*/*/*"))


def _believed(connection: Connection, live: LoadedGallery) -> list[Path]:
    """The folders that are here of the snapshots that the database names, newest first."""
    named = (live.folder / FOLDER / name for name in snapshots_of(connection, live.id))
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
