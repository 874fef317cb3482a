from __future__ import annotations

import io
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, insert, inspect, select, text, update
from sqlalchemy.exc import IntegrityError

import service.store.database.connections
import service.store.database.migration
import service.store.leases.engines  # it has a table of its own
from service.errors import DatabaseDamaged
from service.settings import Settings
from service.store.api_keys import add_key, all_keys
from service.store.database.connections import Database, sqlite_engine
from service.store.database.migration import MIGRATIONS, migrating, upgrade
from service.store.tables import edge, embedding, gallery, item, metadata, version
from service.store.vectors.files import begin_file, file_row, vector_file
from service.upgrades.deployments.history import history, rollback_chain
from staging.together import together
from staging.waiting import until


@pytest.fixture(scope="module", autouse=True)
def _short_starts() -> None:
    """Here every migration runs."""


def described(url: str) -> dict[str, Any]:
    """Everything a database says about its tables, in an order of its own."""
    engine = create_engine(url)
    found = inspect(engine)
    tables = sorted(set(found.get_table_names()) - {"alembic_version"})
    facts: dict[str, Any] = {}
    for table in tables:
        facts[table] = {
            "columns": [(c["name"], str(c["type"]), c["nullable"], c["default"]) for c in found.get_columns(table)],
            "key": found.get_pk_constraint(table),
            "foreign": sorted(map(str, found.get_foreign_keys(table))),
            "unique": sorted(map(str, found.get_unique_constraints(table))),
            "indexes": sorted(
                (i["name"], i["column_names"], i["unique"], {k: str(v) for k, v in i["dialect_options"].items()})
                for i in found.get_indexes(table)
            ),
            "checks": sorted((c["name"], c["sqltext"]) for c in found.get_check_constraints(table)),
        }
    with engine.connect() as connection:
        statement = text("select name, sql like '%AUTOINCREMENT%' from sqlite_master where type = 'table'")
        facts["autoincrement"] = sorted(map(tuple, connection.execute(statement)))
    facts["autoincrement"] = [row for row in facts["autoincrement"] if row[0] != "alembic_version"]
    engine.dispose()
    return facts


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data=tmp_path)


def test_the_migrated_schema_is_the_one_the_code_was_written_for(settings: Settings, tmp_path: Path) -> None:
    scratch = f"sqlite:///{tmp_path / 'scratch.db'}"
    engine = create_engine(scratch)
    metadata.create_all(engine)
    engine.dispose()

    upgrade(settings)

    migrated = described(settings.database_url)
    assert described(scratch) == migrated
    assert sum(len(facts["checks"]) for name, facts in migrated.items() if name != "autoincrement") >= 8


def test_nothing_is_left_to_generate(settings: Settings) -> None:
    upgrade(settings)

    with migrating(settings.database_url) as config:
        config.stdout = io.StringIO()  # its own is that of the test that imported it first, and closed by now
        command.check(config)


def test_going_down_and_up_again_ends_in_the_same_schema(settings: Settings) -> None:
    upgrade(settings)
    before = described(settings.database_url)

    with migrating(settings.database_url) as config:
        command.downgrade(config, "base")
    emptied = described(settings.database_url)
    upgrade(settings)

    assert set(emptied) == {"autoincrement"}
    assert before == described(settings.database_url)


@pytest.mark.parametrize(("state", "refused"), [("writing", True), ("kept", True), ("dropped", False)])
def test_vectors_that_lie_in_files_hold_off_the_way_down_to_a_release_without(
    settings: Settings, state: str, refused: bool
) -> None:
    upgrade(settings)
    with closing(Database(settings.database_url)) as database, database.write() as connection:
        file = begin_file(connection, 1, 1, "0" * 64, 1, [1], "vectors/")
        connection.execute(update(vector_file).values(state=state))
    before = described(settings.database_url)

    with migrating(settings.database_url) as config:
        with pytest.raises(RuntimeError, match="REGRAFT_VECTORS=sql") if refused else nullcontext():
            command.downgrade(config, "0017")
        command.upgrade(config, "head")

    assert described(settings.database_url) == before
    with closing(Database(settings.database_url)) as database, database.lookup() as connection:
        assert (file_row(connection, file.id) is not None) is refused


