"""Embeddings in PostgreSQL's partitions: converted, made, filled by older programs, settled and emptied."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from alembic import command
from sqlalchemy import Connection, insert, text

from service.errors import DeletedMeanwhile
from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import migrating, upgrade
from service.store.galleries import partitions
from service.store.galleries.change_feed import changes
from service.store.galleries.embeddings import put_embeddings, vectors_of
from service.store.galleries.gallery import insert_gallery, take_seq
from service.store.tables import version
from staging.states.partition_rows import held, names, places, store
from staging.together import together

pytestmark = pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)

OLDER = "insert into embedding (item_id, version_id, origin, vector) values (:item, :version, 'encoded', :vector)"
"""How a program of the release before 0020 stores an embedding."""


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    """With the versions 1 and 2 and the galleries 1 and 2, whose items 1, 3 and 2, 4 hold an embedding of version 1."""
    upgrade(settings)
    with closing(Database(settings.database_url)) as opened:
        with opened.write() as connection:
            for name in ("v1", "v2"):
                connection.execute(insert(version).values(name=name, card={}, card_sha256="", created=1.5))
            galleries = [insert_gallery(connection, name) for name in ("g", "h")]
        for gallery_id in galleries:
            partitions.make(opened, gallery_id, 1)
        for name in ("a", "b"):
            for gallery_id in galleries:
                with opened.write() as connection:
                    store(connection, gallery_id, name)
        yield opened


def older(connection: Connection, item: int, version_id: int) -> None:
    connection.execute(text(OLDER), {"item": item, "version": version_id, "vector": b"12345678"})


START = [("embedding_1_1", 1, 1, 1), ("embedding_2_1", 2, 2, 1), ("embedding_1_1", 3, 1, 1), ("embedding_2_1", 4, 2, 1)]


def test_a_filled_database_is_converted_and_back_with_nothing_lost(database: Database, settings: Settings) -> None:
    whole = "select item_id, version_id, origin, vector, side, uncertainty, digest from embedding order by item_id"
    with database.write() as connection:
        older(connection, 3, 2)
        before = connection.execute(text(whole)).all()
    for revision in ("0019", "0020"):
        with migrating(settings.database_url) as config:
            (command.downgrade if revision == "0019" else command.upgrade)(config, revision)
        with database.lookup() as connection:
            assert sorted(connection.execute(text(whole)).all()) == sorted(before)

    assert places(database) == [*START[:3], ("embedding_1_2", 3, 1, 2), START[3]]
    with pytest.raises(DeletedMeanwhile), database.write() as connection:
        older(connection, 99, 1)


MANY_0019 = """
insert into version (name, card, card_sha256, created) values ('v1', '{}', '', 0);
insert into gallery (name, current_id, next_seq, created) select 'g' || n, 1, 2, 0 from generate_series(1, 210) n;
insert into item (gallery_id, external_id, metadata, seq, deleted, created)
    select gallery.id, cast(n as text), '{}', 1, false, 0
    from gallery, generate_series(1, case when gallery.id > 200 then 2 else 1 end) n;
