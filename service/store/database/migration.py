"""Migrate a database to this program's newest schema: `upgrade`. The migrations themselves are in migrations/."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, func, inspect, select, text
from sqlalchemy.exc import OperationalError

from index.events import Event
from service.settings import Settings
from service.store.database.connections import is_sqlite, postgresql_engine, sqlite_engine
from service.store.faults import check_references, check_sqlite, is_busy

if TYPE_CHECKING:
    from alembic.config import Config

logger = logging.getLogger(__name__)

MIGRATION_LOCK = 0x7265_6772_6166_74
"""The advisory lock held while a PostgreSQL database is migrated."""
TABLE_SECONDS = 5
"""How long a migration of PostgreSQL waits for the lock of a table."""
MIGRATIONS = Path(__file__).parents[3] / "migrations"


def upgrade(settings: Settings) -> bool:
    """Create the database, or migrate it to this program's newest schema; idempotent. Returns whether it had no tables.

    A database with the schema of a later release stays unchanged: from 0.2.0 on, a release only adds to what the
    previous one reads and writes, so that both can run while one replaces the other (docs/deployment.md).
    """
    # It holds every item, so other users of the machine may not read it; a folder that exists keeps its permissions.
    settings.data.mkdir(0o700, parents=True, exist_ok=True)
    settings.versions.mkdir(exist_ok=True)
    if is_sqlite(settings.database_url):
        check_sqlite(settings.database_url)
    while (new := _run_migrations(settings.database_url)) is None:
        logger.warning(Event("waiting_for_database", reason="another process writes to it, or migrates it"))
    return new


def _run_migrations(url: str) -> bool | None:
    """Run the pending migrations. Returns whether the database had no tables.

    None: another process is writing to the SQLite file, perhaps migrating it.
    """
    program_revisions, revision = revisions(), schema_revision(url)
    if revision is not None and revision > program_revisions[-1]:
        logger.warning(Event("schema_is_newer", database=revision, program=program_revisions[-1]))
    elif revision != program_revisions[-1]:
        try:
            with migrating(url) as config:
                # Read again: another process may have migrated it while this one waited.
                revision = _revision(config.attributes["connection"])
                # The steps of a new database would hide the address that `regraft serve` prints after them.
                logging.getLogger("alembic").setLevel(logging.WARNING if revision is None else logging.NOTSET)
                to_newest(config)
        except OperationalError as error:
            if not is_busy(error):
                raise
            return None
        if revision is None:
            logger.info(Event("database_created", schema=program_revisions[-1]))
    return revision is None


def revisions() -> list[str]:
    """The numbers of all migrations of this program, in order."""
    # The name of a migration's file is its date, its number and what it does.
    return sorted(path.stem.partition("_")[0].rpartition("-")[2] for path in (MIGRATIONS / "versions").glob("*.py"))


def schema_revision(url: str) -> str | None:
    """The last migration of a database; None: it has no tables of Regraft.

    Read without Alembic, so that a start without pending migrations need not import it.
    """
    engine = sqlite_engine(url) if is_sqlite(url) else postgresql_engine(url)
    try:
        with engine.connect() as connection:
            return _revision(connection)
    finally:
        engine.dispose()


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("select version_num from alembic_version")).scalar_one_or_none()


def to_newest(config: Config) -> None:
    """Run all pending migrations."""
    from alembic import command

    command.upgrade(config, "head")


@contextmanager
def migrating(url: str) -> Iterator[Config]:
    """Context with an Alembic configuration whose commands run in one transaction on `url`."""
    from alembic.config import Config

    sqlite = is_sqlite(url)
    # Rebuilding a parent table would cascade into its children, so foreign keys are off, and checked at the end.
    engine = sqlite_engine(url, "BEGIN IMMEDIATE", foreign_keys=False) if sqlite else postgresql_engine(url)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    try:
        with engine.begin() as connection:
            if not sqlite:
                # Concurrent migrations would fail on existing tables; SQLite's transaction excludes others anyway.
                connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
                # Set after that lock, as another migration may take long. Waiting for a table blocks later statements.
                connection.execute(text(f"set local lock_timeout = '{TABLE_SECONDS}s'"))
            counted = _autoincrements(connection) if sqlite else {}
            config.attributes["connection"] = connection
            yield config
            opened = connection.connection.driver_connection
            if isinstance(opened, sqlite3.Connection):
                _restore_autoincrements(opened, counted)
                check_references(opened, url)
    finally:
        engine.dispose()


def _autoincrements(connection: Connection) -> dict[str, int]:
    """The largest key that each of SQLite's AUTOINCREMENT tables has ever assigned."""
    if not inspect(connection).has_table("sqlite_sequence"):
        return {}
    return {row.name: row.seq for row in connection.execute(text("select name, seq from sqlite_sequence"))}


def _restore_autoincrements(connection: sqlite3.Connection, counted: dict[str, int]) -> None:
    """Restore these keys, since a rebuilt table would count from the largest key left in it."""
    for name, last in counted.items():
        known = {"name": name, "last": last}
        connection.execute("update sqlite_sequence set seq = max(seq, :last) where name = :name", known)
        connection.execute(
            "insert into sqlite_sequence (name, seq) select name, :last from sqlite_master where type = 'table'"
            " and name = :name and name not in (select name from sqlite_sequence)",
            known,
        )