def test_files_of_vectors_survive_the_step_that_drops_a_column_of_theirs(settings: Settings) -> None:
    upgrade(settings)
    with closing(Database(settings.database_url)) as database, database.write() as connection:
        file = begin_file(connection, 1, 1, "0" * 64, 1, [1], "vectors/")

    with migrating(settings.database_url) as config:
        command.downgrade(config, "0024")
    assert execute(settings.database_url, "select live from vector_file") == [(0,)]
    with migrating(settings.database_url) as config:
        command.upgrade(config, "head")

    with closing(Database(settings.database_url)) as database, database.lookup() as connection:
        assert file_row(connection, file.id) == file


def test_a_release_that_knows_no_keys_of_galleries_gets_none_that_would_open_everything(settings: Settings) -> None:
    upgrade(settings)
    with closing(Database(settings.database_url)) as database, database.write() as connection:
        add_key(connection, "all", "query", None)
        add_key(connection, "one", "query", ["photos"])

    with migrating(settings.database_url) as config:
        command.downgrade(config, "0021")
        command.upgrade(config, "head")

    with closing(Database(settings.database_url)) as database, database.lookup() as connection:
        assert [(row.name, row.galleries) for row in all_keys(connection)] == [("all", None)]


def test_a_database_that_has_the_newest_schema_is_not_migrated(
    settings: Settings, next_revision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade(settings)
    migrated: list[str] = []
    monkeypatch.setattr(service.store.database.migration, "to_newest", lambda config: migrated.append("again"))

    upgrade(settings)
    assert migrated == []

    next_revision("pass")
    upgrade(settings)
    assert migrated == ["again"]


def test_many_connections_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    opened: list[str] = []

    def open_file(url: str, _: int) -> None:
        engine = sqlite_engine(url)
        with engine.connect() as connection:
            opened.append(connection.exec_driver_sql("PRAGMA journal_mode").scalar_one())
        engine.dispose()

    for turn in range(100):  # SQLite refuses some in one of twenty
        together(6, partial(open_file, f"sqlite:///{tmp_path / 'new'}-{turn}"))
    assert opened == ["wal"] * 600


def test_many_processes_may_upgrade_at_once(settings: Settings) -> None:
    created: list[bool] = []
    together(4, lambda _: created.append(upgrade(settings)))

    assert sorted(created) == [False, False, False, True]
    assert "gallery" in described(settings.database_url)


def test_a_process_waits_for_one_that_migrates_however_long(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service.store.database.connections, "BUSY_SECONDS", 0.01)
    with ThreadPoolExecutor() as others, migrating(settings.database_url) as config:
        other = others.submit(upgrade, settings)
        until(lambda: caplog.text.count("waiting_for_database") > 1, seconds=10)
        command.upgrade(config, "head")

    assert other.result() is False


REVISION = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "9999", "{head}"

def upgrade():
    {body}
"""


@pytest.fixture
def next_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write the body of one more migration."""
    copied = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, copied)
    monkeypatch.setattr(service.store.database.migration, "MIGRATIONS", copied)
    head = ScriptDirectory(str(copied)).get_current_head()
    return lambda body: (copied / "versions" / "9999_next.py").write_text(REVISION.format(body=body, head=head))


def test_a_migration_that_fails_in_the_middle_leaves_nothing(settings: Settings, next_revision: Any) -> None:
    upgrade(settings)
    before = described(settings.database_url)
    next_revision("op.create_table('half', sa.Column('id', sa.Integer)); op.execute('nonsense')")

    with pytest.raises(Exception, match="nonsense"):
        upgrade(settings)

    assert before == described(settings.database_url)