insert into embedding (item_id, version_id, origin, vector) select id, 1, 'supplied', 'abcd' from item
"""
"""210 galleries, the last ten of which hold two embeddings."""


def test_more_places_than_one_transaction_can_lock_are_converted_largest_first(unmigrated: Settings) -> None:
    with migrating(unmigrated.database_url) as config:
        command.upgrade(config, "0019")
    with closing(Database(unmigrated.database_url)) as opened:
        with opened.write() as connection:
            connection.execute(text(MANY_0019))
        upgrade(unmigrated)
        unsettled = [gallery for partition, _, gallery, _ in places(opened) if partition == "embedding_default"]
        assert len(places(opened)) == 220
        assert sorted(unsettled) == list(range(191, 201))

        stopped = threading.Event()
        stopped.set()
        assert not partitions.settle(opened, stopped)
        assert partitions.settle(opened)
        assert {f"embedding_{gallery}_1" for _, _, gallery, _ in places(opened)} == {row[0] for row in places(opened)}


def test_what_an_older_program_stores_is_found_and_settles(database: Database) -> None:
    with database.write() as connection:
        connection.execute(text("delete from embedding where item_id = 3"))
        for item, version_id in ((3, 1), (1, 2), (3, 2), (2, 2)):
            older(connection, item, version_id)

    unsettled = {(1, 2), (3, 2), (2, 2)}
    assert {row[1::2] for row in places(database) if row[0] == "embedding_default"} == unsettled
    with database.read() as connection:
        assert sorted(vectors_of(connection, 1, [3])[3]) == [1, 2]
        seen = next(iter(changes(connection, 1, 0)))[-1][6]
    assert partitions.settle(database)
    assert {row[0] for row in places(database) if row[3] == 2} == {"embedding_1_2", "embedding_2_2"}
    with database.read() as connection:  # a reader that began before may have missed them: they are told of again
        told = {row[0] for block in changes(connection, 1, seen) for row in block}
    assert told == {1, 3}


def test_an_embedding_is_stored_though_no_partition_can_be_made(database: Database) -> None:
    with held(database, "lock table item in row exclusive mode"):
        partitions.make(database, 1, 2)
        with database.write() as connection:
            take_seq(connection, 1, 0)
            put_embeddings(connection, 1, 2, "encoded", [1], np.ones((1, 2), np.float32))

    assert ("embedding_default", 1, 1, 2) in places(database)
    assert partitions.settle(database)
    assert ("embedding_1_2", 1, 1, 2) in places(database)


def test_nothing_is_copied_while_it_cannot_be_attached(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Any] = []
    with database.write() as connection:
        older(connection, 1, 2)
    with monkeypatch.context() as patch, held(database, "lock table item in row exclusive mode"):
        patch.setattr(partitions, "LOCK_SECONDS", 0.05)
        patch.setattr(partitions, "PAUSE_SECONDS", 0.01)
        patch.setattr(partitions, "_make_beside", lambda *place: copied.append(place))
        assert not partitions.settle(database)

    assert copied == []
    assert partitions.settle(database)
    assert ("embedding_1_2", 1, 1, 2) in places(database)


def test_an_embedding_is_stored_though_another_comes_before_its_partition_is_attached(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(item_id: int) -> None:
        with database.write() as connection:
            take_seq(connection, 1, 0)
            put_embeddings(connection, 1, 2, "encoded", [item_id], np.ones((1, 2), np.float32))

    make_beside = partitions._make_beside

    def make_while_another_stores(*arguments: Any) -> str:
        put(3)
        return make_beside(*arguments)

    monkeypatch.setattr(partitions, "_make_beside", make_while_another_stores)
    partitions.make(database, 1, 2)
    put(1)
    monkeypatch.undo()

    assert {row[:2] for row in places(database) if row[3] == 2} == {("embedding_default", 1), ("embedding_default", 3)}
    assert partitions.settle(database)
    assert {row[:2] for row in places(database) if row[3] == 2} == {("embedding_1_2", 1), ("embedding_1_2", 3)}


def test_those_who_make_one_partition_at_once_make_it_once(database: Database) -> None:
    def put(number: int) -> None:
        partitions.make(database, 1, 2)
        with database.write() as connection:
            take_seq(connection, 1, 0)
            put_embeddings(connection, 1, 2, "encoded", [1 + 2 * (number % 2)], np.ones((1, 2), np.float32))

    together(4, put)
    partitions.settle(database)

    assert [row for row in places(database) if row[3] == 2] == [("embedding_1_2", n, 1, 2) for n in (1, 3)]


def test_a_partition_that_holds_rows_is_not_dropped_and_is_emptied_at_once(database: Database) -> None:
    timeout = text("show lock_timeout")
    partitions.drop(database, 1, 1)
    assert places(database) == START
    with database.write() as connection:
        before = connection.execute(timeout).scalar_one()
        assert partitions.empty(connection, 1, 1)
        assert connection.execute(timeout).scalar_one() == before
    for gallery_id in (1, 9):  # of the second there is none any more
        partitions.drop(database, gallery_id, 1)
    assert names(database) == {"embedding_default", "embedding_2_1"}
