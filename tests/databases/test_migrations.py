"""Migrations on PostgreSQL as tests/service/store/database has them on SQLite, and with data on both."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from alembic import command
from sqlalchemy import Engine, create_engine, func, insert, inspect, select, text
from sqlalchemy.exc import OperationalError

import service.store.database.migration
from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import migrating, upgrade
from service.store.tables import edge, embedding, gallery, item, metadata, version
from staging.together import together


@pytest.fixture(scope="module", autouse=True)
def _short_starts() -> None:
    """Here every migration runs."""


@pytest.fixture
def settings(unmigrated: Settings) -> Settings:
    return unmigrated


def described(engine: Engine) -> dict[str, Any]:
    """Everything a database says about its tables."""
    found = inspect(engine)
    facts = {}
    for table in sorted(set(found.get_table_names()) - {"alembic_version"}):
        columns = sorted(found.get_columns(table), key=lambda column: column["name"])
        facts[table] = {
            "columns": [(c["name"], str(c["type"]), c["nullable"], c["default"]) for c in columns],
            "key": found.get_pk_constraint(table),
            "foreign": sorted(map(str, found.get_foreign_keys(table))),
            "unique": sorted(map(str, found.get_unique_constraints(table))),
            "indexes": sorted(map(str, found.get_indexes(table))),
            "checks": sorted((c["name"], _normal(c["sqltext"])) for c in found.get_check_constraints(table)),
        }
    return facts


def _normal(check: str) -> str:
    return "".join(check.lower().split())


def schema(settings: Settings) -> dict[str, Any]:
    engine = create_engine(settings.database_url)
    try:
        return described(engine)
    finally:
        engine.dispose()


ONLY_POSTGRESQL = pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)


@ONLY_POSTGRESQL
def test_the_migrated_schema_is_the_one_the_code_was_written_for(settings: Settings) -> None:
    settings.data.mkdir(parents=True)
    scratch = create_engine(settings.database_url)
    metadata.create_all(scratch)
    expected = described(scratch)
    metadata.drop_all(scratch)
    scratch.dispose()

    upgrade(settings)

    found = schema(settings)
    held, default, known = found.pop("embedding"), found.pop("embedding_default"), expected.pop("embedding")
    for one in (found, expected):  # that of pages is unique, for embeddings refer to it
        one["item"]["indexes"] = [
            index.replace("'unique': True", "'unique': False") for index in one["item"]["indexes"]
        ]
    assert found == expected
    assert held["columns"] == default["columns"]
    assert [one for one in held["columns"] if one[0] != "gallery_id"] == known["columns"]
    assert held["key"]["constrained_columns"] == [*known["key"]["constrained_columns"], "gallery_id"]
    assert all(held[part] == known[part] for part in ("unique", "indexes", "checks"))
    assert len(held["foreign"]) == len(known["foreign"]) == 2
    assert "'constrained_columns': ['gallery_id', 'item_id']" in "".join(held["foreign"])
    with migrating(settings.database_url) as config:
        config.stdout = sys.stdout  # by default that of the first import, which a test before may have closed
        command.check(config)


@ONLY_POSTGRESQL
def test_down_and_up_again_ends_in_the_same_schema_and_leaves_nothing_behind(settings: Settings) -> None:
    upgrade(settings)
    before = schema(settings)

    with migrating(settings.database_url) as config:
        command.downgrade(config, "base")
    assert schema(settings) == {}
    upgrade(settings)

    assert schema(settings) == before


def active(settings: Settings) -> list[int | None]:
    """The version each item is active in, which newer schemas do not store."""
    engine = create_engine(settings.database_url)
    with engine.connect() as connection:
        found = list(connection.execute(text("select active_id from item order by id")).scalars())
    engine.dispose()
    return found


def test_what_is_stored_survives_every_step_down_and_up(settings: Settings) -> None:
    upgrade(settings)
    database = Database(settings.database_url)
    with database.write() as connection:
        for name in ("v1", "v2"):
            connection.execute(insert(version).values(name=name, card={"name": name}, card_sha256="", created=1.5))
        known = {"origin": "registered", "evidence": {"kind": "truncate"}, "made": {}, "files": {}, "created": 1.5}
        connection.execute(insert(edge).values(new_id=2, old_id=1, kind="truncate", **known))
        connection.execute(insert(gallery).values(name="g", current_id=2, next_seq=5, created=1.5))
        stored = {"gallery_id": 1, "external_id": "a", "metadata": {"x": [1, None]}, "seq": 4}
        connection.execute(insert(item).values(**stored, deleted=False, created=1.5))
        for number, version_id in ((1, 1), (2, 1), (2, 2), (3, 1)):
            if number > 1 and version_id == 1:
                row = {"gallery_id": 1, "external_id": str(number), "metadata": {}, "seq": number, "deleted": False}
                connection.execute(insert(item).values(**row, created=1.5))
            made = {"item_id": number, "version_id": version_id, "origin": "encoded", "vector": b"1234"}
            connection.execute(insert(embedding).values(**made))
        gone = {"gallery_id": 1, "external_id": "gone", "metadata": {}, "seq": 3, "deleted": True}
        connection.execute(insert(item).values(**gone, created=1.5))
    database.close()

    for revision in ("0010", "0004", "0003"):
        with migrating(settings.database_url) as config:
            command.downgrade(config, revision)
        assert active(settings) == [1, 2, 1, None]
        upgrade(settings)

    database = Database(settings.database_url)
    with database.lookup() as connection:
        assert connection.execute(select(item.c.metadata, item.c.seq).where(item.c.id == 1)).one() == (
            {"x": [1, None]},
            4,
        )
        assert connection.execute(
            select(embedding.c.item_id, embedding.c.version_id).order_by(*embedding.primary_key)
        ).all() == [
            (1, 1),
            (2, 1),
            (2, 2),
            (3, 1),
        ]
        assert connection.execute(select(gallery.c.current_id, gallery.c.next_seq)).one() == (2, 5)
        assert connection.execute(select(func.count()).select_from(edge)).scalar() == 1
    database.close()


@ONLY_POSTGRESQL
def test_services_and_workers_that_start_together_migrate_once(settings: Settings) -> None:
    settings.data.mkdir(parents=True)

    together(4, lambda _: upgrade(settings))

    database = Database(settings.database_url)
    with database.lookup() as connection:
        assert connection.execute(text("select count(*) from alembic_version")).scalar() == 1
    database.close()


@ONLY_POSTGRESQL
def test_a_migration_gives_up_where_somebody_holds_its_table(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.store.database.migration, "TABLE_SECONDS", 0.1)
    with migrating(settings.database_url) as config:
        command.upgrade(config, "0006")
    before, using = schema(settings), create_engine(settings.database_url)
    with using.begin() as connection:
        connection.execute(text("lock table gallery in row exclusive mode"))
        with pytest.raises(OperationalError, match="lock timeout"):
            upgrade(settings)
    using.dispose()

    assert schema(settings) == before