def test_rebuilding_a_parent_table_keeps_its_children(settings: Settings, next_revision: Any) -> None:
    upgrade(settings)
    database = Database(settings.database_url)
    with database.write() as connection:
        connection.execute(insert(version).values(id=1, name="v1", card={}, card_sha256="", created=0))
        connection.execute(insert(gallery).values(id=1, name="g", next_seq=1, created=0))
        row = {"gallery_id": 1, "external_id": "a", "metadata": {}, "seq": 1, "deleted": False}
        connection.execute(insert(item).values(id=1, created=0, **row))
        connection.execute(insert(embedding).values(item_id=1, version_id=1, origin="encoded", vector=b""))
    next_revision(
        "with op.batch_alter_table('item', recreate='always') as batch: batch.add_column(sa.Column('x', sa.Integer))"
    )

    upgrade(settings)

    with database.lookup() as connection:
        assert connection.execute(text("select count(*) from embedding")).scalar() == 1
        assert connection.execute(text("select x from item")).all() == [(None,)]
    database.close()


@pytest.mark.parametrize("revision", ["0004", "0015"])
def test_no_key_that_was_given_out_is_given_out_again(settings: Settings, revision: str) -> None:
    """Neither where a table holds rows when it is rebuilt nor where it is empty."""
    with migrating(settings.database_url) as config:
        command.upgrade(config, revision)
    url, counters = settings.database_url, "select name, seq from sqlite_sequence"
    execute(url, "insert into gallery (id, name, next_seq, created) values (1, 'g', 1, 0); delete from sqlite_sequence")
    counting = "select name, 9 from sqlite_master where type = 'table' and sql like '%AUTOINCREMENT%'"
    execute(url, f"insert into sqlite_sequence {counting}")
    before = execute(url, counters)

    upgrade(settings)

    after = execute(url, counters)
    assert ("gallery", 9) in before
    assert set(before) <= set(after)


def test_a_migration_that_breaks_a_foreign_key_is_refused(settings: Settings, next_revision: Any) -> None:
    upgrade(settings)
    next_revision('op.execute(\'insert into edge values (1, 7, 8, "identity", "added", "{}", "{}", null, "{}", 0)\')')

    with pytest.raises(DatabaseDamaged, match="refers to a missing row"):
        upgrade(settings)

    database = Database(settings.database_url)
    with database.lookup() as connection:
        assert connection.execute(text("select count(*) from edge")).scalar() == 0
    database.close()


EDGES_0001 = """
insert into version (id, name, card, card_sha256, created) values (1, 'v1', '{}', 'a', 5.0), (2, 'v2', '{}', 'b', 6.5),
    (3, 'v3', '{}', 'c', 7.5);
insert into edge (new_id, old_id, kind, evidence) values (3, 2, 'matrix', '{"kind": "matrix", "support": 7}'),
    (2, 1, 'truncate', '{"kind": "truncate", "scores": {"cmc@1": {"value": 0.5, "low": 0.4, "high": 0.6}}}')
"""


def execute(url: str, script: str) -> list[Any]:
    engine = create_engine(url)
    with engine.begin() as connection:
        found: list[Any] = []
        for statement in script.split(";"):
            answer = connection.execute(text(statement.replace(":", "\\:")))
            found = list(map(tuple, answer)) if answer.returns_rows else []
    engine.dispose()
    return found


