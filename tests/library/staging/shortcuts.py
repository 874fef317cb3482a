"""Shortcuts past slow steps of every start and registration, which have separate tests."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from alembic import command
from fastapi import FastAPI
from starlette.routing import BaseRoute, Route

from index import isolated
from service.http import app
from service.settings import Settings
from service.store.database import migration

COMPILE_ROUTES = app._compile_routes


@contextmanager
def verified_here() -> Iterator[None]:
    """Verify versions in this process, as a child would first import everything (tests/index/test_isolated.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolated, "_ask", lambda asked, limits: isolated._verify(json.loads(json.dumps(asked))))
        yield


@contextmanager
def migrated_once() -> Iterator[None]:
    """Create the newest schema in an empty SQLite database directly, without migrations (test_migrations.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migration, "to_newest", _to_newest)
        yield


@contextmanager
def routed_once() -> Iterator[None]:
    """Reuse the routes of the first application, because FastAPI would build the same ones for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "_compile_routes", _share_routes)
        yield


@contextmanager
def short_starts() -> Iterator[None]:
    """All three shortcuts. Per file: the same process may later test verification or migrations."""
    with verified_here(), migrated_once(), routed_once():
        yield


def _share_routes(made: FastAPI) -> None:
    shared = _routes()
    assert len(made.router.routes) == len(shared)
    # A plain route, such as that of the OpenAPI description, belongs to its own application.
    made.router.routes[:] = [
        own if isinstance(own, Route) else known for own, known in zip(made.router.routes, shared, strict=True)
    ]


@cache
def _routes() -> list[BaseRoute]:
    with TemporaryDirectory() as folder:
        first = app.create_app(Settings(data=Path(folder)))
        COMPILE_ROUTES(first)
        return list(first.router.routes)


def _to_newest(config: Any) -> None:
    connection = config.attributes["connection"]
    sqlite = connection.dialect.name == "sqlite"
    if not sqlite or connection.exec_driver_sql("select 1 from sqlite_master").first():
        command.upgrade(config, "head")
        return
    for statement in _schema():
        connection.exec_driver_sql(statement)


@cache
def _schema() -> list[str]:
    """The SQL statements of the newest schema."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "migrated.db"
        with migration.migrating(f"sqlite:///{path}") as config:
            command.upgrade(config, "head")
        with closing(sqlite3.connect(path)) as migrated:
            written = "select sql from sqlite_master where sql is not null and name not like 'sqlite_%' order by rowid"
            tables = [sql for (sql,) in migrated.execute(written)]
            (head,) = migrated.execute("select version_num from alembic_version").fetchone()
    rows = [f"insert into alembic_version values ('{head}')", "insert into image_store values (hex(randomblob(16)))"]
    return [*tables, *rows]
