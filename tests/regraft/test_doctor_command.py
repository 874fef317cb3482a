"""`regraft doctor` and `migrate`: a database that is missing, foreign or of another release."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from alembic import command

from service.store.database.migration import migrating, schema_revision


def test_the_doctor_makes_no_database_and_migrate_says_that_it_did(run, tmp_path):
    code, _, said = run("doctor", "--data", tmp_path / "d")

    assert (code, f"{tmp_path}/d/regraft.db does not exist" in said) == (1, True)
    assert not (tmp_path / "d").exists()
    assert "created its tables" in run("migrate", "--data", tmp_path / "d")[1]
    assert "is up to date" in run("migrate", "--data", tmp_path / "d")[1]
    assert run("doctor", "--data", tmp_path / "d")[:2] == (0, "no problems found\n")


def test_the_doctor_of_a_database_without_tables_says_so_and_makes_none(run, tmp_path):
    with closing(sqlite3.connect(tmp_path / "regraft.db")) as foreign:
        foreign.execute("create table mine (a)")

    code, _, said = run("doctor", "--data", tmp_path)

    assert (code, f"sqlite:///{tmp_path}/regraft.db has no Regraft tables" in said) == (1, True)
    with closing(sqlite3.connect(tmp_path / "regraft.db")) as foreign:
        assert foreign.execute("select name from sqlite_master").fetchall() == [("mine",)]


def test_the_doctor_does_not_migrate_a_database_that_an_earlier_release_may_use(run, tmp_path):
    url = f"sqlite:///{tmp_path}/regraft.db"
    with migrating(url) as config:
        command.upgrade(config, "0006")

    code, _, said = run("doctor", "--data", tmp_path)

    assert (code, f"{url} is of an earlier release (migration 0006 of " in said) == (1, True)
    assert schema_revision(url) == "0006"
    assert run("migrate", "--data", tmp_path)[0] == 0
    assert run("doctor", "--data", tmp_path)[:2] == (0, "no problems found\n")