def check_edges_survive_the_way_up_and_down(url: str) -> None:
    """0001 with rows -> 0002 -> 0001 -> newest."""
    with migrating(url) as config:
        command.upgrade(config, "0001")
    execute(url, EDGES_0001)

    with migrating(url) as config:
        command.upgrade(config, "head")
    columns = "id, new_id, old_id, kind, origin, created, folder"
    assert execute(url, f"select {columns} from edge order by id") == [
        (1, 2, 1, "truncate", "registered", 6.5, None),
        (2, 3, 2, "matrix", "registered", 7.5, None),
    ]
    database = Database(url)
    with database.write() as connection:
        rows = connection.execute(select(edge).order_by(edge.c.id)).all()
        assert rows[0].evidence["scores"]["cmc@1"] == {"value": 0.5, "low": 0.4, "high": 0.6}
        assert (rows[1].evidence["support"], rows[1].made, rows[1].files) == (7, {}, {})
        known = {"evidence": {"kind": "slerp"}, "made": {"seed": 0}, "files": {}, "created": 8.0}
        connection.execute(insert(edge).values(new_id=3, old_id=2, kind="slerp", origin="fitted", **known))
        connection.execute(insert(edge).values(new_id=3, old_id=1, kind="slerp", origin="fitted", **known))
    database.close()

    with migrating(url) as config:
        command.downgrade(config, "0001")
    assert execute(url, "select new_id, old_id, kind from edge order by new_id") == [
        (2, 1, "truncate"),
        (3, 2, "matrix"),
    ]
    with migrating(url) as config:
        command.upgrade(config, "head")
    assert execute(url, "select count(*) from edge") == [(2,)]


def test_edges_of_an_older_database_are_kept(settings: Settings) -> None:
    settings.data.mkdir(exist_ok=True)
    check_edges_survive_the_way_up_and_down(settings.database_url)


def test_two_edges_of_one_kind_between_two_versions_are_refused(settings: Settings) -> None:
    upgrade(settings)
    database = Database(settings.database_url)
    same = {"new_id": 2, "old_id": 1, "kind": "slerp", "evidence": {}, "made": {}, "files": {}, "created": 0}
    with database.write() as connection:
        for number in (1, 2):
            row: dict[str, Any] = {"id": number, "name": f"v{number}", "card": {}, "card_sha256": "", "created": 0}
            connection.execute(insert(version).values(row))
        connection.execute(insert(edge).values(origin="fitted", **same))

    with pytest.raises(IntegrityError), database.write() as connection:
        connection.execute(insert(edge).values(origin="added", **same))
    with pytest.raises(IntegrityError), database.write() as connection:
        connection.execute(insert(edge).values(origin="dreamt", **{**same, "kind": "matrix"}))
    database.close()


def test_deployments_of_the_first_release_keep_their_history(settings: Settings) -> None:
    """v1, v2, rolled back to v1, v3: what stands is v1 and v3, as it was."""
    with migrating(settings.database_url) as config:
        command.upgrade(config, "0001")
    engine = create_engine(settings.database_url)
    with engine.begin() as connection:
        for number in (1, 2, 3):
            connection.execute(text(f"insert into version values ({number}, 'v{number}', '{{}}', '', 0)"))
        connection.execute(text("insert into gallery values (1, 'g', 3, 9, 0), (2, 'other', 1, 9, 0)"))
        deployments = [
            (1, 1, "null", "superseded"),
            (2, 2, 1, "rolled_back"),
            (3, 1, 2, "superseded"),
            (4, 3, 1, "current"),
        ]
        for number, held, previous, state in deployments:
            values = f"{number}, 1, {held}, {previous}, null, '{state}', 0, '', {number}.5"
            connection.execute(text(f"insert into deployment values ({values})"))
        connection.execute(text("insert into deployment values (5, 2, 1, null, null, 'current', 0, '', 9.5)"))
    engine.dispose()

    upgrade(settings)

    database = Database(settings.database_url)
    with database.read() as connection:
        rows = history(connection, 1)
        other = history(connection, 2)
    database.close()
    assert [(row.id, row.undoes_id, row.since) for row in rows] == [
        (1, None, 1.5),
        (2, None, 2.5),
        (3, 2, 3.5),
        (4, None, 4.5),
    ]
    assert [row.id for row in rollback_chain(rows)] == [3, 4]
    assert [row.undoes_id for row in other] == [None]
    with migrating(settings.database_url) as config:
        command.downgrade(config, "0001")
        command.upgrade(config, "head")
